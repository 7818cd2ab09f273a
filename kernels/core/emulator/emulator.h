// SPDX-License-Identifier: Apache-2.0
// Runs CUDA kernels on the CPU: a `.cu` file of ours, compiled as C++, behaves as on a GPU, one
// block after another (kernels/decisions/0004-kernels-run-in-an-emulator.md).
//
// Each thread of a block is a fiber. A thread runs until it waits for others (a barrier, a warp
// collective, a spin) and then the next one runs, in ascending or, with ReverseOrder, descending
// order, so that a missing barrier shows as a difference. All blocks of a cooperative launch are
// resident at once, each on a thread of the operating system; other launches run block by block.
//
// What it cannot show: races that need two threads at the same instant (compute-sanitizer finds
// those), and speed. A kernel that can never go on ends the process with a list of who waits for
// what; so do a collective that names lanes which have left, misaligned vector and bulk accesses,
// and a launch beyond the limits of sm_120.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"

namespace isthmus::kernels::emulator {

struct Dim3 {
  constexpr Dim3(unsigned x_in = 1, unsigned y_in = 1, unsigned z_in = 1)  // NOLINT: as CUDA's
      : x(x_in), y(y_in), z(z_in) {}
  unsigned x;
  unsigned y;
  unsigned z;
};

// The running thread's built-in variables.
const Dim3& ThreadIndex();
const Dim3& BlockIndex();
const Dim3& BlockShape();
const Dim3& GridShape();
// Its number in its warp of 32.
int LaneIndex();

// Dynamic shared memory of the running block, aligned to 128 bytes, poisoned before each block.
std::byte* SharedMemory();
size_t SharedBytes();

// bar.sync: barrier `id` (0 to 15) for `threads` threads; 0: all that have not left.
void SyncBlock(int id = 0, int threads = 0);
// Lets the others run: in a loop that waits for a value in memory.
void Yield();

// A warp collective: each lane of `mask` hands over `bytes` bytes (at most 64) and reads those of
// all 32 lanes in `all` ([32][bytes]; lanes outside the mask are zero).
void Exchange(uint32_t mask, const void* mine, size_t bytes, void* all);

// cp.async: the copy happens when its group is waited for, so that a missing wait shows.
void CopyAsync(void* shared, const void* global, size_t bytes, size_t valid_bytes);
void CommitCopies();
void WaitForCopies(int groups_left);

// cp.async.bulk: the copy happens when its barrier is polled; until then the target is poisoned.
void BulkCopy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier);

// mbarrier, with the state in its 8 bytes.
void BarrierInit(uint64_t* barrier, uint32_t arrivals);
void BarrierArrive(uint64_t* barrier, uint32_t expected_bytes);
bool BarrierTest(uint64_t* barrier, uint32_t parity);  // The phase of this parity is over.

struct GridLaunch {
  Dim3 grid;
  Dim3 block;
  size_t shared_bytes = 0;
  bool is_cooperative = false;
};

// Runs `body` once per thread of the grid.
void RunGrid(const GridLaunch& launch, absl::FunctionRef<void()> body);

// Threads of a block run in descending order while one of these lives on this thread.
class ReverseOrder {
 public:
  ReverseOrder();
  ~ReverseOrder();
  ReverseOrder(const ReverseOrder&) = delete;
  ReverseOrder& operator=(const ReverseOrder&) = delete;
};

// Ends the process with `what` and the running thread's place.
[[noreturn]] void Fail(const char* what);

}  // namespace isthmus::kernels::emulator
