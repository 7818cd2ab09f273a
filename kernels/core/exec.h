// SPDX-License-Identifier: Apache-2.0
// What an operation needs to run besides its arguments. Passed by every caller, stored by none.
#pragma once

#include <cstdint>

#include "services/base/patch.h"
#include "services/base/thread_pool.h"

namespace isthmus::kernels {

struct Communicator;
class Workspace;

// Architectures as numbers that sort: the CPU, then CUDA compute capabilities times ten.
inline constexpr int kArchCpu = 0;
inline constexpr int kArchSm90 = 90;
inline constexpr int kArchSm120 = 120;

inline constexpr int64_t kNumCounters = 65536;

struct ArchRange {
  int begin = 0;
  int end = 0;  // Exclusive.
};
inline constexpr ArchRange kCpuOnly = {kArchCpu, 1};
inline constexpr ArchRange kAnyCuda = {10, 10000};
inline constexpr ArchRange kSm90Up = {kArchSm90, 10000};  // mma.sync, cp.async.bulk, mbarrier.
inline constexpr ArchRange kSm90Only = {kArchSm90, kArchSm90 + 1};
inline constexpr ArchRange kSm120Only = {kArchSm120, kArchSm120 + 1};

// A GPU runs the operation: every pointer of its arguments is device memory, unless its header says
// otherwise.
inline bool IsDevice(int arch) { return arch != kArchCpu; }

struct Exec {
  int arch = kArchCpu;
  void* stream = nullptr;             // cudaStream_t; null on the CPU.
  uint32_t phase = kPhasePrefill;     // PhaseBits of the current step.
  const PatchSet* patches = nullptr;  // Null: defaults.
  ThreadPool* threads = nullptr;      // Null: the calling thread alone.
  Workspace* workspace = nullptr;     // Scratch; null: the operation allocates its own (CPU only).
  int num_sms = 0;                    // Multiprocessors of the device; 0 on the CPU.
  // kNumCounters words of device memory that are 0 between launches: who counts with them
  // (TakeTurn) leaves them at 0, and touches them only after WaitForPredecessor.
  unsigned* counters = nullptr;
  // Splits and tiles must not depend on the batch, so that a row has the bits that it has alone.
  bool batch_invariant = false;
  // This rank's end of its tensor-parallel group (communicator.h); null: one rank.
  const Communicator* communicator = nullptr;
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
