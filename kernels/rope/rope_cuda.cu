// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of rope, any architecture: a block per token, whose first threads compute
// the token's sines and cosines for all of its heads. The same operations as the CPU path, so the
// same bits. Bound by memory: the rotated elements are read and written once.
//
// Letters: h head, i pair.
#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/math.h"
#include "kernels/rope/rope_variants.h"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 256;
static_assert(kMaxRopePairs <= kThreads);

// Grid: tokens. Block: kThreads.
__global__ __launch_bounds__(kThreads) void RopeBlockPerToken(
    float* x,                              // [tokens, heads * head_dim], rows x_stride apart
    const int64_t* __restrict__ position,  // [tokens]
    const float* __restrict__ frequency,   // [pairs]
    int64_t heads, int64_t head_dim, int64_t x_stride, int pairs, bool inverse, bool round) {
  __shared__ float cosine[kMaxRopePairs];
  __shared__ float sine[kMaxRopePairs];
  const int thread = static_cast<int>(threadIdx.x);
  LetSuccessorStart();
  WaitForPredecessor();
  if (thread < pairs) {
    float s = 0.0f;
    float c = 0.0f;
    SinCos(static_cast<float>(position[blockIdx.x]) * frequency[thread], &s, &c);
    cosine[thread] = c;
    sine[thread] = inverse ? -s : s;
  }
  __syncthreads();
  float* row = x + int64_t{blockIdx.x} * x_stride;
  for (int64_t item = thread; item < heads * pairs; item += kThreads) {
    const int64_t h = item / pairs;
    const int i = static_cast<int>(item % pairs);
    float* pair = row + (h + 1) * head_dim - 2 * pairs + 2 * i;
    const float a = pair[0];
    const float b = pair[1];
    const float even = a * cosine[i] + b * -sine[i];
    const float odd = b * cosine[i] + a * sine[i];
    pair[0] = round ? RoundBf16(even) : even;
    pair[1] = round ? RoundBf16(odd) : odd;
  }
}

}  // namespace

absl::Status LaunchRopeCuda(const RopeArgs& args, const Exec& exec) {
  if (args.x.rows == 0) return absl::OkStatus();
  return Launch("RopeBlockPerToken",
                {.grid = dim3(static_cast<unsigned>(args.x.rows)),
                 .block = dim3(kThreads),
                 .overlaps_predecessor = true},
                exec, RopeBlockPerToken, args.x.f32(0), args.positions.data(),
                args.frequency.data(), args.x.cols / args.head_dim, args.head_dim,
                args.x.row_stride, static_cast<int>(args.frequency.size()), args.inverse,
                args.arithmetic == Arithmetic::kReference);
}

}  // namespace isthmus::kernels
