// SPDX-License-Identifier: Apache-2.0
// The FFN half of a layer (model specification 2.2, 5): gate and experts.
#include "kernels/experts/experts.h"
#include "kernels/fused/expert_choice/expert_choice.h"
#include "services/base/status_macros.h"
#include "services/model/forward_step.h"

namespace isthmus::model {

using kernels::MatrixView;

absl::Status ModelForward::FfnHalf(int layer, Step& step) const {
  const ModelConfig& config = *views_.config;
  const LayerWeights& w = LayerAt(layer);
  const kernels::Workspace::Scope half(step.exec.workspace);
  step.Emit(layer, "hc_ffn_post", step.post);
  step.Emit(layer, "hc_ffn_comb", step.comb, {step.rows, Step::kStreams, Step::kStreams});
  step.Emit(layer, "ffn_in", step.x);

  const int64_t k = config.num_experts_per_tok;
  const MatrixView scores = step.Take(step.rows, config.n_routed_experts);
  const MatrixView weights = step.Take(step.rows, k);
  auto* ids = step.scope.Take<int32_t>(step.rows * k);
  step.Mark("expert_choice");
  ISTHMUS_RETURN_IF_ERROR(kernels::ExpertChoice(
      {.x = step.x,
       .weight = w.gate,
       .gate = {.logits = scores,
                .scores = scores,
                .bias = w.gate_bias,
                .hash_ids = w.hash_ids,
                .token_ids = {step.inputs.tokens, static_cast<size_t>(step.rows)},
                .k = k,
                .route_scale = config.routed_scaling_factor,
                .ids = ids,
                .weights = weights.f32(0)}},
      step.exec));
  step.Emit(layer, "router_scores", scores);
  step.Emit(layer, "router_ids", {ids, kernels::DType::kI32, step.rows, k, k});
  step.Emit(layer, "router_weights", weights);

  const MatrixView routed =
      step.has_tap() ? step.Take(step.rows, config.hidden_size) : MatrixView{};
  step.Mark("experts");
  ISTHMUS_RETURN_IF_ERROR(kernels::Experts({.x = step.x,
                                            .ids = ids,
                                            .weights = weights.f32(0),
                                            .k = k,
                                            .experts = w.experts,
                                            .device_experts = w.device_experts,
                                            .shared = &w.shared,
                                            .limit = config.swiglu_limit,
                                            .shared_limit = config.swiglu_limit,
                                            .out = step.y,
                                            .routed = routed,
                                            .arithmetic = arithmetic_},
                                           step.exec));
  ISTHMUS_RETURN_IF_ERROR(SumOverRanks(step));
  if (step.has_tap()) step.Emit(layer, "routed_out", routed);
  step.Emit(layer, "ffn_out", step.y);
  return absl::OkStatus();
}

}  // namespace isthmus::model
