// SPDX-License-Identifier: Apache-2.0
#include "router/place.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/fault.h"

namespace isthmus::router {
namespace {

absl::Status Differs(absl::string_view what, const std::string& prefill,
                     const std::string& decode) {
  return WithFaultScope(
      absl::FailedPreconditionError(absl::StrCat(what, " differs: prefill worker's is ", prefill,
                                                 ", decode worker's ", decode)),
      FaultScope::kPeer);
}

std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }

}  // namespace

absl::Status CheckPair(const v1::WorkerCard& prefill, const v1::WorkerCard& decode) {
  const v1::ClusterValues& a = prefill.values();
  const v1::ClusterValues& b = decode.values();
  if (prefill.protocol_version() != decode.protocol_version()) {
    return Differs("protocol version", absl::StrCat(prefill.protocol_version()),
                   absl::StrCat(decode.protocol_version()));
  }
  // The plain values first: they are parts of the fingerprints, and say more.
  if (a.index_topk() != b.index_topk()) {
    return Differs("model.index_topk", absl::StrCat(a.index_topk()), absl::StrCat(b.index_topk()));
  }
  if (a.arithmetic() != b.arithmetic()) {
    return Differs("arithmetic", a.arithmetic(), b.arithmetic());
  }
  if (a.checkpoint_fingerprint() != b.checkpoint_fingerprint()) {
    return Differs("checkpoint fingerprint", Hex(a.checkpoint_fingerprint()),
                   Hex(b.checkpoint_fingerprint()));
  }
  if (a.layout_fingerprint() != b.layout_fingerprint()) {
    return Differs("layout fingerprint (page_tokens?)", Hex(a.layout_fingerprint()),
                   Hex(b.layout_fingerprint()));
  }
  return absl::OkStatus();
}

absl::StatusOr<Placement> Place(const std::vector<std::shared_ptr<WorkerLink>>& links) {
  std::vector<std::pair<std::shared_ptr<WorkerLink>, v1::WorkerCard>> prefill;
  std::vector<std::pair<std::shared_ptr<WorkerLink>, v1::WorkerCard>> decode;
  std::string problems;
  for (const std::shared_ptr<WorkerLink>& link : links) {
    const v1::WorkerStatus status = link->status();
    if (status.is_reachable() && status.problem().empty()) {
      (link->role() == v1::WORKER_ROLE_PREFILL ? prefill : decode)
          .emplace_back(link, status.card());
    } else {
      const absl::string_view problem =
          status.problem().empty() ? "has not answered yet" : absl::string_view(status.problem());
      absl::StrAppend(&problems, "; ", status.address(), ": ", problem);
    }
  }
  if (prefill.empty() || decode.empty()) {
    return WithFaultScope(
        absl::UnavailableError(absl::StrCat("usable workers: ", prefill.size(), " for prefill, ",
                                            decode.size(), " for decode", problems)),
        FaultScope::kPeer);
  }
  absl::Status mismatch;
  for (const auto& [prefill_link, prefill_card] : prefill) {
    for (const auto& [decode_link, decode_card] : decode) {
      mismatch = CheckPair(prefill_card, decode_card);
      if (mismatch.ok()) return Placement{prefill_link, decode_link, prefill_card, decode_card};
    }
  }
  return mismatch;
}

v1::ClusterValues ValuesOf(const Placement& placement) {
  v1::ClusterValues values = placement.decode_card.values();
  values.set_max_sequence_tokens(std::min(values.max_sequence_tokens(),
                                          placement.prefill_card.values().max_sequence_tokens()));
  return values;
}

}  // namespace isthmus::router
