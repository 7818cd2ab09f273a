// SPDX-License-Identifier: Apache-2.0
// Every tensor of a layer in one order, for those who place them somewhere else. A visitor has
//
//   void Matrix(kernels::WeightView& w);       tiled on a GPU
//   void Vector(kernels::VectorView& v);       f32
//   void Floats(const float*& p, int64_t n);
//   void Ids(std::span<const int64_t>& ids);
//   void Experts(LayerWeights& w);             after all experts: the array of their views
//
// and may change what it is given.
#pragma once

#include <cstdint>
#include <span>

#include "services/model/weights.h"

namespace isthmus::model {

template <typename Visitor>
void VisitHyperConnection(HyperConnectionWeights& w, Visitor& visitor) {
  visitor.Matrix(w.fn);
  visitor.Vector(w.scale);
  visitor.Vector(w.base);
}

template <typename Visitor>
void VisitCompressor(CompressorWeights& w, Visitor& visitor) {
  visitor.Matrix(w.wkv);
  visitor.Matrix(w.wgate);
  visitor.Floats(w.ape, int64_t{w.ratio} * w.width);
  visitor.Vector(w.norm);
}

template <typename Visitor>
void VisitExpert(kernels::ExpertWeights& w, Visitor& visitor) {
  visitor.Matrix(w.w1);
  visitor.Matrix(w.w3);
  visitor.Matrix(w.w2);
}

template <typename Visitor>
void VisitLayer(LayerWeights& w, Visitor& visitor) {
  VisitHyperConnection(w.hc_attn, visitor);
  visitor.Vector(w.attn_norm);
  visitor.Matrix(w.wq_a);
  visitor.Vector(w.q_norm);
  visitor.Matrix(w.wq_b);
  visitor.Matrix(w.wkv);
  visitor.Vector(w.kv_norm);
  visitor.Vector(w.attn_sink);
  for (kernels::WeightView& group : w.wo_a) visitor.Matrix(group);
  visitor.Matrix(w.wo_b);
  if (w.compressor) VisitCompressor(*w.compressor, visitor);
  if (w.indexer) {
    visitor.Matrix(w.indexer->wq_b);
    visitor.Matrix(w.indexer->weights_proj);
    VisitCompressor(w.indexer->compressor, visitor);
  }
  VisitHyperConnection(w.hc_ffn, visitor);
  visitor.Vector(w.ffn_norm);
  visitor.Matrix(w.gate);
  visitor.Vector(w.gate_bias);
  visitor.Ids(w.hash_ids);
  for (kernels::ExpertWeights& expert : w.experts) VisitExpert(expert, visitor);
  VisitExpert(w.shared, visitor);
  visitor.Experts(w);
}

// Places tensors one behind another, aligned for any kernel: first without memory, to count.
class Placement {
 public:
  static constexpr int64_t kAlign = 256;

  explicit Placement(std::byte* base = nullptr) : base_(base) {}

  // Where the next `bytes` lie; null while counting.
  std::byte* Take(int64_t bytes) {
    std::byte* at = base_ != nullptr ? base_ + used_ : nullptr;
    used_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

// Bytes of a matrix's fp8 block scales, which keep the file's layout; 0 in other formats, whose
// scales lie in the tiles.
inline int64_t BlockScaleBytes(const kernels::WeightView& w) {
  if (w.format != kernels::WeightFormat::kFp8Block128) return 0;
  return (w.first_row + w.rows + 127) / 128 * kernels::ScaleColumns(w);
}

}  // namespace isthmus::model
