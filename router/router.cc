// SPDX-License-Identifier: Apache-2.0
#include "router/router.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "router/router_metrics.h"
#include "router/stream.h"
#include "services/base/fault.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/base/version.h"
#include "services/rpc/identity.h"
#include "services/rpc/wire.h"

namespace isthmus::router {
namespace {

// A worker whose last call failed is ready again with its next report, one that has just registered
// with its token stream; a request that finds nobody else waits about that long.
constexpr absl::Duration kRecoveryPatience = absl::Milliseconds(1200);
constexpr absl::Duration kRecoveryPoll = absl::Milliseconds(10);

// A message of them is a few hundred kilobytes at most, which any client takes.
constexpr int kPromptLogprobsPerEvent = 1024;

absl::Status ClientLeft() { return absl::CancelledError("the client left"); }

absl::Status TooSlow() {
  return absl::ResourceExhaustedError("the client reads more slowly than tokens are made");
}

// The same code and scope, with more to say.
absl::Status Annotated(const absl::Status& status, absl::string_view more) {
  return WithFaultScope(absl::Status(status.code(), absl::StrCat(status.message(), "; ", more)),
                        FaultScopeOf(status));
}

}  // namespace

Router::Router(const RouterConfig& config, const Acceptor* acceptor, ClusterView* view,
               rpc::MetricsExporter* metrics, Clock& clock)
    : config_(config),
      acceptor_(acceptor),
      view_(view),
      metrics_(metrics),
      clock_(clock),
      placer_(config.route_policy),
      admission_(config.max_active_requests, config.max_queued_requests, clock),
      canceller_(
          metrics, [this] { admission_.Wake(); }, clock) {
  view_->OnChange([this] { admission_.Wake(); });
  // Counters that exist from the start have rates from the start.
  for (const char* outcome : {"acknowledged", "unacknowledged"}) {
    metrics_->Add(kCancels, 0, {outcome});
  }
  for (const absl::StatusCode code :
       {absl::StatusCode::kUnavailable, absl::StatusCode::kAborted, absl::StatusCode::kDataLoss}) {
    metrics_->Add(kHandoffFailures, 0, {absl::StatusCodeToString(code)});
    metrics_->Add(kRetries, 0, {absl::StatusCodeToString(code)});
  }
}

Router::~Router() { view_->OnChange({}); }

absl::Status Router::Persist(absl::Time deadline, const ClientStream& client,
                             absl::FunctionRef<absl::Status()> find) {
  const absl::Time end = std::min(deadline, clock_.Now() + kRecoveryPatience);
  bool is_last = false;
  while (true) {
    absl::Status found = find();
    if (!absl::IsUnavailable(found) || clock_.Now() >= end || is_last) return found;
    const Links links = view_->links();
    is_last = std::none_of(links.begin(), links.end(),
                           [](const auto& link) { return link->is_recovering(); });
    if (is_last) continue;  // Who has recovered since the search is worth another one.
    if (client.is_cancelled()) return ClientLeft();
    clock_.Sleep(kRecoveryPoll);
  }
}

absl::StatusOr<v1::ClusterValues> Router::Values(const ClientStream& client) {
  absl::StatusOr<v1::ClusterValues> values;
  ISTHMUS_RETURN_IF_ERROR(Persist(client.deadline, client, [&] {
    values = ValuesOf(view_->links(), [this] { return view_->Statuses(); });
    return values.status();
  }));
  return values;
}

absl::Status Router::Generate(const v1::GenerateRequest& request, const ClientStream& client) {
  const absl::StatusOr<v1::ClusterValues> values = Values(client);
  if (!values.ok()) return Run(values.status(), request.request_id(), client);
  return Run(acceptor_->AcceptGenerate(request, *values, clock_.Now(), client.deadline),
             request.request_id(), client);
}

absl::Status Router::Chat(const v1::ChatRequest& request, const ClientStream& client) {
  const absl::StatusOr<v1::ClusterValues> values = Values(client);
  if (!values.ok()) return Run(values.status(), request.request_id(), client);
  return Run(acceptor_->AcceptChat(request, *values, clock_.Now(), client.deadline),
             request.request_id(), client);
}

absl::Status Router::Run(absl::StatusOr<RoutedRequest> accepted, const std::string& wanted_id,
                         const ClientStream& client) {
  absl::Status status = accepted.status();
  if (status.ok()) {
    status = Serve(*accepted, client);
  } else if (absl::IsUnavailable(status) || absl::IsFailedPrecondition(status)) {
    metrics_->Add(kPlacementFailures, 1);
  }
  metrics_->Add(kRequests, 1, {absl::StatusCodeToString(status.code())});
  if (!status.ok()) {
    // A refused request has an id as well: the client's, unless that is what was refused.
    const std::string id =
        accepted.ok() ? accepted->request_id : RequestIdOf(wanted_id).value_or(rpc::NewRequestId());
    LogWarning("a request failed", {{"request_id", id}, {"status", status.ToString()}});
  }
  return status;
}

absl::Status Router::Serve(const RoutedRequest& request, const ClientStream& client) {
  ISTHMUS_ASSIGN_OR_RETURN(const Admission::Place place,
                           admission_.Enter(request.urgency(), client.is_cancelled));
  PlaceWish wish;
  wish.num_prompt_tokens = request.prompt.size();
  wish.max_output_tokens = request.max_output_tokens;
  wish.ask_id = rpc::NewIncarnation();
  Admission::Turn turn(&admission_, request.urgency());
  absl::Status last;
  for (int attempts = 1;;) {
    if (!wish.full.empty() || admission_.has_line()) {
      const absl::Status waited = turn.Wait(client.is_cancelled);
      if (!waited.ok()) return last.ok() ? waited : Annotated(waited, last.message());
      wish.may_ask = !wish.full.empty() && !wish.is_prefill_full;
      if (wish.full.count(wish.asked_at) == 0) wish.asked_at = 0;  // It is gone.
      wish.is_prefill_full = false;
      wish.full.clear();
    }
    bool may_retry = false;
    absl::Status status = Try(request, client, wish, turn, &may_retry);
    if (!may_retry) {
      // What went wrong first says more than that there is nobody else to try.
      const bool is_follow_up = attempts > 1 && absl::IsUnavailable(status) && !last.ok();
      return is_follow_up ? Annotated(last, status.message()) : status;
    }
    last = std::move(status);
    if (!wish.full.empty()) continue;  // Not a failure: its turn will come.
    if (attempts == config_.max_attempts) {
      return Annotated(last, absl::StrCat("the request was tried ", attempts, " times"));
    }
    ++attempts;
    metrics_->Add(kRetries, 1, {absl::StatusCodeToString(last.code())});
    LogWarning("a request is tried again",
               {{"request_id", request.request_id}, {"status", last.ToString()}});
  }
}

absl::StatusOr<Placement> Router::Place(const RoutedRequest& request, const ClientStream& client,
                                        const PlaceWish& wish) {
  absl::StatusOr<Placement> placement;
  ISTHMUS_RETURN_IF_ERROR(Persist(request.deadline, client, [&] {
    placement = placer_.Place(
        view_->links(), [this] { return view_->Statuses(); }, wish);
    return placement.status();
  }));
  return placement;
}

absl::Status Router::Try(const RoutedRequest& request, const ClientStream& client, PlaceWish& wish,
                         Admission::Turn& turn, bool* may_retry) {
  absl::Status no_room;
  // Of several decode workers one may have room while another has not.
  while (true) {
    absl::StatusOr<Placement> placement = Place(request, client, wish);
    if (!placement.ok()) {
      *may_retry = absl::IsResourceExhausted(placement.status());
      if (*may_retry) return no_room.ok() ? placement.status() : no_room;
      metrics_->Add(kPlacementFailures, 1);
      return placement.status();
    }
    const uint32_t end_token_id = placement->decode->card().values().end_token_id();
    const uint64_t decode = placement->decode->incarnation();
    Attempt attempt(
        &request, *std::move(placement),
        {view_->incarnation(), static_cast<size_t>(config_.max_behind_messages),
         config_.token_gather_time, &canceller_, &clock_, client.is_cancelled, client.cancel});
    const bool asks = wish.may_ask && (wish.asked_at == 0 || wish.asked_at == decode);
    absl::Status status = attempt.Reserve(asks ? wish.ask_id : 0);
    if (asks) wish.asked_at = HasRoomSoon(status) ? decode : 0;
    const bool is_reserved = status.ok();
    if (status.ok()) {
      turn.End();
      const absl::Time start = clock_.Now();
      metrics_->Observe(kQueueTime, absl::ToDoubleSeconds(start - request.accepted_at));
      status = attempt.HandOver();
      if (status.ok()) {
        metrics_->Observe(kHandoverTime, absl::ToDoubleSeconds(clock_.Now() - start));
        metrics_->Add(kPromptTokens, static_cast<double>(request.prompt.size()));
        status = Stream(request, end_token_id, attempt, client);
        if (status.ok() || !attempt.has_overflowed()) return status;
      }
      // Whatever the end of the client's call looked like to who met it first.
      if (attempt.has_overflowed()) {
        metrics_->Add(kSlowClients, 1);
        return TooSlow();
      }
    }
    if (absl::IsResourceExhausted(status)) {
      wish.full.insert(attempt.blamed().begin(), attempt.blamed().end());
      wish.is_prefill_full = wish.is_prefill_full || is_reserved;
      no_room = std::move(status);
      continue;
    }
    metrics_->Add(kHandoffFailures, 1, {absl::StatusCodeToString(status.code())});
    wish.failed.insert(attempt.blamed().begin(), attempt.blamed().end());
    wish.full.clear();
    *may_retry = IsWorthAnotherPair(status) && clock_.Now() < request.deadline;
    return status;
  }
}

absl::Status Router::Write(const v1::SequenceTokens& tokens, Attempt& attempt, ReplySet& replies,
                           const ClientStream& client) {
  ISTHMUS_ASSIGN_OR_RETURN(const ReplySet::Taken taken, replies.Take(tokens));
  // First, so that the worker need not wait for a slow client.
  if (taken.must_be_cancelled) attempt.EndReply(tokens.reply_index());
  for (const v1::GenerateReply& event : taken.events) {
    if (!client.write(event)) return ClientLeft();
  }
  return absl::OkStatus();
}

absl::Status Router::WritePromptLogprobs(const v1::PromptLogprobs& logprobs,
                                         const ClientStream& client) {
  for (int begin = 0; begin < logprobs.tokens_size(); begin += kPromptLogprobsPerEvent) {
    const int end = std::min(begin + kPromptLogprobsPerEvent, logprobs.tokens_size());
    v1::GenerateReply event;
    v1::PromptLogprobs& some = *event.mutable_prompt_logprobs();
    some.set_first_index(static_cast<uint64_t>(begin) + 1);
    for (int i = begin; i < end; ++i) *some.add_tokens() = logprobs.tokens(i);
    if (!client.write(event)) return ClientLeft();
  }
  return absl::OkStatus();
}

absl::Status Router::Stream(const RoutedRequest& request, uint32_t end_token_id, Attempt& attempt,
                            const ClientStream& client) {
  ReplySet replies(&acceptor_->tokenizer(), &request, end_token_id);
  ISTHMUS_RETURN_IF_ERROR(WritePromptLogprobs(attempt.prompt_logprobs(), client));
  for (const v1::SequenceTokens& first : attempt.first_tokens()) {
    ISTHMUS_RETURN_IF_ERROR(Write(first, attempt, replies, client));
  }
  const absl::Time first_at = clock_.Now();
  metrics_->Observe(kTimeToFirstToken, absl::ToDoubleSeconds(first_at - request.accepted_at));
  while (!replies.has_ended()) {  // Ends at the deadline at the latest.
    ISTHMUS_ASSIGN_OR_RETURN(const std::vector<v1::SequenceTokens> messages, attempt.NextTokens());
    for (const v1::SequenceTokens& tokens : messages) {
      ISTHMUS_RETURN_IF_ERROR(Write(tokens, attempt, replies, client));
    }
  }
  const double decode_seconds = absl::ToDoubleSeconds(clock_.Now() - first_at);

  v1::GenerateReply event;
  *event.mutable_finish() = replies.Finish();
  v1::Timings* timings = event.mutable_finish()->mutable_timings();
  timings->set_ttft_ms(absl::ToDoubleMilliseconds(first_at - request.accepted_at));
  const uint64_t num_output_tokens = replies.num_output_tokens();
  const auto num_replies = static_cast<double>(request.sampling.num_replies());
  if (const double tokens = static_cast<double>(num_output_tokens) - num_replies; tokens > 0) {
    timings->set_tokens_per_s(decode_seconds > 0 ? tokens / decode_seconds : 0);
    metrics_->Observe(kTimePerOutputToken, decode_seconds * num_replies / tokens);
  }
  v1::TransferFigures* transfer = event.mutable_finish()->mutable_transfer();
  transfer->set_kv_bytes(attempt.kv_bytes());
  transfer->set_digests_verified(attempt.digests_verified());
  event.mutable_finish()->mutable_usage()->set_cached_prompt_tokens(attempt.cached_prompt_tokens());
  metrics_->Add(kRelayedTokens, static_cast<double>(num_output_tokens));
  LogInfo("a request is done", {{"request_id", request.request_id},
                                {"prompt_tokens", static_cast<uint64_t>(request.prompt.size())},
                                {"cached_prompt_tokens", attempt.cached_prompt_tokens()},
                                {"output_tokens", num_output_tokens},
                                {"ttft_ms", timings->ttft_ms()},
                                {"tokens_per_s", timings->tokens_per_s()},
                                {"kv_bytes", transfer->kv_bytes()},
                                {"digests_verified", transfer->digests_verified()}});
  return client.write(event) ? absl::OkStatus() : ClientLeft();
}

void Router::StopAdmission(const std::string& reason) {
  if (admission_.is_closed()) return;
  admission_.Close();
  LogInfo("draining", {{"reason", reason}, {"active_requests", admission_.active()}});
}

int64_t Router::num_open() const {
  return admission_.active() + admission_.queued() + canceller_.num_pending();
}

absl::StatusOr<v1::DrainReply> Router::Drain(const v1::DrainTarget& target,
                                             absl::Duration patience) {
  v1::DrainReply reply;
  if (target.address().empty()) {
    StopAdmission(target.reason());
    admission_.WaitUntilEmpty(patience);
    reply.set_transfers(static_cast<uint64_t>(admission_.active() + admission_.queued()));
    return reply;
  }
  const std::shared_ptr<WorkerLink> link = view_->Find(target.address());
  if (link == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("no worker at \"", target.address(), "\" is registered"));
  }
  v1::DrainCall call;
  call.set_reason(target.reason());
  rpc::ToWire(patience, call.mutable_patience());
  return link->client().Drain(
      call, {patience + absl::Seconds(5), [&link] { return !link->Standing().ok(); }});
}

absl::Status Router::Readiness() const {
  if (is_draining()) {
    return absl::UnavailableError("draining: the router takes no more requests");
  }
  ISTHMUS_ASSIGN_OR_RETURN(const v1::ClusterValues values,
                           ValuesOf(view_->links(), [this] { return view_->Statuses(); }));
  const auto own = static_cast<uint32_t>(acceptor_->tokenizer().vocab_size());
  if (own <= values.vocab_size()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "tokenizer.json has ", own, " ids, the workers' model has ", values.vocab_size()));
}

v1::StatusReply Router::Status() const {
  v1::StatusReply reply;
  reply.set_version(std::string(SemanticVersion()));
  reply.set_commit(std::string(GitCommit()));
  reply.set_protocol_version(kProtocolVersion);
  const absl::Status readiness = Readiness();
  reply.set_is_ready(readiness.ok());
  reply.set_not_ready_reason(std::string(readiness.message()));
  reply.set_is_draining(is_draining());
  for (v1::WorkerStatus& status : view_->Statuses()) *reply.add_workers() = std::move(status);
  reply.set_active_requests(static_cast<uint64_t>(admission_.active()));
  reply.set_queued_requests(static_cast<uint64_t>(admission_.queued()));
  return reply;
}

void Router::PublishGauges() const {
  metrics_->Set(kActiveRequests, static_cast<double>(admission_.active()));
  metrics_->Set(kQueuedRequests, static_cast<double>(admission_.queued()));
  metrics_->Set(kPendingCancels, static_cast<double>(canceller_.num_pending()));
  // All pairs of labels, so that a state that nobody is in any more becomes 0.
  std::map<std::pair<absl::string_view, absl::string_view>, int> counts;
  for (const v1::WorkerRole role : {v1::WORKER_ROLE_PREFILL, v1::WORKER_ROLE_DECODE}) {
    for (const v1::WorkerState state : {v1::WORKER_STATE_READY, v1::WORKER_STATE_DRAINING,
                                        v1::WORKER_STATE_SUSPECT, v1::WORKER_STATE_REFUSED}) {
      counts[{rpc::RoleName(role), rpc::WorkerStateName(state)}] = 0;
    }
  }
  for (const v1::WorkerStatus& status : view_->Statuses()) {
    ++counts[{rpc::RoleName(status.card().role()), rpc::WorkerStateName(status.state())}];
  }
  for (const auto& [labels, count] : counts) {
    metrics_->Set(kWorkers, count, {std::string(labels.first), std::string(labels.second)});
  }
}

}  // namespace isthmus::router
