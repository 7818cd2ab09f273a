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

namespace isthmus::kernels {

std::span<const Patch* const> AllPatches() {
  static const std::vector<const Patch*> kAll = [] {
    std::vector<const Patch*> all;
    for (const std::span<const Patch* const> some :
         {AllReducePatches(), AttentionPatches(), CompressorPatches(), ExpertsPatches(),
          AttentionInputsPatches(), ExpertChoicePatches(), PostPrePatches(),
          HyperConnectionPatches(), IndexerPatches(), LinearPatches()}) {
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }();
  return kAll;
}

std::map<std::string, bool> NoPatches() {
  std::map<std::string, bool> off;
  for (const Patch* patch : AllPatches()) off[std::string(patch->name)] = false;
  return off;
}

}  // namespace isthmus::kernels
