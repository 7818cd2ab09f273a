// SPDX-License-Identifier: Apache-2.0
// What stands between two half layers, as one operation: HyperConnectionPost of the half layer that
// ends, HyperConnectionPre of the one that begins, and the RMSNorm of its input.
//
//   post.out  = HyperConnectionPost(post)
//   pre.x, pre.post, pre.comb = HyperConnectionPre(pre), whose streams are post.out
//   pre.x     = RmsNorm(pre.x, norm_weight, norm_epsilon), where there is a norm_weight
//
// Shapes, types, layout, numerics: those of the three. norm_weight: [hidden] f32, or of size 0.
// Types      On a GPU, in reference arithmetic, all of y, streams, out and x may be bf16.
// Aliasing   post.out may be post.streams, pre.post may be post.post, pre.comb may be post.comb.
//            Nothing else may overlap.
// Workspace  Fused, tokens * hidden / 64 * 25 floats.
// Phases     Prefill, decode.
// Errors     InvalidArgument  An argument breaks the contract of its operation, or pre.streams is
//                             not post.out.
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/hyper_connection/hyper_connection.h"

namespace isthmus::kernels {

struct PostPreArgs {
  HyperConnectionPostArgs post;
  HyperConnectionPreArgs pre;
  VectorView norm_weight;  // [hidden], or size 0
  float norm_epsilon = 1e-6f;
};

absl::Status PostPre(const PostPreArgs& args, const Exec& exec);
absl::Status PostPreDefinition(const PostPreArgs& args, const Exec& exec);

std::span<const Patch* const> PostPrePatches();

}  // namespace isthmus::kernels
