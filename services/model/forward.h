// SPDX-License-Identifier: Apache-2.0
// The forward pass of one step: new tokens of several sequences to logits, and their cache entries
// and states written on the way.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/core/exec.h"
#include "kernels/core/kv_layout.h"
#include "kernels/core/tensor.h"
#include "services/model/model_config.h"
#include "services/model/tap.h"
#include "services/model/weights.h"

namespace isthmus::model {

// What one pass computes. Data; everything in it is owned by the caller.
struct ForwardBatch {
  std::span<const int32_t> tokens;  // [rows], the rows of all sequences one after another.
  std::span<const kernels::SequenceKv> sequences;  // Cut `tokens`; first_row ascending, no gaps.

  // Rows whose logits are wanted, ascending; logits: [logit_rows, vocab], f32.
  std::span<const int64_t> logit_rows;
  kernels::MatrixView logits;

  // Out, one list per logit row, cleared by the caller: output tokens behind the row's token that
  // the model has drafted, verified and stored in the cache already. The row's logits are those
  // behind the last of them. Empty span: none are wanted, none are made.
  std::span<std::vector<int32_t>> accepted = {};
  // With `accepted`: how many of them each row may gain, at most max_accepted(); 0 for the last row
  // of a prompt. The caller's views have room for so many tokens behind their rows.
  std::span<const int64_t> accepted_limits = {};

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
                               int page_tokens);

// The model on the CPU. `weights` must outlive it.
class ModelForward : public Forward {
 public:
  static absl::StatusOr<std::unique_ptr<ModelForward>> Create(const Weights* weights,
                                                              kernels::Arithmetic arithmetic,
                                                              int page_tokens);

  absl::Status Run(const ForwardBatch& batch, const kernels::Exec& exec) override;
  int64_t vocab_size() const override { return weights_->config().vocab_size; }
  int64_t max_positions() const override { return weights_->config().max_position_embeddings; }
  const kernels::KvLayout& layout() const override { return layout_; }

 private:
  struct Step;  // Buffers and positions of one pass (forward_step.h).

  ModelForward(const Weights* weights, kernels::Arithmetic arithmetic, kernels::KvLayout layout);
  absl::Status Validate(const ForwardBatch& batch) const;
  absl::Status Embed(const ForwardBatch& batch, Step& step) const;
  // Around each half layer: the streams to its normed input, and its output back into the streams.
  absl::Status MixIn(const HyperConnectionWeights& hc, const kernels::VectorView& norm,
                     Step& step) const;
  absl::Status MixOut(Step& step) const;
  absl::Status AttentionHalf(int layer, Step& step) const;
  absl::Status Queries(int layer, const kernels::MatrixView& quantised_x, Step& step) const;
  absl::Status Compress(int layer, Step& step) const;
  absl::Status QueryIndex(int layer, const kernels::MatrixView& q,
                          const kernels::MatrixView& weights, Step& step) const;
  absl::Status Select(int layer, Step& step) const;
  absl::Status Attend(int layer, Step& step) const;
  absl::Status FfnHalf(int layer, Step& step) const;
  absl::Status Head(const ForwardBatch& batch, Step& step) const;

  const Weights* weights_;
  const kernels::Arithmetic arithmetic_;
  const kernels::KvLayout layout_;
  const std::vector<float> plain_frequency_;       // Layers of ratio 0.
  const std::vector<float> compressed_frequency_;  // All others: YaRN.
};

}  // namespace isthmus::model
