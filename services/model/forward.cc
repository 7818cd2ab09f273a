// SPDX-License-Identifier: Apache-2.0
// The whole pass (model specification 2.1, 2.2): embedding, then per layer the attention half
// (forward_attention.cc) and the FFN half (forward_ffn.cc), then the head.
#include "services/model/forward.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/formats.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/linear/linear.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "services/base/status_macros.h"
#include "services/model/forward_step.h"

namespace isthmus::model {
namespace {

using kernels::Arithmetic;
using kernels::MatrixView;

std::vector<float> PlainFrequency(const ModelConfig& config) {
  return kernels::RopeFrequencies(
      {.rope_dim = config.qk_rope_head_dim, .theta = config.rope_theta, .original_positions = 0});
}

std::vector<float> CompressedFrequency(const ModelConfig& config) {
  return kernels::RopeFrequencies(
      {.rope_dim = config.qk_rope_head_dim,
       .theta = config.compress_rope_theta,
       .original_positions = config.rope_scaling.original_max_position_embeddings,
       .factor = config.rope_scaling.factor,
       .beta_fast = config.rope_scaling.beta_fast,
       .beta_slow = config.rope_scaling.beta_slow});
}

}  // namespace

kernels::KvGeometry GeometryOf(const ModelConfig& config, Arithmetic arithmetic, int page_tokens) {
  kernels::KvGeometry geometry;
  geometry.compress_ratios.assign(config.compress_ratios.begin(),
                                  config.compress_ratios.begin() + config.num_hidden_layers);
  geometry.head_dim = config.head_dim;
  geometry.rope_dim = config.qk_rope_head_dim;
  geometry.index_head_dim = config.index_head_dim;
  geometry.window = config.sliding_window;
  geometry.page_tokens = page_tokens;
  geometry.arithmetic = arithmetic;
  return geometry;
}

absl::StatusOr<std::unique_ptr<ModelForward>> ModelForward::Create(const Weights* weights,
                                                                   Arithmetic arithmetic,
                                                                   int page_tokens) {
  ISTHMUS_ASSIGN_OR_RETURN(
      kernels::KvLayout layout,
      kernels::KvLayout::Create(GeometryOf(weights->config(), arithmetic, page_tokens)));
  return std::unique_ptr<ModelForward>(new ModelForward(weights, arithmetic, std::move(layout)));
}

ModelForward::ModelForward(const Weights* weights, Arithmetic arithmetic, kernels::KvLayout layout)
    : weights_(weights),
      arithmetic_(arithmetic),
      layout_(std::move(layout)),
      plain_frequency_(PlainFrequency(weights->config())),
      compressed_frequency_(CompressedFrequency(weights->config())) {}

absl::Status ModelForward::Validate(const ForwardBatch& batch) const {
  const auto rows = static_cast<int64_t>(batch.tokens.size());
  if (rows == 0) return absl::InvalidArgumentError("forward: the batch has no tokens");
  for (int64_t t = 0; t < rows; ++t) {
    const int32_t token = batch.tokens[static_cast<size_t>(t)];
    if (token < 0 || token >= vocab_size()) {
      return absl::InvalidArgumentError(absl::StrCat("forward: token ", t, " has id ", token,
                                                     ", the vocabulary has ", vocab_size()));
    }
  }
  int64_t next = 0;
  for (const kernels::SequenceKv& sequence : batch.sequences) {
    if (sequence.first_row != next || sequence.num_rows <= 0) {
      return absl::InvalidArgumentError(absl::StrCat("forward: a sequence has rows ",
                                                     sequence.first_row, " + ", sequence.num_rows,
                                                     ", expected to start at row ", next));
    }
    next += sequence.num_rows;
    const int64_t end = sequence.start_position + sequence.num_rows;
    if (end > max_positions()) {
      return absl::InvalidArgumentError(absl::StrCat("forward: a sequence would have ", end,
                                                     " tokens, the model's limit is ",
                                                     max_positions()));
    }
  }
  if (next != rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("forward: sequences have ", next, " rows, the batch has ", rows));
  }
  const auto logit_rows = static_cast<int64_t>(batch.logit_rows.size());
  if (logit_rows != 0 && (batch.logits.rows != logit_rows || batch.logits.cols != vocab_size())) {
    return absl::InvalidArgumentError(absl::StrCat("forward: logits are [", batch.logits.rows, ", ",
                                                   batch.logits.cols, "], expected [", logit_rows,
                                                   ", ", vocab_size(), "]"));
  }
  for (int64_t row : batch.logit_rows) {
    if (row < 0 || row >= rows) {
      return absl::InvalidArgumentError(
          absl::StrCat("forward: logits wanted of row ", row, " of ", rows));
    }
  }
  return absl::OkStatus();
}

absl::Status ModelForward::Run(const ForwardBatch& batch, const kernels::Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(Validate(batch));
  const ModelConfig& config = weights_->config();
  Step step(batch, exec, config.hidden_size);
  for (const kernels::SequenceKv& sequence : batch.sequences) {
    for (int64_t t = 0; t < sequence.num_rows; ++t) {
      step.positions.push_back(sequence.start_position + t);
    }
  }
  ISTHMUS_RETURN_IF_ERROR(Embed(batch, step));
  for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (batch.tap != nullptr && batch.tap->input_streams) {
      if (const float* given = batch.tap->input_streams(layer); given != nullptr) {
        std::memcpy(step.streams.data, given,
                    sizeof(float) * static_cast<size_t>(step.rows * step.streams.cols));
      }
    }
    ISTHMUS_RETURN_IF_ERROR(AttentionHalf(layer, step));
    ISTHMUS_RETURN_IF_ERROR(FfnHalf(layer, step));
    step.Emit(layer, "streams", step.streams, {step.rows, Step::kStreams, config.hidden_size});
  }
  return Head(batch, step);
}

absl::Status ModelForward::Embed(const ForwardBatch& batch, Step& step) const {
  const int64_t hidden = weights_->config().hidden_size;
  const auto* table = static_cast<const uint16_t*>(weights_->embed().elements);
  for (int64_t t = 0; t < step.rows; ++t) {
    const uint16_t* row = table + int64_t{batch.tokens[static_cast<size_t>(t)]} * hidden;
    float* out = step.streams.f32(t);
    for (int64_t d = 0; d < hidden; ++d) out[d] = kernels::Bf16Value(row[d]);
    for (int64_t m = 1; m < Step::kStreams; ++m) {
      std::memcpy(out + m * hidden, out, sizeof(float) * static_cast<size_t>(hidden));
    }
  }
  return absl::OkStatus();
}

absl::Status ModelForward::MixIn(const HyperConnectionWeights& hc, const kernels::VectorView& norm,
                                 Step& step) const {
  const ModelConfig& config = weights_->config();
  ISTHMUS_RETURN_IF_ERROR(
      kernels::HyperConnectionPre({.streams = step.streams,
                                   .fn = hc.fn,
                                   .scale = hc.scale,
                                   .base = hc.base,
                                   .sinkhorn_iterations = config.hc_sinkhorn_iters,
                                   .epsilon = config.rms_norm_eps,
                                   .hc_epsilon = config.hc_eps,
                                   .x = step.x,
                                   .post = step.post,
                                   .comb = step.comb,
                                   .arithmetic = arithmetic_},
                                  step.exec));
  return kernels::RmsNorm({.x = step.x,
                           .weight = norm,
                           .out = step.x,
                           .epsilon = config.rms_norm_eps,
                           .arithmetic = arithmetic_},
                          step.exec);
}

absl::Status ModelForward::MixOut(Step& step) const {
  return kernels::HyperConnectionPost({.y = step.y,
                                       .streams = step.streams,
                                       .post = step.post,
                                       .comb = step.comb,
                                       .out = step.streams,
                                       .arithmetic = arithmetic_},
                                      step.exec);
}

absl::Status ModelForward::Head(const ForwardBatch& batch, Step& step) const {
  const auto rows = static_cast<int64_t>(batch.logit_rows.size());
  if (rows == 0) return absl::OkStatus();
  const ModelConfig& config = weights_->config();
  const MatrixView streams = step.Take(rows, step.streams.cols);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(streams.f32(r), step.streams.f32(batch.logit_rows[static_cast<size_t>(r)]),
                sizeof(float) * static_cast<size_t>(streams.cols));
  }
  const MatrixView x = step.Take(rows, config.hidden_size);
  const HyperConnectionWeights& hc = weights_->hc_head();
  ISTHMUS_RETURN_IF_ERROR(kernels::HyperConnectionHead({.streams = streams,
                                                        .fn = hc.fn,
                                                        .scale = hc.scale,
                                                        .base = hc.base,
                                                        .epsilon = config.rms_norm_eps,
                                                        .hc_epsilon = config.hc_eps,
                                                        .x = x,
                                                        .arithmetic = arithmetic_},
                                                       step.exec));
  ISTHMUS_RETURN_IF_ERROR(kernels::RmsNorm({.x = x,
                                            .weight = weights_->norm(),
                                            .out = x,
                                            .epsilon = config.rms_norm_eps,
                                            .arithmetic = arithmetic_},
                                           step.exec));
  ISTHMUS_RETURN_IF_ERROR(
      kernels::Linear({.x = x, .weight = weights_->head(), .out = batch.logits}, step.exec));
  step.Emit(-1, "logits", batch.logits);
  return absl::OkStatus();
}

}  // namespace isthmus::model
