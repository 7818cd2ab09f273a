// SPDX-License-Identifier: Apache-2.0
// Several sequences with all inputs of the indexer, on the host and in device memory, for the tests
// of its CUDA variants.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/core/index_key.h"
#include "kernels/core/quantise.h"
#include "kernels/indexer/indexer_variants.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/sequence_cache.h"

namespace isthmus::kernels::testing {

struct IndexerCase {
  const char* name = "";
  int64_t heads = 4;
  int64_t topk = 8;
  int dim = 128;
  Arithmetic arithmetic = Arithmetic::kReference;
  EntryFormat format = EntryFormat::kKeyFp4;
  struct Part {
    int64_t start;
    int64_t rows;
  };
  std::vector<Part> parts = {};  // One sequence each.
  int64_t padding_rows = 0;
};
inline void PrintTo(const IndexerCase& c, std::ostream* os) { *os << c.name; }

// What a run leaves.
struct IndexerOutput {
  std::vector<float> scores;      // [rows, stride]; empty without a dump
  std::vector<int32_t> selected;  // [rows, topk]
};

class IndexerBatch {
 public:
  IndexerBatch(const IndexerCase& c, uint64_t seed) : case_(c), layout_(Layout(c)) {
    for (const IndexerCase::Part& part : c.parts) {
      const int64_t tokens = part.start + part.rows;
      caches_.push_back(std::make_unique<SequenceCache>(layout_, tokens));
      views_.push_back(caches_.back()->View(rows_, part.rows, part.start));
      rows_ += part.rows;
      max_visible_ = std::max(max_visible_, VisibleKeys(tokens - 1));
      const int64_t keys = VisibleKeys(tokens - 1);
      const std::vector<float> values = NormalValues(seed + views_.size(), keys * c.dim);
      for (int64_t j = 0; j < keys; ++j) WriteKey(views_.size() - 1, j, values.data() + j * c.dim);
    }
    // Rows lie apart, and padding rows hold NaN.
    const int64_t all = rows_ + c.padding_rows;
    q.assign(static_cast<size_t>(all * q_stride()), std::numeric_limits<float>::quiet_NaN());
    w.assign(static_cast<size_t>(all * w_stride()), std::numeric_limits<float>::quiet_NaN());
    const int64_t width = c.heads * c.dim;
    for (int64_t r = 0; r < rows_; ++r) {
      const auto row = static_cast<uint64_t>(r);
      std::vector<float> one = NormalValues(seed + 1000 + row, width);
      std::vector<float> weights = NormalValues(seed + 2000 + row, c.heads, 0.1f);
      if (c.arithmetic == Arithmetic::kReference) {
        RoundTripFp4Row(one.data(), width, one.data());
        RoundBf16Row(weights.data(), c.heads, weights.data());
      }
      std::copy(one.begin(), one.end(), q.begin() + r * q_stride());
      std::copy(weights.begin(), weights.end(), w.begin() + r * w_stride());
    }
  }

  void WriteKey(size_t sequence, int64_t j, const float* x) {
    const PagedEntries entries = caches_[sequence]->Entries(kIndexKey, plane());
    EncodeIndexKeyAs(plane().format, x, case_.dim, entries.data(j), entries.scale(j));
  }
  EntryPlane plane() const { return layout_.Plane(kIndexKey, 0); }
  int64_t rows() const { return rows_; }
  int64_t q_stride() const { return case_.heads * case_.dim + 12; }
  int64_t w_stride() const { return case_.heads + 3; }
  int64_t scores_stride() const { return max_visible_ + 5; }
  int64_t visible(int64_t row) const {
    for (const SequenceKv& view : views_) {
      if (row < view.first_row + view.num_rows) {
        return VisibleKeys(view.start_position + row - view.first_row);
      }
    }
    return 0;
  }

  IndexerOutput RunOnHost(absl::Status (*operation)(const IndexerArgs&, const Exec&),
                          bool has_dump) {
    IndexerOutput out;
    out.selected.assign(static_cast<size_t>(rows_ * case_.topk), 99);
    if (has_dump) out.scores.assign(static_cast<size_t>(rows_ * scores_stride()), 99.0f);
    IndexerArgs args = Args(rows_, q.data(), w.data(), out.selected.data());
    args.sequences = views_;
    if (has_dump) args.scores = out.scores.data();
    const absl::Status status = operation(args, Exec{});
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }

  // Padding rows must come back untouched. `max_tokens` 0: as long as the longest sequence. `shift`
  // as DeviceSequences has it.
  IndexerOutput RunOnDevice(absl::Status (*launch)(const IndexerArgs&, const Exec&), bool has_dump,
                            const TestDevice& device, Exec exec, int64_t max_tokens = 0,
                            int64_t shift = 0) {
    const int64_t all = rows_ + case_.padding_rows;
    const DeviceCopy<float> device_q(q);
    const DeviceCopy<float> device_w(w);
    const DeviceSequences sequences(layout_, views_, case_.padding_rows, shift);
    DeviceBatch batch = sequences.batch();
    batch.max_tokens = std::max(batch.max_tokens, max_tokens);
    const int64_t stride = std::max(scores_stride(), VisibleKeys(batch.max_tokens));
    const DeviceCopy<int32_t> selected(all * case_.topk, 0x77);
    const DeviceCopy<float> scores(has_dump ? all * stride : 0, 0x77);
    IndexerArgs args = Args(all, device_q.data(), device_w.data(), selected.data());
    args.device_batch = &batch;
    args.scores_stride = stride;
    args.key_plane = Shifted(args.key_plane, shift);
    if (has_dump) args.scores = scores.data();
    const absl::Status valid = ValidateIndexer(args);
    EXPECT_TRUE(valid.ok()) << valid;
    const absl::Status status = launch(args, exec);
    EXPECT_TRUE(status.ok()) << status;
    device.Finish();
    EXPECT_TRUE(selected.Intact());
    EXPECT_TRUE(scores.Intact());
    IndexerOutput out = {.scores = scores.ToHost(), .selected = selected.ToHost()};
    for (size_t i = static_cast<size_t>(rows_ * case_.topk); i < out.selected.size(); ++i) {
      EXPECT_EQ(out.selected[i], 0x77777777);
    }
    out.selected.resize(static_cast<size_t>(rows_ * case_.topk));
    if (!has_dump) return out;
    for (int64_t i = rows_ * stride; i < all * stride; ++i) {
      EXPECT_EQ(std::bit_cast<uint32_t>(out.scores[static_cast<size_t>(i)]), 0x77777777u);
    }
    std::vector<float> cut;  // To the host's stride.
    for (int64_t r = 0; r < rows_; ++r) {
      const auto row = out.scores.begin() + r * stride;
      cut.insert(cut.end(), row, row + scores_stride());
    }
    out.scores = cut;
    return out;
  }

  IndexerArgs Args(int64_t rows, float* q_data, float* w_data, int32_t* selected) const {
    IndexerArgs args;
    args.q = {q_data, DType::kF32, rows, case_.heads * case_.dim, q_stride()};
    args.w = {w_data, DType::kF32, rows, case_.heads, w_stride()};
    args.num_heads = case_.heads;
    args.dim = case_.dim;
    args.topk = case_.topk;
    args.key_plane = plane();
    args.selected = selected;
    args.scores_stride = scores_stride();
    args.arithmetic = case_.arithmetic;
    return args;
  }
  // The sequences in device memory, as they are now.
  DeviceSequences Upload() const { return DeviceSequences(layout_, views_, case_.padding_rows); }

  std::vector<float> q;  // [rows + padding, q_stride()]
  std::vector<float> w;  // [rows + padding, w_stride()]

 private:
  static KvLayout Layout(const IndexerCase& c) {
    KvGeometry geometry;
    geometry.compress_ratios = {kIndexRatio};
    geometry.head_dim = 128;
    geometry.index_head_dim = c.dim;
    geometry.arithmetic = c.arithmetic;
    geometry.index_key_format = c.format;
    return *KvLayout::Create(geometry);
  }

  IndexerCase case_;
  KvLayout layout_;
  std::vector<std::unique_ptr<SequenceCache>> caches_;
  std::vector<SequenceKv> views_;
  int64_t rows_ = 0;
  int64_t max_visible_ = 0;
};

}  // namespace isthmus::kernels::testing
