// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process, in host memory: the protocol of communicator.h in C++. The
// trusted CPU path.
#include <algorithm>
#include <cstring>

#include "kernels/all_reduce/all_reduce_variants.h"
#include "kernels/core/formats.h"
#include "kernels/core/peer_group.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

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
  Publish(call, first, count, PeerSlotOnHost(group, group.rank, number));
  ISTHMUS_RETURN_IF_ERROR(MeetPeersOnHost(group, number));
  for (int peer = 0; peer < group.ranks; ++peer) {
    Add(call, first, count, PeerSlotOnHost(group, peer, number), peer == 0);
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
