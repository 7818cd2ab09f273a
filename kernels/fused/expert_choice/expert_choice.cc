// SPDX-License-Identifier: Apache-2.0
// Validation, the trusted path and the variant table of expert_choice.
#include "kernels/fused/expert_choice/expert_choice.h"

#include "absl/strings/str_cat.h"
#include "kernels/fused/expert_choice/expert_choice_variants.h"
#include "kernels/gate/gate_variants.h"
#include "kernels/linear/linear.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr Patch kSplitK = {
    .name = "expert_choice.split_k",
    .summary =
        "Logits, scores and choice in one launch whose blocks share K, since the router's few rows "
        "of weights would keep few multiprocessors busy, and the choice waited for a launch.",
    .phases = kPhaseDecode,
    .default_on = true,
    // As linear.swap_ab.
    .bound = {NumericClass::kReducedPrecision, /*factor=*/2.0, /*floor=*/1e-3},
    .test = "ExpertChoiceTest",
    .decision = "kernels/fused/expert_choice/decisions/0001-split-k.md"};
constexpr const Patch* kPatches[] = {&kSplitK};

constexpr int64_t kMostTokens = 64;
constexpr int64_t kMostExperts = 256;  // Eight a lane of the warp that chooses.

bool FitsSplitK(const ExpertChoiceArgs& args) {
  const WeightView& w = args.weight;
  return args.x.rows >= 1 && args.x.rows <= kMostTokens && w.rows <= kMostExperts && w.cols > 0 &&
         w.format == WeightFormat::kBf16 && w.layout == WeightLayout::kMmaTiles &&
         w.first_col == 0 && w.first_row % 16 == 0 &&
         reinterpret_cast<uintptr_t>(w.elements) % 16 == 0;
}

constexpr ExpertChoiceVariant kVariants[] = {
    {&kSplitK, kSm90Up, FitsSplitK, LaunchExpertChoiceSplitK},
    {nullptr, {kArchCpu, kAnyCuda.end}, nullptr, LaunchExpertChoiceInTurn},
};

LinearArgs LinearOf(const ExpertChoiceArgs& args) {
  return {.x = args.x, .weight = args.weight, .out = args.gate.logits};
}

}  // namespace

std::span<const Patch* const> ExpertChoicePatches() { return kPatches; }
std::span<const ExpertChoiceVariant> ExpertChoiceVariants() { return kVariants; }

absl::Status LaunchExpertChoiceInTurn(const ExpertChoiceArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(Linear(LinearOf(args), exec));
  return Gate(args.gate, exec);
}

absl::Status ExpertChoice(const ExpertChoiceArgs& args, const Exec& exec) {
  const GateArgs& gate = args.gate;
  ISTHMUS_RETURN_IF_ERROR(ValidateGate(gate, exec.arch));
  if (gate.scores.data != gate.logits.data || gate.scores.row_stride != gate.logits.row_stride) {
    return absl::InvalidArgumentError("expert_choice: gate.scores is not gate.logits");
  }
  if (args.x.dtype != DType::kF32 || args.x.cols != args.weight.cols ||
      args.x.rows != gate.logits.rows || args.weight.rows != gate.logits.cols) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expert_choice: x is [", args.x.rows, ", ", args.x.cols, "], weight [", args.weight.rows,
        ", ", args.weight.cols, "], logits [", gate.logits.rows, ", ", gate.logits.cols, "]"));
  }
  ISTHMUS_ASSIGN_OR_RETURN(const ExpertChoiceVariant* variant,
                           Choose(ExpertChoiceVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
