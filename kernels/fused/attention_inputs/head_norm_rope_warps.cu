// SPDX-License-Identifier: Apache-2.0
// Patch head_norm_rope.warp_per_head: norm, rotation and round trip of every head of q and of kv in
// one launch (head_norm_rope.cuh). Bound by memory: q and kv are read and written once, 8 * tokens
// * (heads + 1) * head_dim bytes.
#include "kernels/fused/attention_inputs/head_norm_rope.cuh"
#include "kernels/fused/attention_inputs/head_norm_rope_variants.h"

namespace isthmus::kernels {
namespace {

// Grid: [tokens, ceil((heads + 1) / kWarps)]. Block: kWarps warps.
__global__ __launch_bounds__(heads::kWarps* kWarpLanes) void NormRopeWarpPerHead(
    const __grid_constant__ heads::HeadParams params) {
  LetSuccessorStart();
  WaitForPredecessor();
  heads::NormRopeHeads(params, blockIdx.x, static_cast<int>(blockIdx.y) * heads::kWarps);
}

}  // namespace

absl::Status LaunchHeadNormRopeWarps(const HeadNormRopeArgs& args, const Exec& exec) {
  if (args.q.rows == 0) return absl::OkStatus();
  const heads::HeadParams params = heads::ParamsOf(args);
  return Launch(
      "NormRopeWarpPerHead",
      {.grid = dim3(static_cast<unsigned>(args.q.rows), CeilDiv(params.heads + 1, heads::kWarps)),
       .block = dim3(heads::kWarps * kWarpLanes),
       .overlaps_predecessor = true},
      exec, NormRopeWarpPerHead, params);
}

}  // namespace isthmus::kernels
