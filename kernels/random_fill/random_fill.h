// SPDX-License-Identifier: Apache-2.0
// Fills device memory with random numbers of a format: weights and caches for measuring speed
// without a checkpoint.
//
// Layout     `planes` planes, plane_stride bytes apart, of `records` records, one behind another;
//            a record is its parts one behind another. All sizes are multiples of 4 bytes.
// Types      See RandomKind.
// Numerics   A value depends on the seed and on its place (plane, record, byte) alone.
// Workspace  None.
// Phases     Load.
// Errors     InvalidArgument  A size breaks this contract.
//            Unimplemented    The CPU, or this build has no kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/core/exec.h"

namespace isthmus::kernels {

enum class RandomKind : uint8_t {
  kBytes,       // Any byte: pairs of fp4 codes.
  kFp8,         // Any e4m3 code but NaN.
  kByteOfMask,  // base + (random & mask): scales.
  kBf16,        // Uniform in [-limit, limit).
  kF32,         // Uniform in [-limit, limit), plus offset.
};

struct RandomPart {
  RandomKind kind = RandomKind::kBytes;
  int64_t bytes = 0;
  float limit = 0.0f;
  float offset = 0.0f;  // kF32
  uint8_t base = 0;     // kByteOfMask
  uint8_t mask = 0;
};

struct RandomFillArgs {
  std::byte* to = nullptr;
  int64_t planes = 1;
  int64_t plane_stride = 0;
  int64_t records = 1;
  RandomPart first = {};
  RandomPart second = {};  // Of no bytes: records are one part.
  uint64_t seed = 0;
};

absl::Status RandomFill(const RandomFillArgs& args, const Exec& exec);

// Reads `bytes` (a multiple of 16) of device memory, so that what was in the L2 cache no longer is,
// and what is needs no writing back. `sink` is one word that keeps the reads from being left out.
absl::Status ReadThrough(const std::byte* from, int64_t bytes, uint32_t* sink, const Exec& exec);

}  // namespace isthmus::kernels
