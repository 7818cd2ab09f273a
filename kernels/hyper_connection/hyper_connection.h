// SPDX-License-Identifier: Apache-2.0
// Manifold-constrained hyper-connections: four residual streams, mixed around each half layer
// (model specification 2.3, 2.4, 2.5). Streams v[t, m, :], flattened stream-major.
//
//   pre   r = rsqrt(mean(v^2) + epsilon); mix = r * (fn v); pre, post, comb by sigmoid, 2 * sigmoid
//         and softmax + Sinkhorn (20 passes, the first of them the softmax with its column pass);
//         x[t] = round( sum_m pre[m] v[m] )
//   post  v'[j] = round( post[j] y + sum_i comb[i][j] v[i] )     first index of comb = source
//   stream head  pre[m] = sigmoid(mix[m] * scale + base[m]) + hc_epsilon; x[t] = round( sum_m
//   pre[m] v[m] )
//
// Shapes     streams: [tokens, 4 * hidden]. fn: [24 or 4, 4 * hidden]. scale: [3 or 1].
//            base: [24 or 4]. post: [tokens, 4]. comb: [tokens, 16], comb[source * 4 +
//            destination]. x, y: [tokens, hidden].
// Types      f32. post and comb are never rounded. On a GPU, in reference arithmetic, streams, x, y
//            and out may each be bf16 instead.
// Layout     Rows may be strided.
// Aliasing   HyperConnectionPost may write streams in place. Nothing else may overlap.
// Numerics   f32; the mix as in kernels/core/gemm.h; round is to bf16 in reference arithmetic.
// Workspace  tokens * 24 floats; fused, tokens * hidden / 64 * 25.
// Phases     Prefill, decode.
// Errors     InvalidArgument  A shape, type or stride breaks this contract.
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"
#include "kernels/core/weight.h"

namespace isthmus::kernels {

inline constexpr int kNumStreams = 4;
inline constexpr int kNumMixes = (2 + kNumStreams) * kNumStreams;  // 24

struct HyperConnectionPreArgs {
  MatrixView streams;  // [tokens, 4 * hidden]
  WeightView fn;       // [24, 4 * hidden]
  VectorView scale;    // [3]: pre, post, comb
  VectorView base;     // [24]
  int sinkhorn_iterations = 20;
  float epsilon = 1e-6f;     // Inside the rsqrt.
  float hc_epsilon = 1e-6f;  // Added to pre and inside Sinkhorn.
  MatrixView x;              // [tokens, hidden], out
  MatrixView post;           // [tokens, 4], out
  MatrixView comb;           // [tokens, 16], out
  Arithmetic arithmetic = Arithmetic::kReference;
};
absl::Status HyperConnectionPre(const HyperConnectionPreArgs& args, const Exec& exec);
absl::Status HyperConnectionPreDefinition(const HyperConnectionPreArgs& args, const Exec& exec);

struct HyperConnectionPostArgs {
  MatrixView y;        // [tokens, hidden]
  MatrixView streams;  // [tokens, 4 * hidden], the residual
  MatrixView post;     // [tokens, 4]
  MatrixView comb;     // [tokens, 16]
  MatrixView out;      // [tokens, 4 * hidden]; may be streams
  Arithmetic arithmetic = Arithmetic::kReference;
};
absl::Status HyperConnectionPost(const HyperConnectionPostArgs& args, const Exec& exec);
absl::Status HyperConnectionPostDefinition(const HyperConnectionPostArgs& args, const Exec& exec);

struct HyperConnectionHeadArgs {
  MatrixView streams;  // [tokens, 4 * hidden]
  WeightView fn;       // [4, 4 * hidden]
  VectorView scale;    // [1]
  VectorView base;     // [4]
  float epsilon = 1e-6f;
  float hc_epsilon = 1e-6f;
  MatrixView x;  // [tokens, hidden], out
  Arithmetic arithmetic = Arithmetic::kReference;
};
absl::Status HyperConnectionHead(const HyperConnectionHeadArgs& args, const Exec& exec);
absl::Status HyperConnectionHeadDefinition(const HyperConnectionHeadArgs& args, const Exec& exec);

// Bytes of scratch that any of the three takes on the CPU.
int64_t HyperConnectionScratchBytes(int64_t tokens, int64_t hidden, int threads);

// All patches of the three operations.
std::span<const Patch* const> HyperConnectionPatches();

// pre[4], post[4], comb[16] of one token from its 24 mixes (specification 2.3), f32.
void SplitMixes(const float* mixes, const float* scale, const float* base, int sinkhorn_iterations,
                float hc_epsilon, float* pre, float* post, float* comb);

}  // namespace isthmus::kernels
