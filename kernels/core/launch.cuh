// SPDX-License-Identifier: Apache-2.0
// What every kernel file starts with: CUDA's language (or the emulator's), the launch that returns
// a status, and memory operations that order threads of different blocks. Nothing else in a kernel
// file includes a CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/core/exec.h"

#if ISTHMUS_EMULATED
#include <functional>

#include "kernels/core/emulator/cuda_language.h"
#else
#include <cuda_runtime.h>
#endif

// Defined where instructions of one architecture may be used: in that pass of nvcc, and in the
// emulator, which has them all.
#if ISTHMUS_EMULATED
#define ISTHMUS_HAS_SM90A 1
#define ISTHMUS_HAS_SM120A 1
#else
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ISTHMUS_HAS_SM90A 1
#endif
#if defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define ISTHMUS_HAS_SM120A 1
#endif
#endif

namespace isthmus::kernels {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kFullWarp = 0xffffffffu;
// Dynamic and static shared memory a block may use, on sm_120 (on sm_90 it would be 232,448).
inline constexpr size_t kMaxSharedBytes = 101376;

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // Dynamic.
  // All blocks are resident at once, so that they may wait for each other.
  bool is_cooperative = false;
  // The kernel may start while its predecessor still runs, and calls WaitForPredecessor() before
  // it reads what that one wrote.
  bool overlaps_predecessor = false;
};

inline unsigned CeilDiv(int64_t a, int64_t b) { return static_cast<unsigned>((a + b - 1) / b); }

// Enqueues kernel(args...) on exec.stream. `name` stands in error messages. A grid of no blocks is
// a fault of the caller: return before launching. Internal: the launch was refused.
#if ISTHMUS_EMULATED

// Runs it at once, or keeps it for replays while a graph is captured (device_emulated.cc).
absl::Status EmulatedLaunch(const LaunchShape& shape, std::function<void()> body);

template <typename... Parameters, typename... Args>
absl::Status Launch(absl::string_view, const LaunchShape& shape, const Exec&,
                    void (*kernel)(Parameters...), Args... args) {
  return EmulatedLaunch(shape, [=] { kernel(args...); });
}

#else

template <typename... Parameters, typename... Args>
absl::Status Launch(absl::string_view name, const LaunchShape& shape, const Exec& exec,
                    void (*kernel)(Parameters...), Args... args) {
  cudaError_t error = cudaSuccess;
  if (shape.shared_bytes > (size_t{48} << 10)) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shape.shared_bytes));
  }
  if (error == cudaSuccess) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = static_cast<cudaStream_t>(exec.stream);
    config.attrs = attributes;
    if (shape.is_cooperative) {
      attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
      attributes[config.numAttrs++].val.cooperative = 1;
    }
    if (shape.overlaps_predecessor) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(args)...);
  }
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      name, " [", shape.grid.x, ", ", shape.grid.y, ", ", shape.grid.z, "] x ", shape.block.x,
      " threads, ", shape.shared_bytes, " bytes of shared memory: ", cudaGetErrorString(error)));
}

#endif

// The block's dynamic shared memory, aligned to 128 bytes.
__device__ __forceinline__ unsigned char* DynamicShared() {
#if ISTHMUS_EMULATED
  return reinterpret_cast<unsigned char*>(emulator::SharedMemory());
#else
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  return dynamic_shared;
#endif
}

// Waits until the kernel before this one in the stream has ended and its writes are visible.
__device__ __forceinline__ void WaitForPredecessor() {
#if !ISTHMUS_EMULATED
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the kernel after this one start. It still waits for this one's end in WaitForPredecessor.
__device__ __forceinline__ void LetSuccessorStart() {
#if !ISTHMUS_EMULATED
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Moves registers between groups of four warps of a block: those that multiply raise their number,
// the others have lowered theirs. By all warps of such a group; multiples of 8.
template <int kRegisters>
__device__ __forceinline__ void RaiseRegisters() {
#if !ISTHMUS_EMULATED && (defined(ISTHMUS_HAS_SM90A) || defined(ISTHMUS_HAS_SM120A))
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void LowerRegisters() {
#if !ISTHMUS_EMULATED && (defined(ISTHMUS_HAS_SM90A) || defined(ISTHMUS_HAS_SM120A))
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// In a loop that waits for another block.
__device__ __forceinline__ void SpinPause() {
#if ISTHMUS_EMULATED
  emulator::Yield();
#else
  __nanosleep(20);
#endif
}

// The number of the calling block among those that came here, 0 first, after its writes; the last
// of `blocks` sees the writes of all the others and finds the counter at 0 again for the next
// launch. Called by all threads of a block; `shared_turn` is a word of its shared memory.
__device__ __forceinline__ unsigned TakeTurn(unsigned* counter, unsigned blocks,
                                             unsigned* shared_turn) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
    *shared_turn = atomicInc(counter, blocks - 1);
  }
  __syncthreads();
  const unsigned turn = *shared_turn;
  if (turn == blocks - 1) __threadfence();
  return turn;
}

// The lane, read anew: what is computed from it is not kept in registers over a loop.
__device__ __forceinline__ int FreshLane() {
#if ISTHMUS_EMULATED
  return emulator::LaneIndex();
#else
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane & (kWarpLanes - 1);
#endif
}

// The same of threadIdx.x.
__device__ __forceinline__ int FreshThread() {
#if ISTHMUS_EMULATED
  return static_cast<int>(threadIdx.x);
#else
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread & 1023;  // Never negative, as the compiler can see.
#endif
}

// Folds within a warp, lanes in a fixed tree (16, 8, 4, 2, 1): all lanes hold the result.
__device__ __forceinline__ float WarpSum(float x) {
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    x += __shfl_xor_sync(kFullWarp, x, lanes);
  }
  return x;
}
__device__ __forceinline__ float WarpMax(float x) {
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, lanes));
  }
  return x;
}

}  // namespace isthmus::kernels
