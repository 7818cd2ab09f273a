// SPDX-License-Identifier: Apache-2.0
#include "router/router.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "router/handoff.h"
#include "router/place.h"
#include "router/router_metrics.h"
#include "router/stream.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/base/version.h"
#include "services/rpc/identity.h"

namespace isthmus::router {
namespace {

bool HasContent(const v1::TokenDelta& delta) {
  return delta.token_ids_size() > 0 || !delta.content().empty() ||
         !delta.reasoning_content().empty();
}

absl::Status ClientLeft() { return absl::CancelledError("the client left"); }

}  // namespace

absl::Status Router::Generate(const v1::GenerateRequest& request, const ClientStream& client) {
  const absl::StatusOr<Placement> placement = Place(view_->links());
  if (!placement.ok()) return Run(placement.status(), request.request_id(), client);
  return Run(
      acceptor_->AcceptGenerate(request, ValuesOf(*placement), clock_.Now(), client.deadline),
      request.request_id(), client);
}

absl::Status Router::Chat(const v1::ChatRequest& request, const ClientStream& client) {
  const absl::StatusOr<Placement> placement = Place(view_->links());
  if (!placement.ok()) return Run(placement.status(), request.request_id(), client);
  return Run(acceptor_->AcceptChat(request, ValuesOf(*placement), clock_.Now(), client.deadline),
             request.request_id(), client);
}

absl::Status Router::Run(absl::StatusOr<RoutedRequest> accepted, const std::string& wanted_id,
                         const ClientStream& client) {
  absl::Status status = accepted.status();
  if (status.ok()) status = Serve(*accepted, client);
  metrics_->Add(kRequests, 1, {absl::StatusCodeToString(status.code())});
  metrics_->Set(kActiveRequests, static_cast<double>(admission_.active()));
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
                           admission_.Enter(request.deadline, client.is_cancelled));
  metrics_->Set(kActiveRequests, static_cast<double>(admission_.active()));
  // Again, since the wait may have been long and a worker another one now.
  ISTHMUS_ASSIGN_OR_RETURN(Placement placement, Place(view_->links()));
  const uint32_t end_token_id = placement.decode_card.values().end_token_id();
  Attempt attempt(&request, std::move(placement), view_->incarnation(), clock_,
                  client.is_cancelled);
  absl::Status status = attempt.HandOver();
  if (!status.ok()) {
    metrics_->Add(kHandoffFailures, 1);
    return status;
  }
  metrics_->Add(kPromptTokens, static_cast<double>(request.prompt.size()));
  return Stream(request, end_token_id, attempt, client);
}

absl::Status Router::Stream(const RoutedRequest& request, uint32_t end_token_id, Attempt& attempt,
                            const ClientStream& client) {
  ReplyStream reply(&acceptor_->tokenizer(), request, end_token_id);
  v1::GenerateReply event;
  google::protobuf::RepeatedField<uint32_t> first;
  first.Add(attempt.first_token());
  *event.mutable_delta() = reply.Push(first);
  if (!client.write(event)) return ClientLeft();
  const absl::Time first_at = clock_.Now();
  metrics_->Observe(kTimeToFirstToken, absl::ToDoubleSeconds(first_at - request.accepted_at));

  v1::SequenceEnd end = v1::SEQUENCE_END_UNSPECIFIED;
  while (end == v1::SEQUENCE_END_UNSPECIFIED) {  // Ends at the deadline at the latest.
    ISTHMUS_ASSIGN_OR_RETURN(const v1::SequenceTokens tokens, attempt.NextTokens());
    end = tokens.end();
    if (tokens.first_index() != reply.num_output_tokens()) {
      return absl::InternalError(
          absl::StrCat("token ", tokens.first_index(), " came, want ", reply.num_output_tokens()));
    }
    *event.mutable_delta() = reply.Push(tokens.token_ids());
    if (HasContent(event.delta()) && !client.write(event)) return ClientLeft();
  }
  const absl::Duration decode_time = clock_.Now() - first_at;
  *event.mutable_delta() = reply.PushEnd();
  if (HasContent(event.delta()) && !client.write(event)) return ClientLeft();

  *event.mutable_finish() = reply.Finish(end);
  v1::Timings* timings = event.mutable_finish()->mutable_timings();
  timings->set_ttft_ms(absl::ToDoubleMilliseconds(first_at - request.accepted_at));
  if (reply.num_output_tokens() > 1) {
    timings->set_tokens_per_s(static_cast<double>(reply.num_output_tokens() - 1) /
                              absl::ToDoubleSeconds(decode_time));
  }
  v1::TransferFigures* transfer = event.mutable_finish()->mutable_transfer();
  transfer->set_kv_bytes(attempt.kv_bytes());
  transfer->set_digests_verified(attempt.digests_verified());
  metrics_->Add(kRelayedTokens, static_cast<double>(reply.num_output_tokens()));
  LogInfo("a request is done", {{"request_id", request.request_id},
                                {"prompt_tokens", static_cast<uint64_t>(request.prompt.size())},
                                {"output_tokens", reply.num_output_tokens()},
                                {"ttft_ms", timings->ttft_ms()},
                                {"tokens_per_s", timings->tokens_per_s()},
                                {"kv_bytes", transfer->kv_bytes()},
                                {"digests_verified", transfer->digests_verified()}});
  return client.write(event) ? absl::OkStatus() : ClientLeft();
}

absl::Status Router::Readiness() const {
  const absl::StatusOr<Placement> placement = Place(view_->links());
  if (!placement.ok()) return placement.status();
  const auto own = static_cast<uint32_t>(acceptor_->tokenizer().vocab_size());
  const uint32_t theirs = placement->decode_card.values().vocab_size();
  if (own <= theirs) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("tokenizer.json has ", own, " ids, the workers' model has ", theirs));
}

v1::StatusReply Router::Status() const {
  v1::StatusReply reply;
  reply.set_version(std::string(SemanticVersion()));
  reply.set_commit(std::string(GitCommit()));
  reply.set_protocol_version(kProtocolVersion);
  const absl::Status readiness = Readiness();
  reply.set_is_ready(readiness.ok());
  reply.set_not_ready_reason(std::string(readiness.message()));
  for (const std::shared_ptr<WorkerLink>& link : view_->links()) {
    *reply.add_workers() = link->status();
  }
  reply.set_active_requests(static_cast<uint64_t>(admission_.active()));
  reply.set_queued_requests(static_cast<uint64_t>(admission_.queued()));
  return reply;
}

}  // namespace isthmus::router
