// SPDX-License-Identifier: Apache-2.0
#include "services/worker/prefill_service.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/sender.h"
#include "services/base/fault.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/worker/page_groups.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {
namespace {

constexpr absl::Duration kCancelPoll = absl::Milliseconds(10);

absl::StatusOr<std::vector<int32_t>> PromptOf(const v1::PrefillCall& call) {
  std::vector<int32_t> prompt;
  prompt.reserve(static_cast<size_t>(call.prompt_token_ids_size()));
  for (const uint32_t id : call.prompt_token_ids()) {
    if (id > uint32_t{INT32_MAX}) {
      return absl::InvalidArgumentError(absl::StrCat("prompt_token_ids: no token has id ", id));
    }
    prompt.push_back(static_cast<int32_t>(id));
  }
  return prompt;
}

engine::SamplingParams SamplingOf(const v1::SamplerState& state) {
  engine::SamplingParams params;
  params.temperature = static_cast<float>(state.temperature());
  params.top_p = static_cast<float>(state.top_p());
  params.top_k = static_cast<int32_t>(std::min<uint32_t>(state.top_k(), INT32_MAX));
  params.seed = state.seed();
  params.max_tokens = 1;  // The first token is all that is drawn here.
  return params;
}

absl::Duration LeaseOf(const v1::KvReservation& reservation) {
  return absl::Seconds(reservation.lease().seconds()) +
         absl::Nanoseconds(reservation.lease().nanos());
}

absl::Status LeaseIsOver(absl::Duration lease, absl::Duration computed) {
  return WithFaultScope(
      absl::AbortedError(absl::StrCat("reservation.lease: is ", absl::FormatDuration(lease),
                                      ", the prompt took ", absl::FormatDuration(computed),
                                      "; its pages are not written any more")),
      FaultScope::kRequest);
}

// What the loop hands back to the waiting RPC thread.
struct Outcome {
  engine::Sequence sequence;
  absl::Status status;
};

}  // namespace

absl::StatusOr<v1::KvHandoff> PrefillService::Prefill(const v1::PrefillCall& call,
                                                      const CallScope& scope) {
  const absl::Time received = worker_->clock().Now();
  ISTHMUS_RETURN_IF_ERROR(worker_->CheckRole(v1::WORKER_ROLE_PREFILL));
  // Before any work: a reservation that cannot be filled must not cost a prefill.
  ISTHMUS_RETURN_IF_ERROR(transfer::CheckTarget(call.reservation(), call.target(),
                                                worker_->identity().layout_fingerprint,
                                                worker_->transport().name()));
  ISTHMUS_ASSIGN_OR_RETURN(std::vector<int32_t> prompt, PromptOf(call));
  ISTHMUS_ASSIGN_OR_RETURN(
      engine::Sequence admitted,
      worker_->engine().Admit(call.request_id(), std::move(prompt), SamplingOf(call.sampler())));
  ISTHMUS_ASSIGN_OR_RETURN(const engine::Sequence sequence, Compute(std::move(admitted), scope));
  if (scope.is_cancelled()) return absl::CancelledError("the caller left before the transfer");
  const absl::Time start = worker_->clock().Now();
  // Past the lease the pages are somebody else's, and a one-sided write would not be noticed.
  const absl::Duration lease = LeaseOf(call.reservation());
  if (start >= received + lease) return LeaseIsOver(lease, start - received);
  const absl::Time deadline =
      std::min({scope.deadline, start + worker_->config().transfer_timeout, received + lease});
  ISTHMUS_ASSIGN_OR_RETURN(v1::KvHandoff handoff, PushPages(call, sequence, deadline));
  const absl::Duration push_time = worker_->clock().Now() - start;
  metrics_->Add(kPrefills, 1);
  metrics_->Add(kPushedBytes, static_cast<double>(handoff.kv_bytes()));
  metrics_->Observe(kPushSeconds, absl::ToDoubleSeconds(push_time));
  LogInfo("pushed a prompt's pages", {{"request_id", call.request_id()},
                                      {"prompt_tokens", sequence.num_prompt_tokens},
                                      {"kv_bytes", handoff.kv_bytes()},
                                      {"push_ms", absl::ToDoubleMilliseconds(push_time)}});
  return handoff;
}

absl::StatusOr<engine::Sequence> PrefillService::Compute(engine::Sequence sequence,
                                                         const CallScope& scope) {
  auto outcome = std::make_shared<BoundedQueue<Outcome>>(1);
  const auto is_cancelled = std::make_shared<std::atomic<bool>>(false);
  StepLoop::Entry entry;
  entry.sequence = std::move(sequence);
  entry.is_cancelled = is_cancelled;
  entry.on_token = [](const engine::Sequence&) { return false; };
  entry.on_end = [outcome](engine::Sequence ended, const absl::Status& status) {
    outcome->TryPush({std::move(ended), status});
  };
  ISTHMUS_RETURN_IF_ERROR(worker_->loop().Submit(std::move(entry)));
  // The loop always ends what it took: at the latest one step after the flag, or when it stops.
  while (true) {
    std::optional<Outcome> ended = outcome->PopFor(kCancelPoll);
    if (ended.has_value()) {
      ISTHMUS_RETURN_IF_ERROR(ended->status);
      return std::move(ended->sequence);
    }
    if (scope.is_cancelled() || worker_->clock().Now() > scope.deadline) *is_cancelled = true;
  }
}

absl::StatusOr<v1::KvHandoff> PrefillService::PushPages(const v1::PrefillCall& call,
                                                        const engine::Sequence& sequence,
                                                        absl::Time deadline) {
  kv::CachePool& pool = worker_->pool();
  const int64_t num_tokens = sequence.num_prompt_tokens;
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<transfer::PageSpan> spans,
                           SpansOf(pool, sequence.cache, num_tokens, call.reservation()));
  v1::KvHandoff handoff;
  handoff.set_transfer_id(call.reservation().transfer_id());
  handoff.set_worker_incarnation(call.reservation().worker_incarnation());
  handoff.set_layout_fingerprint(worker_->identity().layout_fingerprint);
  handoff.set_num_prompt_tokens(static_cast<uint64_t>(num_tokens));
  handoff.set_first_token(static_cast<uint32_t>(sequence.tokens.back()));
  *handoff.mutable_sampler() = call.sampler();
  handoff.mutable_sampler()->set_num_draws(sequence.num_draws);
  handoff.set_writer_incarnation(worker_->identity().worker_incarnation);
  for (const transfer::ExpectedGroup& group : GroupsOf(pool, sequence.cache, num_tokens)) {
    v1::PageGroupDigest* digest = handoff.add_digests();
    digest->set_cache_kind(group.cache_kind);
    digest->set_page_index(group.page_index);
    digest->set_first_layer(group.first_layer);
    digest->set_num_layers(group.num_layers);
    digest->set_first_position(group.first_position);
    digest->set_crc32c(DigestOf(handoff.transfer_id(), group));
  }
  ISTHMUS_ASSIGN_OR_RETURN(const uint64_t bytes,
                           transfer::Push(worker_->transport(), call.reservation(), call.target(),
                                          worker_->identity().layout_fingerprint, spans, deadline));
  handoff.set_kv_bytes(bytes);
  return handoff;
}

}  // namespace isthmus::worker
