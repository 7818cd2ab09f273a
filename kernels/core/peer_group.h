// SPDX-License-Identifier: Apache-2.0
// Makes the memory that the ranks of one process reach (communicator.h): peer memory of several
// GPUs, memory of one GPU for ranks that share it, or host memory for ranks on the CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/core/communicator.h"
#include "kernels/core/device.h"

namespace isthmus::kernels {

struct PeerGroupOptions {
  int ranks = 1;
  // The device of each rank; equal numbers share one. Empty: host memory.
  std::vector<int> devices;
  int64_t slot_bytes = int64_t{1} << 20;
  absl::Duration timeout = absl::Seconds(10);
};

// DeadlineExceeded, fault scope device, in words.
absl::Status FaultStatus(const CommunicatorFault& fault);

// The steps of a call (communicator.h) for a rank that is a thread on the CPU. Its memory is the
// group's slots; it counts the call in *group.calls itself once it has read them.
std::byte* PeerSlotOnHost(const Communicator& group, int rank, uint64_t call);
// DeadlineExceeded as above when a rank does not come in time.
absl::Status MeetPeersOnHost(const Communicator& group, uint64_t call);

class PeerGroup {
 public:
  // Leaves the calling thread on the device of the last rank. InvalidArgument: ranks outside 1 to
  // kMaxRanks, another number of devices, slots of no bytes. FailedPrecondition: two devices cannot
  // reach each other. ResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<PeerGroup>> Create(const PeerGroupOptions& options);

  // Valid while the group lives; NCCL's handle is added by its owner.
  const Communicator& communicator(int rank) const;
  Communicator& communicator(int rank);
  int ranks() const { return static_cast<int>(members_.size()); }

  // OK, or DeadlineExceeded that says which rank waited for which: after a kernel has trapped, the
  // only thing that still tells.
  absl::Status Fault() const;

 private:
  struct Member {
    Communicator communicator;
    DeviceBuffer device;
    PinnedBuffer fault_bytes;
    std::vector<std::byte> host;  // Instead, for ranks on the CPU.
  };

  PeerGroup() = default;
  static absl::Status Allocate(const PeerGroupOptions& options, int rank, Member* member);

  std::vector<std::unique_ptr<Member>> members_;
};

}  // namespace isthmus::kernels
