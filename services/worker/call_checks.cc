// SPDX-License-Identifier: Apache-2.0
#include "services/worker/call_checks.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/base/fault.h"
#include "services/rpc/wire.h"

namespace isthmus::worker {
namespace {

constexpr size_t kTransferIdBytes = 16;
constexpr absl::Duration kMaxLease = absl::Hours(24);

}  // namespace

absl::Status CheckTransferId(const std::string& transfer_id) {
  if (transfer_id.size() == kTransferIdBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("transfer_id: has ", transfer_id.size(), " bytes, want ", kTransferIdBytes));
}

absl::Status CheckLease(const v1::KvReservation& reservation) {
  const absl::Duration lease = rpc::FromWire(reservation.lease());
  if (lease > absl::ZeroDuration() && lease <= kMaxLease) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "reservation.lease: is ", absl::FormatDuration(lease), ", want more than 0 and at most 24h"));
}

absl::StatusOr<std::vector<int32_t>> TokensOf(
    const google::protobuf::RepeatedField<uint32_t>& ids) {
  std::vector<int32_t> tokens;
  tokens.reserve(static_cast<size_t>(ids.size()));
  for (const uint32_t id : ids) {
    if (id > uint32_t{INT32_MAX}) {
      return absl::InvalidArgumentError(absl::StrCat("prompt_token_ids: no token has id ", id));
    }
    tokens.push_back(static_cast<int32_t>(id));
  }
  return tokens;
}

engine::SamplingParams SamplingOf(const v1::SamplerState& state) {
  engine::SamplingParams params;
  params.temperature = static_cast<float>(state.temperature());
  params.top_p = static_cast<float>(state.top_p());
  params.top_k = static_cast<int32_t>(std::min<uint32_t>(state.top_k(), INT32_MAX));
  params.seed = state.seed();
  params.wants_logits_digests = state.wants_logits_digests();
  return params;
}

absl::Status Draining() {
  return WithFaultScope(absl::UnavailableError("this worker is draining"), FaultScope::kPeer);
}

}  // namespace isthmus::worker
