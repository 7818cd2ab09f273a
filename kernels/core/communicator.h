// SPDX-License-Identifier: Apache-2.0
// One rank's end of a tensor-parallel group: what collective operations need of the other ranks.
// Plain data, small enough to be a kernel's argument; who makes one is peer_group.h (memory that
// all ranks reach) and kernels/all_reduce/nccl_group.h.
//
// Memory that all ranks reach. Each rank owns two slots and a row of flags. In its call number e
// (1, 2, …: the same calls in the same order on every rank) a rank
//
//   1. writes its part into its slot e % 2,
//   2. stores e into its flag in the memory of every rank (release), and waits until all flags in
//      its own memory are at least e (acquire),
//   3. reads the slots e % 2 of all ranks,
//   4. adds one to its own count of calls, in device memory, so that a replayed graph goes on where
//      the last one ended.
//
// No rank waits at the end of a call. That is safe because slots alternate: a rank writes slot
// e % 2 again in call e + 2, after its call e + 1 has ended, which saw the flag e + 1 of every
// peer; a peer stores that flag after its call e has ended (calls of one rank run one after
// another), when it has read all it wanted. Counts have 64 bits and never wrap.
#pragma once

#include <cstddef>
#include <cstdint>

namespace isthmus::kernels {

inline constexpr int kMaxRanks = 8;
// Blocks of a kernel that can meet those of its peers, each under a flag of its own.
inline constexpr int kMaxMeetingBlocks = 64;

// Why a rank gave up waiting, in host memory that outlives the device's state. Written once.
struct CommunicatorFault {
  uint64_t call = 0;          // Nonzero: this call was given up.
  int32_t rank = 0;           // Who waited.
  int32_t missing_rank = 0;   // For whom.
  uint64_t missing_call = 0;  // The last call that it had announced.
};

struct Communicator {
  int rank = 0;
  int ranks = 1;
  // Another rank runs on this one's device. A launch that starts early could then take the room, or
  // the place in line, of what its predecessor waits for.
  bool shares_device = false;

  std::byte* slots[kMaxRanks] = {};  // Of each rank: [2][slot_bytes]; null: no such memory.
  uint64_t* flags[kMaxRanks] = {};   // Of each rank: [ranks][kMaxMeetingBlocks], by sender.
  int64_t slot_bytes = 0;            // A multiple of 256.
  uint64_t* calls = nullptr;         // Own: calls that have ended.
  unsigned* turns = nullptr;         // Own: blocks of the running call that are through.
  // How long to wait for a peer. Then the rank writes `fault`, and its kernel traps: the device
  // answers nothing but errors and the process must end.
  uint64_t timeout_nanoseconds = 0;
  CommunicatorFault* fault = nullptr;

  void* nccl = nullptr;  // ncclComm_t; null: none.

  bool has_slots() const { return slots[0] != nullptr; }
};

}  // namespace isthmus::kernels
