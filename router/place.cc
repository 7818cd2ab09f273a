// SPDX-License-Identifier: Apache-2.0
#include "router/place.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/fault.h"
#include "services/base/status_macros.h"

namespace isthmus::router {
namespace {

std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }

Links ReadyOf(const Links& links, v1::WorkerRole role) {
  Links ready;
  for (const std::shared_ptr<WorkerLink>& link : links) {
    if (link->role() == role && link->state() == v1::WORKER_STATE_READY) ready.push_back(link);
  }
  return ready;
}

absl::Status NoPair(size_t num_prefill, size_t num_decode, Problems problems) {
  std::string texts;
  for (const v1::WorkerStatus& status : problems()) {
    if (status.problem().empty()) continue;
    absl::StrAppend(&texts, "; ", status.address(), ": ", status.problem());
  }
  return WithFaultScope(
      absl::UnavailableError(absl::StrCat("usable workers: ", num_prefill, " for prefill, ",
                                          num_decode, " for decode", texts)),
      FaultScope::kPeer);
}

absl::Status CheckPair(const WorkerLink& prefill, const WorkerLink& decode) {
  return CheckMatch(prefill.card(), "the prefill worker's", decode.card(), "the decode worker's");
}

uint64_t RoomOf(const WorkerLink& link) { return link.card().values().max_sequence_tokens(); }

}  // namespace

absl::Status CheckMatch(const v1::WorkerCard& a, absl::string_view whose_a, const v1::WorkerCard& b,
                        absl::string_view whose_b) {
  const auto check = [&](absl::string_view what, const std::string& of_a, const std::string& of_b) {
    if (of_a == of_b) return absl::OkStatus();
    return WithFaultScope(absl::FailedPreconditionError(absl::StrCat(
                              what, " differs: ", whose_a, " is ", of_a, ", ", whose_b, " ", of_b)),
                          FaultScope::kPeer);
  };
  const v1::ClusterValues& x = a.values();
  const v1::ClusterValues& y = b.values();
  ISTHMUS_RETURN_IF_ERROR(check("protocol version", absl::StrCat(a.protocol_version()),
                                absl::StrCat(b.protocol_version())));
  // The plain values first: they are parts of the fingerprints, and say more.
  ISTHMUS_RETURN_IF_ERROR(
      check("model.index_topk", absl::StrCat(x.index_topk()), absl::StrCat(y.index_topk())));
  ISTHMUS_RETURN_IF_ERROR(check("arithmetic", x.arithmetic(), y.arithmetic()));
  ISTHMUS_RETURN_IF_ERROR(
      check("model.index_key_format", x.index_key_format(), y.index_key_format()));
  ISTHMUS_RETURN_IF_ERROR(
      check("vocab_size", absl::StrCat(x.vocab_size()), absl::StrCat(y.vocab_size())));
  ISTHMUS_RETURN_IF_ERROR(
      check("end_token_id", absl::StrCat(x.end_token_id()), absl::StrCat(y.end_token_id())));
  ISTHMUS_RETURN_IF_ERROR(check("checkpoint fingerprint", Hex(x.checkpoint_fingerprint()),
                                Hex(y.checkpoint_fingerprint())));
  return check("layout fingerprint (page_tokens?)", Hex(x.layout_fingerprint()),
               Hex(y.layout_fingerprint()));
}

absl::StatusOr<v1::ClusterValues> ValuesOf(const Links& links, Problems problems) {
  const Links prefill = ReadyOf(links, v1::WORKER_ROLE_PREFILL);
  const Links decode = ReadyOf(links, v1::WORKER_ROLE_DECODE);
  if (prefill.empty() || decode.empty()) return NoPair(prefill.size(), decode.size(), problems);
  absl::Status mismatch;
  v1::ClusterValues values;
  bool has_pair = false;
  for (const std::shared_ptr<WorkerLink>& d : decode) {
    for (const std::shared_ptr<WorkerLink>& p : prefill) {
      const absl::Status match = CheckPair(*p, *d);
      if (!match.ok()) {
        mismatch = match;
        continue;
      }
      const uint64_t room = std::min(RoomOf(*p), RoomOf(*d));
      if (has_pair && room <= values.max_sequence_tokens()) continue;
      values = d->card().values();
      values.set_max_sequence_tokens(room);
      has_pair = true;
    }
  }
  if (!has_pair) return mismatch;
  return values;
}

std::shared_ptr<WorkerLink> Placer::ChooseLocked(v1::WorkerRole role, const Links& candidates,
                                                 const PlaceWish& wish) {
  Links preferred;
  for (const std::shared_ptr<WorkerLink>& link : candidates) {
    if (wish.failed.count(link->incarnation()) == 0) preferred.push_back(link);
  }
  const Links& choice = preferred.empty() ? candidates : preferred;
  std::vector<LinkLoad> loads;
  loads.reserve(choice.size());
  for (const std::shared_ptr<WorkerLink>& link : choice) loads.push_back(link->load());
  return choice[policy_->Choose(role, loads)];
}

absl::StatusOr<Placement> Placer::Place(const Links& links, Problems problems,
                                        const PlaceWish& wish) {
  Links prefill = ReadyOf(links, v1::WORKER_ROLE_PREFILL);
  Links decode = ReadyOf(links, v1::WORKER_ROLE_DECODE);
  if (prefill.empty() || decode.empty()) return NoPair(prefill.size(), decode.size(), problems);
  const uint64_t tokens = wish.num_prompt_tokens + wish.max_output_tokens;
  bool is_one_full = false;
  const auto cannot_take = [&](const std::shared_ptr<WorkerLink>& link) {
    const bool is_full = wish.full.count(link->incarnation()) > 0;
    is_one_full = is_one_full || is_full;
    return is_full || RoomOf(*link) < tokens;
  };
  std::erase_if(prefill, cannot_take);
  std::erase_if(decode, cannot_take);

  absl::Status mismatch;
  MutexLock lock(mutex_);
  while (!decode.empty()) {
    Placement placement;
    placement.decode = ChooseLocked(v1::WORKER_ROLE_DECODE, decode, wish);
    Links partners;
    for (const std::shared_ptr<WorkerLink>& link : prefill) {
      const absl::Status match = CheckPair(*link, *placement.decode);
      if (match.ok()) {
        partners.push_back(link);
      } else {
        mismatch = match;
      }
    }
    if (partners.empty()) {
      std::erase(decode, placement.decode);
      continue;
    }
    placement.prefill = ChooseLocked(v1::WORKER_ROLE_PREFILL, partners, wish);
    placement.decode_charge = Charge(placement.decode, wish.num_prompt_tokens);
    placement.prefill_charge = Charge(placement.prefill, wish.num_prompt_tokens);
    return placement;
  }
  if (is_one_full) return absl::ResourceExhaustedError("no worker that could serve has room");
  if (!mismatch.ok()) return mismatch;
  return WithFaultScope(absl::UnavailableError(absl::StrCat("no pair of workers has room for ",
                                                            tokens, " tokens of one sequence")),
                        FaultScope::kPeer);
}

}  // namespace isthmus::router
