// SPDX-License-Identifier: Apache-2.0
// The forward pass of one step: new tokens of several sequences to logits, and their cache entries
// and states written on the way.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/compressor/compressor.h"
#include "kernels/core/device.h"
#include "kernels/core/device_batch.h"
#include "kernels/core/exec.h"
#include "kernels/core/kv_layout.h"
#include "kernels/core/tensor.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/sampling/sampling.h"
#include "services/model/model_config.h"
#include "services/model/row_draw.h"
#include "services/model/tap.h"
#include "services/model/weights.h"

namespace isthmus::model {

// What one pass computes. Data; everything in it is owned by the caller.
struct ForwardBatch {
  std::span<const int32_t> tokens;  // [rows], the rows of all sequences one after another.
  std::span<const kernels::SequenceKv> sequences;  // Cut `tokens`; first_row ascending, no gaps.

  // Rows whose logits are wanted, ascending; logits: [logit_rows, vocab], f32.
  std::span<const int64_t> logit_rows;
  // A rank of a tensor-parallel group writes the columns of its rows of the head only.
  kernels::MatrixView logits;

  // Out, one list per logit row, cleared by the caller: output tokens behind the row's token that
  // the model has drafted, verified and stored in the cache already. The row's logits are those
  // behind the last of them. Empty span: none are wanted, none are made.
  std::span<std::vector<int32_t>> accepted = {};
  // With `accepted`: how many of them each row may gain, at most max_accepted(); 0 for the last row
  // of a prompt. The caller's views have room for so many tokens behind their rows.
  std::span<const int64_t> accepted_limits = {};

  // One per logit row, or empty: what to draw from the row, where its logits serve nothing else.
  // `counter` counts without what the row gains in `accepted`.
  std::span<const std::optional<RowDraw>> draws = {};
  // Out, one per draw, all kNotDrawn before: the token of each row that the pass has drawn from, -1
  // where no logit is finite; in `logits` such a row is left as it was. A pass may draw from any
  // row with a draw or from none: the model does on a GPU, all or none (sampling.on_device).
  std::span<int32_t> drawn = {};

  const Tap* tap = nullptr;
};

// The interface between the engine and what computes: the model, or a script in simulations.
class Forward {
 public:
  virtual ~Forward() = default;

  // Runs the batch. A sequence's results do not depend, bit by bit, on the other sequences, on how
  // its tokens are cut into steps, or on the number of threads.
  // InvalidArgument: an empty batch, a token id outside the vocabulary, a position beyond the
  // model's limit, rows that the sequences do not cut exactly.
  virtual absl::Status Run(const ForwardBatch& batch, const kernels::Exec& exec) = 0;

  virtual int64_t vocab_size() const = 0;
  virtual int64_t max_positions() const = 0;
  virtual const kernels::KvLayout& layout() const = 0;

  // Tokens that a sequence can gain in one step beside the sampled one.
  virtual int64_t max_accepted() const { return 0; }
};

// The cache geometry of a model: what the layout is created from.
kernels::KvGeometry GeometryOf(const ModelConfig& config, kernels::Arithmetic arithmetic,
                               int page_tokens,
                               std::optional<kernels::EntryFormat> index_key_format = std::nullopt);

class DeviceSteps;

// The model, on the CPU or on a GPU: the operations are the same, and only what a step reads of its
// batch lies elsewhere. Whoever owns the weights must outlive it.
//
// On a GPU (exec.arch of Run names one: DeviceContext) the pages and states of `sequences` are
// device addresses, logits and taps are host memory as ever, and Run waits for the device once, at
// its end. Decode steps are captured as graphs (device_steps.h).
class ModelForward : public Forward {
 public:
  static absl::StatusOr<std::unique_ptr<ModelForward>> Create(const Weights* weights,
                                                              kernels::Arithmetic arithmetic,
                                                              int page_tokens);
  // Of views in any memory, with index keys in the arithmetic's format or another one.
  // ResourceExhausted: no device memory for constants.
  static absl::StatusOr<std::unique_ptr<ModelForward>> Create(
      const ModelViews& views, kernels::Arithmetic arithmetic, int page_tokens,
      std::optional<kernels::EntryFormat> index_key_format = std::nullopt);
  ~ModelForward() override;

  absl::Status Run(const ForwardBatch& batch, const kernels::Exec& exec) override;
  int64_t vocab_size() const override { return views_.config->vocab_size; }
  int64_t max_positions() const override { return views_.config->max_position_embeddings; }
  const kernels::KvLayout& layout() const override { return layout_; }

  // What a pass reads, in the memory of the architecture that runs it, for tools that call
  // operations one by one.
  struct StepInputs {
    int64_t rows = 0;                                    // As launched, padding included.
    const int32_t* tokens = nullptr;                     // [rows]; -1 in padding rows
    std::span<const int64_t> positions;                  // [rows]
    std::span<const kernels::SequenceKv> sequences;      // Empty on a GPU.
    const kernels::DeviceBatch* device_batch = nullptr;  // On a GPU.
    int64_t max_tokens = 0;                              // No sequence has more after the step.
    std::span<const int32_t> logit_rows;                 // -1 for padding.
    kernels::MatrixView logits;                          // [logit rows, rows of the head]
    const kernels::SamplingBatchArgs* draws = nullptr;   // From `logits`; null: none.
    // Called before each operation with its name, for tools that time them; null in serving.
    const std::function<void(absl::string_view)>* on_operation = nullptr;
  };
  // Enqueues the pass (on the CPU: runs it). `batch` is read for its tap alone.
  absl::Status Enqueue(const ForwardBatch& batch, const StepInputs& inputs,
                       const kernels::Exec& exec) const;

 private:
  struct Step;  // Buffers and positions of one pass (forward_step.h).

  ModelForward(const ModelViews& views, kernels::Arithmetic arithmetic, kernels::KvLayout layout);
  absl::Status PrepareDevice();
  absl::Status RunOnHost(const ForwardBatch& batch, const kernels::Exec& exec) const;
  absl::Status Validate(const ForwardBatch& batch) const;
  // Around the half layers: the streams to the first one's normed input; a half layer's output
  // back into the streams, and on to the next one's input; the last one's output back.
  absl::Status MixIn(const HyperConnectionWeights& hc, const kernels::VectorView& norm,
                     Step& step) const;
  absl::Status MixOutIn(const HyperConnectionWeights& hc, const kernels::VectorView& norm,
                        Step& step) const;
  absl::Status MixOut(Step& step) const;
  kernels::HyperConnectionPreArgs PreArgs(const HyperConnectionWeights& hc, const Step& step) const;
  kernels::HyperConnectionPostArgs PostArgs(const Step& step) const;
  absl::Status ReplaceStreams(int layer, Step& step) const;
  // A half layer's output, which every rank has a part of.
  absl::Status SumOverRanks(Step& step) const;
  absl::Status AttentionHalf(int layer, Step& step) const;
  absl::Status Queries(int layer, Step& step) const;
  absl::Status ExpandQueries(int layer, Step& step) const;
  absl::Status ProjectInput(int layer, Step& step) const;
  kernels::CompressorArgs CompressArgs(int layer, const Step& step) const;
  kernels::CompressorArgs CompressKeysArgs(int layer, const Step& step) const;
  absl::Status PrepareAttention(int layer, Step& step) const;
  absl::Status Select(int layer, Step& step) const;
  absl::Status Attend(int layer, Step& step) const;
  absl::Status FfnHalf(int layer, Step& step) const;
  absl::Status Head(Step& step) const;
  const LayerWeights& LayerAt(int index) const { return views_.layers[static_cast<size_t>(index)]; }

  const ModelViews views_;
  const kernels::Arithmetic arithmetic_;
  const kernels::KvLayout layout_;
  const std::vector<float> host_plain_frequency_;
  const std::vector<float> host_compressed_frequency_;
  // In the memory of the weights.
  std::span<const float> plain_frequency_;       // Layers of ratio 0.
  std::span<const float> compressed_frequency_;  // All others: YaRN.
  kernels::DeviceBuffer device_frequencies_;
  std::unique_ptr<DeviceSteps> device_steps_;  // Null without a device.
};

}  // namespace isthmus::model
