// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that run beside the thread: cp.async in groups, and bulk
// copies (cp.async.bulk) that complete on an mbarrier. Both exist on sm_90 and sm_120.
#pragma once

#include "kernels/core/launch.cuh"

namespace isthmus::kernels {

// 16 aligned bytes; the bytes past `valid_bytes` (0 to 16) become zero and are not read.
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global,
                                            int valid_bytes = 16) {
#if ISTHMUS_EMULATED
  emulator::CopyAsync(shared, global, 16, static_cast<size_t>(valid_bytes));
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(valid_bytes)
               : "memory");
#endif
}
// 8 or 4 aligned bytes.
template <int kBytes>
__device__ __forceinline__ void CopyAsyncSmall(void* shared, const void* global,
                                               int valid_bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8);
#if ISTHMUS_EMULATED
  emulator::CopyAsync(shared, global, kBytes, static_cast<size_t>(valid_bytes));
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "n"(kBytes), "r"(valid_bytes)
               : "memory");
#endif
}
// Ends the running group of this thread's copies.
__device__ __forceinline__ void CommitCopies() {
#if ISTHMUS_EMULATED
  emulator::CommitCopies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most kGroupsLeft of this thread's groups are on their way. Other threads see the data
// after a barrier.
template <int kGroupsLeft>
__device__ __forceinline__ void WaitForCopies() {
#if ISTHMUS_EMULATED
  emulator::WaitForCopies(kGroupsLeft);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
#endif
}

// An mbarrier in shared memory. One thread makes it, FenceBarrierInit and __syncthreads follow.
struct alignas(8) Mbarrier {
  uint64_t state;
};

__device__ __forceinline__ void BarrierInit(Mbarrier* barrier, unsigned arrivals) {
#if ISTHMUS_EMULATED
  emulator::BarrierInit(&barrier->state, arrivals);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
               "r"(arrivals)
               : "memory");
#endif
}
// Makes new barriers visible to the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
#if !ISTHMUS_EMULATED
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void BarrierArrive(Mbarrier* barrier) {
#if ISTHMUS_EMULATED
  emulator::BarrierArrive(&barrier->state, 0);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
               : "memory");
#endif
}
// Arrives and announces `bytes` of bulk copies; before they are issued.
__device__ __forceinline__ void BarrierArriveExpect(Mbarrier* barrier, unsigned bytes) {
#if ISTHMUS_EMULATED
  emulator::BarrierArrive(&barrier->state, bytes);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
               "r"(bytes)
               : "memory");
#endif
}
// Until the phase of this parity (0 for the first) is over.
__device__ __forceinline__ void BarrierWait(Mbarrier* barrier, unsigned parity) {
#if ISTHMUS_EMULATED
  while (!emulator::BarrierTest(&barrier->state, parity)) emulator::Yield();
#else
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  }
#endif
}

// `bytes` bytes, a multiple of 16, between 16-aligned addresses; one thread issues it.
__device__ __forceinline__ void BulkCopy(void* shared, const void* global, unsigned bytes,
                                         Mbarrier* barrier) {
#if ISTHMUS_EMULATED
  emulator::BulkCopy(shared, global, bytes, &barrier->state);
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(bytes), "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
      : "memory");
#endif
}
// The same for a stream that nobody reads twice: it leaves the L2 first.
__device__ __forceinline__ void BulkCopyOnce(void* shared, const void* global, unsigned bytes,
                                             Mbarrier* barrier) {
#if ISTHMUS_EMULATED
  emulator::BulkCopy(shared, global, bytes, &barrier->state);
#else
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(bytes), "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
      "l"(policy)
      : "memory");
#endif
}

// Barrier `id` (1 to 15) for `threads` threads of the block, a multiple of 32.
__device__ __forceinline__ void SyncThreads(int id, int threads) {
#if ISTHMUS_EMULATED
  emulator::SyncBlock(id, threads);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// The first 16 bytes at `p`, into the L2: for weights, before WaitForPredecessor.
__device__ __forceinline__ void PrefetchL2(const void* p) {
#if !ISTHMUS_EMULATED
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#else
  (void)p;
#endif
}
// A multiple of 16 bytes from a 16-aligned address, into the L2 by the copy engine.
__device__ __forceinline__ void BulkPrefetchL2(const void* p, unsigned bytes) {
#if !ISTHMUS_EMULATED
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#else
  (void)p;
  (void)bytes;
#endif
}

// 16 bytes of a stream that is read once: not kept in L1.
__device__ __forceinline__ uint4 LoadStream16(const void* p) {
#if ISTHMUS_EMULATED
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) emulator::Fail("a misaligned load of 16 bytes");
  uint4 value;
  std::memcpy(&value, p, sizeof(value));
  return value;
#else
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(p));
  return value;
#endif
}

}  // namespace isthmus::kernels
