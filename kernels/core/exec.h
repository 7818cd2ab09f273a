// SPDX-License-Identifier: Apache-2.0
// What an operation needs to run besides its arguments. Passed by every caller, stored by none.
#pragma once

#include <cstdint>

#include "services/base/patch.h"
#include "services/base/thread_pool.h"

namespace isthmus::kernels {

class Workspace;

// Architectures as numbers that sort: the CPU, then CUDA compute capabilities times ten.
inline constexpr int kArchCpu = 0;

struct ArchRange {
  int begin = 0;
  int end = 0;  // Exclusive.
};
inline constexpr ArchRange kCpuOnly = {kArchCpu, 1};
inline constexpr ArchRange kAnyCuda = {10, 10000};

struct Exec {
  int arch = kArchCpu;
  void* stream = nullptr;             // cudaStream_t; null on the CPU.
  uint32_t phase = kPhasePrefill;     // PhaseBits of the current step.
  const PatchSet* patches = nullptr;  // Null: defaults.
  ThreadPool* threads = nullptr;      // Null: the calling thread alone.
  Workspace* workspace = nullptr;     // Scratch; null: the operation allocates its own.
};

// body(begin, end, thread) over [0, count), on `exec.threads` when there are any.
inline void ParallelFor(const Exec& exec, int64_t count, int64_t grain,
                        absl::FunctionRef<void(int64_t, int64_t, int)> body) {
  if (exec.threads != nullptr) {
    exec.threads->ParallelFor(count, grain, body);
    return;
  }
  if (count > 0) body(0, count, 0);
}

inline int NumThreads(const Exec& exec) {
  return exec.threads != nullptr ? exec.threads->num_threads() : 1;
}

}  // namespace isthmus::kernels
