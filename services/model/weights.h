// SPDX-License-Identifier: Apache-2.0
// The weights of one model, as the operations read them: views at their stored width, in one of two
// residencies (decisions/0001-stored-width-and-two-residencies.md).
//
//   packed  copied once into the kPanels layout (kernels/core/weight.h); the file's pages are given
//           back. NVFP4 matrices that are lossless casts of MXFP4 (specification 6.3) are verified
//           in full and held as kMxfp4.
//   mapped  kRowMajor views straight into the files, for checkpoints larger than memory: walking
//           the layers goes through the page cache, and only vectors (norms, biases, ape, sinks;
//           about 7 MB for 43 layers) are copied. Casts are recognised by a sample: a matrix counts
//           as a cast when its weight_scale_2 is a power of two and all scales of its first and
//           middle rows pass the test of specification 6.3; it then stays kNvfp4 with
//           is_mxfp4_cast set. (A matrix that was rounded to NVFP4 fails for 7 of 8 scales, so the
//           sample decides wrongly only for a file made to deceive.)
//
// bf16 vectors are held as f32 (exact). Embedding, head, gate, compressor and weights_proj matrices
// stay bf16, hyper-connection matrices f32, everything else fp8 or fp4. The embedding is kRowMajor
// in both residencies, because its rows are gathered.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/tensor.h"
#include "kernels/core/weight.h"
#include "kernels/experts/experts.h"
#include "services/base/thread_pool.h"
#include "services/model/model_config.h"

namespace isthmus::model {

class WeightStorage;

struct WeightOptions {
  enum Residency : uint8_t {
    kAuto,    // kPacked when the weights fit into packed_limit_bytes, else kMapped.
    kPacked,  // Fails with ResourceExhausted when memory cannot be had.
    kMapped,
  };
  Residency residency = kAuto;
  int64_t packed_limit_bytes = int64_t{8} << 30;
  // Replaces index_topk of config.json; part of the fingerprint, so all workers need the same one.
  std::optional<int64_t> index_topk;
  // What config.json says, of whoever has read it already; else it is read. It must outlive Load.
  const ModelConfig* config = nullptr;
};

struct HyperConnectionWeights {
  kernels::WeightView fn;     // [24, 4 * hidden] f32; head: [4, 4 * hidden]
  kernels::VectorView scale;  // [3]; head: [1]
  kernels::VectorView base;   // [24]; head: [4]
};

// width = dim (ratio 128) or 2 * dim (ratio 4); dim = head_dim, or index_head_dim in the indexer.
struct CompressorWeights {
  kernels::WeightView wkv;     // [width, hidden] bf16
  kernels::WeightView wgate;   // [width, hidden] bf16
  const float* ape = nullptr;  // [ratio, width]
  int ratio = 0;
  int width = 0;
  kernels::VectorView norm;  // [dim]
};

struct IndexerWeights {
  kernels::WeightView wq_b;          // [index_n_heads * index_head_dim, q_lora_rank] fp8
  kernels::WeightView weights_proj;  // [index_n_heads, hidden] bf16
  CompressorWeights compressor;
};

struct LayerWeights {
  int ratio = 0;  // 0, 4 or 128

  HyperConnectionWeights hc_attn;
  kernels::VectorView attn_norm;                // [hidden]
  kernels::WeightView wq_a;                     // [q_lora_rank, hidden] fp8
  kernels::VectorView q_norm;                   // [q_lora_rank]
  kernels::WeightView wq_b;                     // [heads * head_dim, q_lora_rank] fp8
  kernels::WeightView wkv;                      // [head_dim, hidden] fp8
  kernels::VectorView kv_norm;                  // [head_dim]
  kernels::VectorView attn_sink;                // [heads]
  std::vector<kernels::WeightView> wo_a;        // Per output group: [o_lora_rank, group_inputs] fp8
  kernels::WeightView wo_b;                     // [hidden, o_groups * o_lora_rank] fp8
  std::optional<CompressorWeights> compressor;  // Ratio 4 and 128.
  std::optional<IndexerWeights> indexer;        // Ratio 4.

  HyperConnectionWeights hc_ffn;
  kernels::VectorView ffn_norm;                 // [hidden]
  kernels::WeightView gate;                     // [experts, hidden] bf16
  kernels::VectorView gate_bias;                // [experts]; size 0 in hash layers
  std::span<const int64_t> hash_ids;            // [vocab * k]; empty in other layers
  std::vector<kernels::ExpertWeights> experts;  // [n_routed_experts]
  // On a GPU: the same array in device memory.
  const kernels::ExpertWeights* device_experts = nullptr;
  kernels::ExpertWeights shared;
};

// What a forward pass reads: a whole model or one rank's share of it, all in one memory. The layers
// and the config lie with their owner.
struct ModelViews {
  const ModelConfig* config = nullptr;  // Of the whole model.
  kernels::WeightView embed;            // [vocab, hidden] bf16, kRowMajor
  kernels::WeightView head;             // [vocab or the rank's rows, hidden] bf16
  kernels::VectorView norm;             // [hidden]
  HyperConnectionWeights hc_head;
  std::span<const LayerWeights> layers;
  bool on_device = false;  // The views point into device memory.
};

// What was found, for the log and for tests. Matrices are counted, three per routed expert.
struct WeightReport {
  int num_shards = 0;
  int64_t num_tensors = 0;
  int num_mtp_stages = 0;             // Validated, not executed.
  int64_t mxfp4_expert_matrices = 0;  // Stored as MXFP4.
  int64_t nvfp4_expert_matrices = 0;  // Stored as NVFP4, casts included.
  int64_t lossless_casts = 0;         // NVFP4 that is MXFP4 in disguise.
  int64_t fp8_expert_matrices = 0;    // "-Base" checkpoints.
  bool is_packed = false;
  int64_t allocated_bytes = 0;  // Anonymous memory held for weights.
  int64_t mapped_bytes = 0;     // Files still mapped.
};

class Weights {
 public:
  // Opens `checkpoint_dir` (checkpoint.h), holds every tensor against the plan (tensor_plan.h) and
  // builds the views. `threads`, when given, pack in parallel; not kept.
  //
  // NotFound: a file is missing. InvalidArgument: the checkpoint is malformed or does not fit its
  // config; the message names up to 16 tensors, each with what was expected and found. Block scales
  // that are NaN and hash ids out of range or doubled are errors too (fp8 scales and hash ids
  // always; fp4 scales all in packed, sampled rows in mapped). ResourceExhausted: see kPacked.
  static absl::StatusOr<std::unique_ptr<Weights>> Load(const std::string& checkpoint_dir,
                                                       const WeightOptions& options,
                                                       ThreadPool* threads = nullptr);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // With overrides applied.
  const ModelConfig& config() const { return config_; }
  const kernels::WeightView& embed() const { return embed_; }  // [vocab, hidden] bf16, kRowMajor
  const kernels::WeightView& head() const { return head_; }    // [vocab, hidden] bf16
  const kernels::VectorView& norm() const { return norm_; }    // [hidden]
  const HyperConnectionWeights& hc_head() const { return hc_head_; }
  // `layer` in [0, num_hidden_layers), checked.
  const LayerWeights& layer(int layer) const;
  // All of them; valid as long as this object.
  ModelViews views() const;

  // Hash of the effective config and, in name order, of every tensor's name, dtype, shape and a
  // content sample: all bytes up to 16 KiB, three runs of 64 bytes up to 256 KiB, one run in the
  // middle above. Does not depend on residency or on the cut into shards.
  uint64_t fingerprint() const { return fingerprint_; }
  const WeightReport& report() const { return report_; }

 private:
  friend class WeightBuilder;
  Weights();

  ModelConfig config_;
  kernels::WeightView embed_;
  kernels::WeightView head_;
  kernels::VectorView norm_;
  HyperConnectionWeights hc_head_;
  std::vector<LayerWeights> layers_;
  uint64_t fingerprint_ = 0;
  WeightReport report_;
  std::unique_ptr<WeightStorage> storage_;  // Behind all views.
};

}  // namespace isthmus::model
