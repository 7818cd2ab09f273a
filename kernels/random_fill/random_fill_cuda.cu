// SPDX-License-Identifier: Apache-2.0
// random_fill on any GPU, trusted. Bound by memory: every byte is written once.
#include <algorithm>

#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/random_fill/random_fill_variants.h"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 8192;

// 64 well mixed bits of a place (the finaliser of SplitMix64).
__device__ __forceinline__ uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Uniform in [-1, 1).
__device__ __forceinline__ float Uniform(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-23f - 1.0f;
}

__device__ __forceinline__ uint32_t WordOf(const RandomPart& part, uint64_t bits) {
  const auto low = static_cast<uint32_t>(bits);
  const auto high = static_cast<uint32_t>(bits >> 32);
  if (part.kind == RandomKind::kBytes) return low;
  if (part.kind == RandomKind::kF32) {
    return std::bit_cast<uint32_t>(Uniform(low) * part.limit + part.offset);
  }
  if (part.kind == RandomKind::kBf16) {
    return uint32_t{Bf16Bits(Uniform(low) * part.limit)} |
           uint32_t{Bf16Bits(Uniform(high) * part.limit)} << 16;
  }
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t byte = (low >> (8 * i)) & 0xffu;
    if (part.kind == RandomKind::kFp8) {
      if ((byte & 0x7fu) == 0x7fu) byte ^= 1u;
    } else {
      byte = (part.base + (byte & part.mask)) & 0xffu;
    }
    word |= byte << (8 * i);
  }
  return word;
}

// Grid: any. Block: kThreads; a thread takes words a grid apart. Shared memory: none.
__global__ __launch_bounds__(kThreads) void RandomFillKernel(
    std::byte* to,  // [planes][records][first, second]
    int64_t words, int64_t words_per_plane, int64_t words_per_record, int64_t plane_stride,
    RandomPart first, RandomPart second, uint64_t seed) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words; i += step) {
    const int64_t in_plane = i % words_per_plane;
    const bool is_first = in_plane % words_per_record * 4 < first.bytes;
    const uint64_t bits = Mix(seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(i) + 1);
    *reinterpret_cast<uint32_t*>(to + i / words_per_plane * plane_stride + in_plane * 4) =
        WordOf(is_first ? first : second, bits);
  }
}

// Grid: any. Block: kThreads; a thread takes 16 bytes a grid apart. Shared memory: none.
__global__ __launch_bounds__(kThreads) void ReadThroughKernel(
    const uint4* __restrict__ from,  // [count]
    int64_t count, uint32_t* sink) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  uint32_t sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const uint4 words = from[i];
    sum += words.x ^ words.y ^ words.z ^ words.w;
  }
  if (sum == 0x5bd1e995u) *sink = sum;  // As good as never.
}

}  // namespace

absl::Status LaunchReadThroughCuda(const std::byte* from, int64_t bytes, uint32_t* sink,
                                   const Exec& exec) {
  if (bytes < 16) return absl::OkStatus();
  const int64_t count = bytes / 16;
  const int64_t blocks = std::min<int64_t>((count + kThreads - 1) / kThreads, kMaxBlocks);
  return Launch("ReadThroughKernel",
                {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads)}, exec,
                ReadThroughKernel, reinterpret_cast<const uint4*>(from), count, sink);
}

absl::Status LaunchRandomFillCuda(const RandomFillArgs& args, const Exec& exec) {
  const int64_t per_record = (args.first.bytes + args.second.bytes) / 4;
  const int64_t per_plane = args.records * per_record;
  const int64_t words = args.planes * per_plane;
  if (words == 0) return absl::OkStatus();
  const int64_t blocks = std::min<int64_t>((words + kThreads - 1) / kThreads, kMaxBlocks);
  return Launch("RandomFillKernel",
                {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads)}, exec,
                RandomFillKernel, args.to, words, per_plane, per_record, args.plane_stride,
                args.first, args.second, args.seed);
}

}  // namespace isthmus::kernels
