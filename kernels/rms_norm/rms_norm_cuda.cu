// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of rms_norm, any architecture. A block normalises a row: the row passes
// through shared memory, where sixteen lanes add the squares in the order of the CPU path, so that
// both give the same bits. Bound by memory and, for few rows, by those sums: hidden / 16 dependent
// FMAs. Traffic: x is read twice, the second time from L1 or L2, and out is written once.
#include <algorithm>

#include "kernels/core/async_copy.cuh"
#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/rms_norm/rms_norm_variants.h"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kPartialSums = 16;
constexpr int64_t kSectorFloats = 8;  // Of a prefetch.
constexpr int64_t kChunk = 4096;      // Elements that pass through shared memory at a time.
static_assert(kChunk % kPartialSums == 0);

// Grid: tokens. Block: kThreads. Shared memory: kChunk floats, static. x and out may be one buffer,
// so neither is __restrict__.
__global__ __launch_bounds__(kThreads) void RmsNormBlockPerRow(
    const float* x,                    // [tokens, hidden], rows x_stride apart
    const float* __restrict__ weight,  // [hidden], or null
    float* out,                        // [tokens, hidden], rows out_stride apart
    int64_t hidden, int64_t x_stride, int64_t out_stride, float epsilon, bool round) {
  __shared__ float chunk[kChunk];
  __shared__ float row_scale;
  const int thread = static_cast<int>(threadIdx.x);
  LetSuccessorStart();
  if (weight != nullptr) {
    for (int64_t k = kSectorFloats * thread; k < hidden; k += kSectorFloats * kThreads) {
      PrefetchL2(weight + k);
    }
  }
  WaitForPredecessor();
  const float* x_row = x + int64_t{blockIdx.x} * x_stride;
  float* out_row = out + int64_t{blockIdx.x} * out_stride;

  float sum = 0.0f;  // Of the first warp: lanes i and i + 16 both hold partial sum i.
  for (int64_t begin = 0; begin < hidden; begin += kChunk) {
    const int64_t count = hidden - begin < kChunk ? hidden - begin : kChunk;
    for (int64_t k = thread; k < count; k += kThreads) chunk[k] = x_row[begin + k];
    __syncthreads();
    if (thread < kWarpLanes) {
      for (int64_t k = thread % kPartialSums; k < count; k += kPartialSums) {
        sum = fmaf(chunk[k], chunk[k], sum);
      }
    }
    __syncthreads();
  }
  if (thread < kWarpLanes) {
    for (int lanes = kPartialSums / 2; lanes > 0; lanes /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, lanes);
    }
    const float mean = sum / static_cast<float>(hidden);
    if (thread == 0) row_scale = 1.0f / std::sqrt(mean + epsilon);
  }
  __syncthreads();
  const float scale = row_scale;
  for (int64_t k = thread; k < hidden; k += kThreads) {
    float value = x_row[k] * scale;
    if (weight != nullptr) value *= weight[k];
    out_row[k] = round ? RoundBf16(value) : value;
  }
}

}  // namespace

absl::Status LaunchRmsNormCuda(const RmsNormArgs& args, const Exec& exec) {
  if (args.x.rows == 0) return absl::OkStatus();
  return Launch("RmsNormBlockPerRow",
                {.grid = dim3(static_cast<unsigned>(args.x.rows)),
                 .block = dim3(kThreads),
                 .overlaps_predecessor = true},
                exec, RmsNormBlockPerRow, args.x.f32(0),
                args.weight.size != 0 ? args.weight.f32() : nullptr, args.out.f32(0), args.x.cols,
                args.x.row_stride, args.out.row_stride, args.epsilon,
                args.arithmetic == Arithmetic::kReference);
}

}  // namespace isthmus::kernels
