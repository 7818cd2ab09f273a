// SPDX-License-Identifier: Apache-2.0
// The router of a layer as one operation: Gate over the logits x·wᵀ.
//
//   gate.logits = Linear(x, weight), then Gate(gate), whose scores take the logits' place
//
// Shapes, types, layout, numerics, devices: those of linear and gate. x: [tokens, K]. weight:
//            [experts, K].
// Aliasing   gate.scores is gate.logits; nothing else may overlap.
// Workspace  Those of the two; in one launch at most tokens * experts * 8 floats more, and
//            Exec::counters.
// Phases     Prefill, decode.
// Errors     InvalidArgument  An argument breaks the contract of its operation, or gate.scores is
//                             not gate.logits.
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"
#include "kernels/core/weight.h"
#include "kernels/gate/gate.h"

namespace isthmus::kernels {

struct ExpertChoiceArgs {
  MatrixView x;       // [tokens, K]
  WeightView weight;  // [experts, K]
  GateArgs gate;
};

absl::Status ExpertChoice(const ExpertChoiceArgs& args, const Exec& exec);

std::span<const Patch* const> ExpertChoicePatches();

}  // namespace isthmus::kernels
