// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/receiver.h"

#include <map>
#include <tuple>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/fault.h"

namespace isthmus::transfer {
namespace {

using GroupKey = std::tuple<uint32_t, uint32_t, uint32_t>;  // Kind, page index, first layer.

std::string GroupName(const v1::KvHandoff& handoff, const GroupKey& key) {
  return absl::StrCat("page group (kind ", std::get<0>(key), ", page ", std::get<1>(key),
                      ", first layer ", std::get<2>(key), ") of transfer ",
                      absl::BytesToHexString(handoff.transfer_id()));
}

absl::Status Lost(const std::string& text) {
  return WithFaultScope(absl::DataLossError(text), FaultScope::kPeer);
}

}  // namespace

absl::Status CheckHandoff(const v1::KvHandoff& handoff, const v1::KvReservation& reservation,
                          const Identity& own) {
  if (handoff.worker_incarnation() != own.worker_incarnation) {
    return WithFaultScope(
        absl::AbortedError(absl::StrFormat("handoff is for incarnation %016x, this worker is %016x",
                                           handoff.worker_incarnation(), own.worker_incarnation)),
        FaultScope::kPeer);
  }
  if (handoff.transfer_id() != reservation.transfer_id()) {
    return WithFaultScope(
        absl::AbortedError(
            absl::StrCat("handoff is for transfer ", absl::BytesToHexString(handoff.transfer_id()),
                         ", reserved is ", absl::BytesToHexString(reservation.transfer_id()))),
        FaultScope::kPeer);
  }
  if (handoff.layout_fingerprint() != own.layout_fingerprint) {
    return WithFaultScope(absl::FailedPreconditionError(absl::StrFormat(
                              "kv layout differs: ours %016x, prefill worker's %016x",
                              own.layout_fingerprint, handoff.layout_fingerprint())),
                          FaultScope::kPeer);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> VerifyGroups(const v1::KvHandoff& handoff,
                                      std::span<const ExpectedGroup> expected,
                                      DigestFunction digest) {
  std::map<GroupKey, const v1::PageGroupDigest*> sent;
  for (const v1::PageGroupDigest& group : handoff.digests()) {
    const GroupKey key(group.cache_kind(), group.page_index(), group.first_layer());
    if (!sent.emplace(key, &group).second) {
      return Lost(absl::StrCat(GroupName(handoff, key), ": two digests came"));
    }
  }
  for (const ExpectedGroup& group : expected) {
    const GroupKey key(group.cache_kind, group.page_index, group.first_layer);
    const auto found = sent.find(key);
    if (found == sent.end()) return Lost(absl::StrCat(GroupName(handoff, key), ": no digest came"));
    const v1::PageGroupDigest& theirs = *found->second;
    if (theirs.num_layers() != group.num_layers ||
        theirs.first_position() != group.first_position) {
      return Lost(absl::StrCat(GroupName(handoff, key), ": sent ", theirs.num_layers(),
                               " layers from position ", theirs.first_position(), ", expected ",
                               group.num_layers, " from ", group.first_position));
    }
    const uint32_t ours = digest(group);
    if (ours != theirs.crc32c()) {
      return Lost(
          absl::StrCat(GroupName(handoff, key), ": digest of what arrived is ",
                       absl::StrFormat("%08x, of what was sent %08x", ours, theirs.crc32c())));
    }
    sent.erase(found);
  }
  if (!sent.empty()) {
    return Lost(absl::StrCat(GroupName(handoff, sent.begin()->first), ": nobody expects it"));
  }
  return expected.size();
}

}  // namespace isthmus::transfer
