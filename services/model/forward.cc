// SPDX-License-Identifier: Apache-2.0
// The whole pass (model specification 2.1, 2.2): embedding, then per layer the attention half
// (forward_attention.cc) and the FFN half (forward_ffn.cc), then the head.
#include "services/model/forward.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/all_reduce/all_reduce.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/fused/post_pre/post_pre.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/linear/linear.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "services/base/status_macros.h"
#include "services/model/device_steps.h"
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

kernels::KvGeometry GeometryOf(const ModelConfig& config, Arithmetic arithmetic, int page_tokens,
                               std::optional<kernels::EntryFormat> index_key_format) {
  kernels::KvGeometry geometry;
  geometry.compress_ratios.assign(config.compress_ratios.begin(),
                                  config.compress_ratios.begin() + config.num_hidden_layers);
  geometry.head_dim = config.head_dim;
  geometry.rope_dim = config.qk_rope_head_dim;
  geometry.index_head_dim = config.index_head_dim;
  geometry.window = config.sliding_window;
  geometry.page_tokens = page_tokens;
  geometry.arithmetic = arithmetic;
  geometry.index_key_format = index_key_format;
  return geometry;
}

absl::StatusOr<std::unique_ptr<ModelForward>> ModelForward::Create(const Weights* weights,
                                                                   Arithmetic arithmetic,
                                                                   int page_tokens) {
  return Create(weights->views(), arithmetic, page_tokens);
}

absl::StatusOr<std::unique_ptr<ModelForward>> ModelForward::Create(
    const ModelViews& views, Arithmetic arithmetic, int page_tokens,
    std::optional<kernels::EntryFormat> index_key_format) {
  ISTHMUS_ASSIGN_OR_RETURN(kernels::KvLayout layout,
                           kernels::KvLayout::Create(GeometryOf(*views.config, arithmetic,
                                                                page_tokens, index_key_format)));
  std::unique_ptr<ModelForward> forward(new ModelForward(views, arithmetic, std::move(layout)));
  if (views.on_device) ISTHMUS_RETURN_IF_ERROR(forward->PrepareDevice());
  return forward;
}

ModelForward::ModelForward(const ModelViews& views, Arithmetic arithmetic, kernels::KvLayout layout)
    : views_(views),
      arithmetic_(arithmetic),
      layout_(std::move(layout)),
      host_plain_frequency_(PlainFrequency(*views.config)),
      host_compressed_frequency_(CompressedFrequency(*views.config)),
      plain_frequency_(host_plain_frequency_),
      compressed_frequency_(host_compressed_frequency_) {}

ModelForward::~ModelForward() = default;

absl::Status ModelForward::PrepareDevice() {
  const auto count = static_cast<int64_t>(plain_frequency_.size());
  ISTHMUS_ASSIGN_OR_RETURN(device_frequencies_, kernels::DeviceBuffer::Allocate(2 * count * 4));
  auto* plain = device_frequencies_.as<float>();
  ISTHMUS_RETURN_IF_ERROR(
      kernels::CopyToDevice(plain, host_plain_frequency_.data(), count * 4, nullptr));
  ISTHMUS_RETURN_IF_ERROR(
      kernels::CopyToDevice(plain + count, host_compressed_frequency_.data(), count * 4, nullptr));
  ISTHMUS_RETURN_IF_ERROR(kernels::DeviceStream().Synchronise());
  plain_frequency_ = {plain, static_cast<size_t>(count)};
  compressed_frequency_ = {plain + count, static_cast<size_t>(count)};
  device_steps_ = std::make_unique<DeviceSteps>(this, views_.head.rows);
  return absl::OkStatus();
}

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
  const int64_t columns = views_.head.rows;
  if (logit_rows != 0 && (batch.logits.rows != logit_rows || batch.logits.cols != columns)) {
    return absl::InvalidArgumentError(absl::StrCat("forward: logits are [", batch.logits.rows, ", ",
                                                   batch.logits.cols, "], expected [", logit_rows,
                                                   ", ", columns, "]"));
  }
  if (!batch.draws.empty() && columns != vocab_size()) {
    return absl::InvalidArgumentError(absl::StrCat("forward: draws are wanted of a rank with ",
                                                   columns, " columns of ", vocab_size()));
  }
  if (!batch.draws.empty() &&
      (batch.draws.size() != batch.logit_rows.size() || batch.drawn.size() != batch.draws.size())) {
    return absl::InvalidArgumentError(absl::StrCat("forward: ", batch.draws.size(), " draws and ",
                                                   batch.drawn.size(), " tokens of ", logit_rows,
                                                   " rows"));
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
  if (kernels::IsDevice(exec.arch) != views_.on_device) {
    return absl::InvalidArgumentError(
        absl::StrCat("forward: the weights are ", views_.on_device ? "" : "not ",
                     "on a device, the step is for architecture ", exec.arch));
  }
  return views_.on_device ? device_steps_->Run(batch, exec) : RunOnHost(batch, exec);
}

absl::Status ModelForward::RunOnHost(const ForwardBatch& batch, const kernels::Exec& exec) const {
  std::vector<int64_t> positions;
  StepInputs inputs;
  inputs.rows = static_cast<int64_t>(batch.tokens.size());
  positions.reserve(batch.tokens.size());
  for (const kernels::SequenceKv& sequence : batch.sequences) {
    for (int64_t t = 0; t < sequence.num_rows; ++t) {
      positions.push_back(sequence.start_position + t);
    }
    inputs.max_tokens = std::max(inputs.max_tokens, sequence.start_position + sequence.num_rows);
  }
  const std::vector<int32_t> logit_rows(batch.logit_rows.begin(), batch.logit_rows.end());
  inputs.tokens = batch.tokens.data();
  inputs.positions = positions;
  inputs.sequences = batch.sequences;
  inputs.logit_rows = logit_rows;
  inputs.logits = batch.logits;
  return Enqueue(batch, inputs, exec);
}

absl::Status ModelForward::Enqueue(const ForwardBatch& batch, const StepInputs& inputs,
                                   const kernels::Exec& exec) const {
  const ModelConfig& config = *views_.config;
  Step step(batch, inputs, exec, config.hidden_size);
  const bool replaces_streams = batch.tap != nullptr && batch.tap->input_streams;
  step.Mark("embed");
  ISTHMUS_RETURN_IF_ERROR(kernels::EmbedTokens(
      {.tokens = inputs.tokens, .table = views_.embed, .streams = step.streams}, exec));
  for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
    // A tap may replace the streams that a layer starts from, which is why it ends the one before.
    if (layer == 0 || replaces_streams) {
      if (replaces_streams) ISTHMUS_RETURN_IF_ERROR(ReplaceStreams(layer, step));
      const LayerWeights& w = LayerAt(layer);
      ISTHMUS_RETURN_IF_ERROR(MixIn(w.hc_attn, w.attn_norm, step));
    }
    ISTHMUS_RETURN_IF_ERROR(AttentionHalf(layer, step));
    ISTHMUS_RETURN_IF_ERROR(FfnHalf(layer, step));
    if (layer + 1 < config.num_hidden_layers && !replaces_streams) {
      const LayerWeights& next = LayerAt(layer + 1);
      ISTHMUS_RETURN_IF_ERROR(MixOutIn(next.hc_attn, next.attn_norm, step));
    } else {
      ISTHMUS_RETURN_IF_ERROR(MixOut(step));
    }
    step.Emit(layer, "streams", step.streams, {step.rows, Step::kStreams, config.hidden_size});
  }
  return Head(step);
}

absl::Status ModelForward::ReplaceStreams(int layer, Step& step) const {
  const float* const given = step.batch.tap->input_streams(layer);
  if (given == nullptr) return absl::OkStatus();
  const int64_t bytes = 4 * step.rows * step.streams.cols;
  if (views_.on_device) {
    return kernels::CopyToDevice(step.streams.data, given, bytes, step.exec.stream);
  }
  std::memcpy(step.streams.data, given, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

kernels::HyperConnectionPreArgs ModelForward::PreArgs(const HyperConnectionWeights& hc,
                                                      const Step& step) const {
  const ModelConfig& config = *views_.config;
  return {.streams = step.streams,
          .fn = hc.fn,
          .scale = hc.scale,
          .base = hc.base,
          .sinkhorn_iterations = config.hc_sinkhorn_iters,
          .epsilon = config.rms_norm_eps,
          .hc_epsilon = config.hc_eps,
          .x = step.x,
          .post = step.post,
          .comb = step.comb,
          .arithmetic = arithmetic_};
}

kernels::HyperConnectionPostArgs ModelForward::PostArgs(const Step& step) const {
  return {.y = step.y,
          .streams = step.streams,
          .post = step.post,
          .comb = step.comb,
          .out = step.streams,
          .arithmetic = arithmetic_};
}

absl::Status ModelForward::MixIn(const HyperConnectionWeights& hc, const kernels::VectorView& norm,
                                 Step& step) const {
  step.Mark("hyper_connection.pre");
  ISTHMUS_RETURN_IF_ERROR(kernels::HyperConnectionPre(PreArgs(hc, step), step.exec));
  step.Mark("rms_norm.hidden");
  return kernels::RmsNorm({.x = step.x,
                           .weight = norm,
                           .out = step.x,
                           .epsilon = views_.config->rms_norm_eps,
                           .arithmetic = arithmetic_},
                          step.exec);
}

absl::Status ModelForward::MixOutIn(const HyperConnectionWeights& hc,
                                    const kernels::VectorView& norm, Step& step) const {
  step.Mark("post_pre");
  return kernels::PostPre({.post = PostArgs(step),
                           .pre = PreArgs(hc, step),
                           .norm_weight = norm,
                           .norm_epsilon = views_.config->rms_norm_eps},
                          step.exec);
}

absl::Status ModelForward::MixOut(Step& step) const {
  step.Mark("hyper_connection.post");
  return kernels::HyperConnectionPost(PostArgs(step), step.exec);
}

// Each rank's part was rounded when it was made, so that half the bytes travel.
absl::Status ModelForward::SumOverRanks(Step& step) const {
  if (step.exec.communicator == nullptr) return absl::OkStatus();
  step.Mark("all_reduce");
  const bool reference = arithmetic_ == Arithmetic::kReference;
  return kernels::AllReduce({.x = step.y,
                             .out = step.y,
                             .wire = reference ? kernels::DType::kBf16 : kernels::DType::kF32,
                             .round_output = reference},
                            step.exec);
}

absl::Status ModelForward::Head(Step& step) const {
  const auto rows = static_cast<int64_t>(step.inputs.logit_rows.size());
  if (rows == 0) return absl::OkStatus();
  const ModelConfig& config = *views_.config;
  const MatrixView streams = step.Take(rows, step.streams.cols);
  step.Mark("gather_rows");
  ISTHMUS_RETURN_IF_ERROR(kernels::GatherRows(
      {.x = step.streams, .rows = step.inputs.logit_rows.data(), .out = streams}, step.exec));
  const MatrixView x = step.Take(rows, config.hidden_size);
  const HyperConnectionWeights& hc = views_.hc_head;
  step.Mark("hyper_connection.head");
  ISTHMUS_RETURN_IF_ERROR(kernels::HyperConnectionHead({.streams = streams,
                                                        .fn = hc.fn,
                                                        .scale = hc.scale,
                                                        .base = hc.base,
                                                        .epsilon = config.rms_norm_eps,
                                                        .hc_epsilon = config.hc_eps,
                                                        .x = x,
                                                        .arithmetic = arithmetic_},
                                                       step.exec));
  step.Mark("rms_norm.hidden");
  ISTHMUS_RETURN_IF_ERROR(kernels::RmsNorm({.x = x,
                                            .weight = views_.norm,
                                            .out = x,
                                            .epsilon = config.rms_norm_eps,
                                            .arithmetic = arithmetic_},
                                           step.exec));
  step.Mark("linear.head");
  ISTHMUS_RETURN_IF_ERROR(
      kernels::Linear({.x = x, .weight = views_.head, .out = step.inputs.logits}, step.exec));
  step.Emit(-1, "logits", step.inputs.logits);
  if (step.inputs.draws == nullptr) return absl::OkStatus();
  step.Mark("sampling");
  return kernels::SampleBatch(*step.inputs.draws, step.exec);
}

}  // namespace isthmus::model
