// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process, in host memory: the protocol of communicator.h in C++. The
// trusted CPU path.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "kernels/all_reduce/all_reduce_variants.h"
#include "kernels/core/formats.h"
#include "kernels/core/peer_group.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

std::byte* Slot(const Communicator& group, int rank, uint64_t call) {
  return group.slots[rank] + static_cast<int64_t>(call & 1) * group.slot_bytes;
}

// Writes rows [first, first + count) of x into the own slot.
void Publish(const AllReduceCall& call, int64_t first, int64_t count, std::byte* slot) {
  const MatrixView& x = call.args.x;
  for (int64_t t = 0; t < count; ++t) {
    const float* row = x.f32(first + t);
    if (call.args.wire == DType::kF32) {
      std::memcpy(slot + 4 * t * x.cols, row, sizeof(float) * static_cast<size_t>(x.cols));
      continue;
    }
    auto* out = reinterpret_cast<uint16_t*>(slot) + t * x.cols;
    for (int64_t d = 0; d < x.cols; ++d) out[d] = Bf16Bits(row[d]);
  }
}

absl::Status WaitFor(const Communicator& group, int peer, uint64_t call) {
  const std::atomic_ref flag(group.flags[group.rank][peer * kMaxMeetingBlocks]);
  constexpr int kPollsPerLook = 256;
  const absl::Time deadline =
      RealClock().Now() + absl::Nanoseconds(static_cast<int64_t>(group.timeout_nanoseconds));
  for (int polls = 1; flag.load(std::memory_order_acquire) < call; ++polls) {
    if (polls % kPollsPerLook == 0 && RealClock().Now() > deadline) {
      CommunicatorFault fault = {call, group.rank, peer, flag.load(std::memory_order_acquire)};
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

// Rows of one rank's slot, added to (or, for the first rank, stored in) out.
void Add(const AllReduceCall& call, int64_t first, int64_t count, const std::byte* slot,
         bool is_first) {
  const int64_t cols = call.args.x.cols;
  for (int64_t t = 0; t < count; ++t) {
    float* out = call.args.out.f32(first + t);
    const auto* f32 = reinterpret_cast<const float*>(slot) + t * cols;
    const auto* bf16 = reinterpret_cast<const uint16_t*>(slot) + t * cols;
    for (int64_t d = 0; d < cols; ++d) {
      const float value = call.args.wire == DType::kF32 ? f32[d] : Bf16Value(bf16[d]);
      out[d] = is_first ? value : out[d] + value;
    }
  }
}

void Round(const MatrixView& out, int64_t first, int64_t count) {
  for (int64_t t = first; t < first + count; ++t) {
    for (int64_t d = 0; d < out.cols; ++d) out.f32(t)[d] = RoundBf16(out.f32(t)[d]);
  }
}

absl::Status Exchange(const AllReduceCall& call, int64_t first, int64_t count) {
  const Communicator& group = call.group;
  const uint64_t number = *group.calls + 1;
  Publish(call, first, count, Slot(group, group.rank, number));
  for (int peer = 0; peer < group.ranks; ++peer) {
    std::atomic_ref(group.flags[peer][group.rank * kMaxMeetingBlocks])
        .store(number, std::memory_order_release);
  }
  for (int peer = 0; peer < group.ranks; ++peer) {
    ISTHMUS_RETURN_IF_ERROR(WaitFor(group, peer, number));
  }
  for (int peer = 0; peer < group.ranks; ++peer) {
    Add(call, first, count, Slot(group, peer, number), peer == 0);
  }
  *group.calls = number;
  return absl::OkStatus();
}

}  // namespace

absl::Status LaunchAllReduceCpu(const AllReduceCall& call, const Exec&) {
  const AllReduceArgs& args = call.args;
  const int64_t rows = args.x.rows;
  if (call.group.ranks == 1) {
    for (int64_t t = 0; t < rows; ++t) {
      std::memmove(args.out.f32(t), args.x.f32(t),
                   sizeof(float) * static_cast<size_t>(args.x.cols));
    }
  } else {
    const int64_t step = RowsPerSlot(call);
    for (int64_t first = 0; first < rows; first += step) {
      ISTHMUS_RETURN_IF_ERROR(Exchange(call, first, std::min(step, rows - first)));
    }
  }
  if (args.round_output) Round(args.out, 0, rows);
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
