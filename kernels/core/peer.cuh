// SPDX-License-Identifier: Apache-2.0
// The steps of a call over memory that all ranks reach (communicator.h), for kernels. Whole blocks
// call them. Blocks of a kernel need not run at once, but those of equal number on all ranks do
// meet: every rank launches the same grid, and its blocks start in ascending order.
#pragma once

#include "kernels/core/communicator.h"
#include "kernels/core/launch.cuh"

#if ISTHMUS_EMULATED
#include <chrono>
#include <thread>
#endif

namespace isthmus::kernels {

// A load that sees everything its value's writer released before, between devices, too.
__device__ __forceinline__ uint64_t LoadAcquireSystem(const uint64_t* p) {
#if ISTHMUS_EMULATED
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(p)).load();
#else
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
#endif
}
__device__ __forceinline__ void StoreReleaseSystem(uint64_t* p, uint64_t value) {
#if ISTHMUS_EMULATED
  std::atomic_ref<uint64_t>(*p).store(value);
#else
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
#endif
}
// 16 bytes that another device may have written; never from a cache of this multiprocessor.
__device__ __forceinline__ uint4 LoadPeer(const uint4* p) {
#if ISTHMUS_EMULATED
  return *p;
#else
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(p)
               : "memory");
  return value;
#endif
}
// A clock of the whole device.
__device__ __forceinline__ uint64_t GlobalNanoseconds() {
#if ISTHMUS_EMULATED
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#else
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
#endif
}
// In a loop that waits for another device, or rank.
__device__ __forceinline__ void PeerPause() {
#if ISTHMUS_EMULATED
  std::this_thread::yield();
#endif
  SpinPause();
}

// The number of this call: the same for all threads, since it changes only in EndPeerCall.
__device__ __forceinline__ uint64_t PeerCall(const Communicator& group) {
  return *static_cast<const volatile uint64_t*>(group.calls) + 1;
}
// A rank's slot of this call.
template <typename T>
__device__ __forceinline__ T* PeerSlot(const Communicator& group, int rank, uint64_t call) {
  return reinterpret_cast<T*>(group.slots[rank] +
                              static_cast<int64_t>(call & 1) * group.slot_bytes);
}

// Says why and ends the kernel, and with it everything on this device.
__device__ __noinline__ inline void GiveUpOnPeer(const Communicator& group, uint64_t call, int peer,
                                                 uint64_t seen) {
  if (group.fault != nullptr) {
    group.fault->rank = group.rank;
    group.fault->missing_rank = peer;
    group.fault->missing_call = seen;
    StoreReleaseSystem(&group.fault->call, call);
  }
  __trap();
}

// What this block wrote before is seen by block `block` of every rank after its own MeetPeers, and
// the other way round. Called by all threads of a block of at least kMaxRanks threads.
__device__ __forceinline__ void MeetPeers(const Communicator& group, uint64_t call,
                                          unsigned block) {
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < group.ranks) {
    const int peer = static_cast<int>(threadIdx.x);
    StoreReleaseSystem(group.flags[peer] + group.rank * kMaxMeetingBlocks + block, call);
    const uint64_t* flag = group.flags[group.rank] + peer * kMaxMeetingBlocks + block;
    constexpr unsigned kPollsPerLook = 64;  // The clock is slower than a poll.
    uint64_t start = 0;
    for (unsigned polls = 0;; ++polls) {
      const uint64_t seen = LoadAcquireSystem(flag);
      if (seen >= call) break;
      if (polls % kPollsPerLook == 0) {
        const uint64_t now = GlobalNanoseconds();
        if (start == 0) start = now;
        if (now - start > group.timeout_nanoseconds) GiveUpOnPeer(group, call, peer, seen);
      }
      PeerPause();
    }
  }
  __syncthreads();
}

// The last of `blocks` blocks to come here ends the call. Called by all threads of every block,
// after their reads of the slots; `shared_turn` is a word of the block's shared memory.
__device__ __forceinline__ void EndPeerCall(const Communicator& group, uint64_t call,
                                            unsigned blocks, unsigned* shared_turn) {
  if (TakeTurn(group.turns, blocks, shared_turn) != blocks - 1) return;
  if (threadIdx.x == 0) *group.calls = call;
}

}  // namespace isthmus::kernels
