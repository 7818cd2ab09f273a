// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/peer_group.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/clock.h"
#include "services/base/fault.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int64_t kAlign = 256;

int64_t Aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// One rank's memory: two slots, its flags, its count of calls and its count of blocks.
struct Map {
  explicit Map(int64_t slot_bytes_in)
      : slot_bytes(Aligned(slot_bytes_in)),
        flags(2 * slot_bytes),
        calls(flags + Aligned(int64_t{8} * kMaxRanks * kMaxMeetingBlocks)),
        turns(calls + kAlign),
        end(turns + kAlign) {}
  int64_t slot_bytes, flags, calls, turns, end;
};

absl::Status CheckOptions(const PeerGroupOptions& options) {
  if (options.ranks < 1 || options.ranks > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer group: ", options.ranks, " ranks, must be in [1, ", kMaxRanks, "]"));
  }
  const auto devices = static_cast<int>(options.devices.size());
  if (devices != 0 && devices != options.ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer group: ", options.ranks, " ranks on ", devices, " devices"));
  }
  if (options.slot_bytes <= 0 || options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer group: slots of ", options.slot_bytes, " bytes and a timeout of ",
                     absl::FormatDuration(options.timeout), ", both must be positive"));
  }
  return absl::OkStatus();
}

absl::Status WaitForPeer(const Communicator& group, int peer, uint64_t call) {
  const std::atomic_ref flag(group.flags[group.rank][int64_t{peer} * kMaxMeetingBlocks]);
  constexpr int kPollsPerLook = 256;
  const absl::Time deadline =
      RealClock().Now() + absl::Nanoseconds(static_cast<int64_t>(group.timeout_nanoseconds));
  for (int polls = 1; flag.load(std::memory_order_acquire) < call; ++polls) {
    if (polls % kPollsPerLook == 0 && RealClock().Now() > deadline) {
      const CommunicatorFault fault = {call, group.rank, peer,
                                       flag.load(std::memory_order_acquire)};
      if (group.fault != nullptr) {
        group.fault->rank = fault.rank;
        group.fault->missing_rank = fault.missing_rank;
        group.fault->missing_call = fault.missing_call;
        std::atomic_ref(group.fault->call).store(call, std::memory_order_release);
      }
      return FaultStatus(fault);
    }
    std::this_thread::yield();  // The others may need this processor.
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PeerGroup::Allocate(const PeerGroupOptions& options, int rank, Member* member) {
  const Map map(options.slot_bytes);
  std::byte* base = nullptr;
  Communicator& own = member->communicator;
  if (options.devices.empty()) {
    member->host.resize(static_cast<size_t>(map.end + kAlign + kAlign));
    base = member->host.data();
    base += kAlign - static_cast<int64_t>(reinterpret_cast<uintptr_t>(base) % kAlign);
    own.fault = new (base + map.end) CommunicatorFault;
  } else {
    ISTHMUS_RETURN_IF_ERROR(UseDevice(options.devices[static_cast<size_t>(rank)]));
    ISTHMUS_ASSIGN_OR_RETURN(member->device, DeviceBuffer::Allocate(map.end));
    ISTHMUS_ASSIGN_OR_RETURN(member->fault_bytes,
                             PinnedBuffer::Allocate(sizeof(CommunicatorFault)));
    base = member->device.data();
    const int device = options.devices[static_cast<size_t>(rank)];
    own.shares_device = std::ranges::count(options.devices, device) > 1;
    own.fault = new (member->fault_bytes.data()) CommunicatorFault;
    ISTHMUS_RETURN_IF_ERROR(FillDevice(base, 0, map.end, nullptr));
    ISTHMUS_RETURN_IF_ERROR(DeviceStream().Synchronise());
  }
  own.rank = rank;
  own.ranks = options.ranks;
  own.slot_bytes = map.slot_bytes;
  own.slots[rank] = base;
  own.flags[rank] = reinterpret_cast<uint64_t*>(base + map.flags);
  own.calls = reinterpret_cast<uint64_t*>(base + map.calls);
  own.turns = reinterpret_cast<unsigned*>(base + map.turns);
  own.timeout_nanoseconds = static_cast<uint64_t>(absl::ToInt64Nanoseconds(options.timeout));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PeerGroup>> PeerGroup::Create(const PeerGroupOptions& options) {
  ISTHMUS_RETURN_IF_ERROR(CheckOptions(options));
  for (const int device : options.devices) {
    for (const int peer : options.devices) {
      if (device != peer) ISTHMUS_RETURN_IF_ERROR(EnablePeerAccess(device, peer));
    }
  }
  std::unique_ptr<PeerGroup> group(new PeerGroup);
  for (int rank = 0; rank < options.ranks; ++rank) {
    group->members_.push_back(std::make_unique<Member>());
    ISTHMUS_RETURN_IF_ERROR(Allocate(options, rank, group->members_.back().get()));
  }
  for (const auto& one : group->members_) {
    for (int peer = 0; peer < options.ranks; ++peer) {
      const Communicator& other = group->members_[static_cast<size_t>(peer)]->communicator;
      one->communicator.slots[peer] = other.slots[peer];
      one->communicator.flags[peer] = other.flags[peer];
    }
  }
  return group;
}

const Communicator& PeerGroup::communicator(int rank) const {
  ISTHMUS_CHECK(rank >= 0 && rank < ranks());
  return members_[static_cast<size_t>(rank)]->communicator;
}
Communicator& PeerGroup::communicator(int rank) {
  ISTHMUS_CHECK(rank >= 0 && rank < ranks());
  return members_[static_cast<size_t>(rank)]->communicator;
}

absl::Status PeerGroup::Fault() const {
  for (const auto& member : members_) {
    CommunicatorFault& fault = *member->communicator.fault;
    const uint64_t call = std::atomic_ref(fault.call).load(std::memory_order_acquire);
    if (call != 0) return FaultStatus(fault);
  }
  return absl::OkStatus();
}

std::byte* PeerSlotOnHost(const Communicator& group, int rank, uint64_t call) {
  return group.slots[rank] + static_cast<int64_t>(call & 1) * group.slot_bytes;
}

absl::Status MeetPeersOnHost(const Communicator& group, uint64_t call) {
  for (int peer = 0; peer < group.ranks; ++peer) {
    std::atomic_ref(group.flags[peer][int64_t{group.rank} * kMaxMeetingBlocks])
        .store(call, std::memory_order_release);
  }
  for (int peer = 0; peer < group.ranks; ++peer) {
    ISTHMUS_RETURN_IF_ERROR(WaitForPeer(group, peer, call));
  }
  return absl::OkStatus();
}

absl::Status FaultStatus(const CommunicatorFault& fault) {
  return WithFaultScope(
      absl::DeadlineExceededError(absl::StrCat("collective call ", fault.call, ": rank ",
                                               fault.rank, " waited for rank ", fault.missing_rank,
                                               ", which had announced call ", fault.missing_call)),
      FaultScope::kDevice);
}

}  // namespace isthmus::kernels
