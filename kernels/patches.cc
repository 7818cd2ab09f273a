// SPDX-License-Identifier: Apache-2.0
#include "kernels/patches.h"

#include <vector>

#include "kernels/all_reduce/all_reduce.h"
#include "kernels/attention/attention.h"
#include "kernels/compressor/compressor.h"
#include "kernels/experts/experts.h"
#include "kernels/fused/attention_inputs/attention_inputs.h"
#include "kernels/fused/expert_choice/expert_choice.h"
#include "kernels/fused/post_pre/post_pre.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/indexer/indexer.h"
#include "kernels/linear/linear.h"
#include "kernels/sampling/sampling.h"

namespace isthmus::kernels {

std::span<const Patch* const> AllPatches() {
  static const std::vector<const Patch*> kAll = [] {
    std::vector<const Patch*> all;
    for (const std::span<const Patch* const> some :
         {AllReducePatches(), AttentionPatches(), CompressorPatches(), ExpertsPatches(),
          AttentionInputsPatches(), ExpertChoicePatches(), PostPrePatches(),
          HyperConnectionPatches(), IndexerPatches(), LinearPatches(), SamplingPatches()}) {
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }();
  return kAll;
}

absl::StatusOr<PatchSet> ResolvePatches(std::map<std::string, bool> config, bool batch_invariant) {
  // Each takes rows of one phase or few of them, and rounds or adds as no other variant does. Told
  // by running prefix hits, saved sequences and a disturbed engine on a GPU with one patch at a
  // time (tests/fidelity), or by the phases that the patch names.
  constexpr absl::string_view kBoundToRows[] = {
      "attention.split_mma",   "attention.prefill_mma", "attention.prefill_widened",
      "expert_choice.split_k", "indexer.fused_select",  "linear.swap_ab",
      "linear.tiles_large"};
  if (batch_invariant) {
    for (const absl::string_view name : kBoundToRows) config.try_emplace(std::string(name), false);
  }
  return PatchSet::Resolve(AllPatches(), config);
}

std::map<std::string, bool> NoPatches() {
  std::map<std::string, bool> off;
  for (const Patch* patch : AllPatches()) off[std::string(patch->name)] = false;
  return off;
}

}  // namespace isthmus::kernels
