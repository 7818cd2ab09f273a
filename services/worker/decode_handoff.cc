// SPDX-License-Identifier: Apache-2.0
// Handoffs: what arrived is verified and becomes a sequence.
#include "services/worker/decode_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/receiver.h"
#include "services/base/fault.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/engine/prefix_reuse.h"
#include "services/worker/call_checks.h"
#include "services/worker/page_groups.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {
namespace {

absl::Status GoneReservation() {
  return WithFaultScope(
      absl::AbortedError("transfer_id: no such reservation (any more); its lease may be over"),
      FaultScope::kRequest);
}

}  // namespace

absl::StatusOr<uint64_t> DecodeService::Verify(const v1::HandoffCall& call, Transfer& transfer) {
  const v1::KvHandoff& handoff = call.handoff();
  ISTHMUS_RETURN_IF_ERROR(
      transfer::CheckHandoff(handoff, transfer.reservation, worker_->identity()));
  const uint64_t reserved = transfer.call.num_prompt_tokens();
  if (handoff.num_prompt_tokens() != reserved) {
    return absl::InvalidArgumentError(absl::StrCat("num_prompt_tokens: ", reserved,
                                                   " are reserved, the handoff has ",
                                                   handoff.num_prompt_tokens()));
  }
  if (call.max_output_tokens() == 0 ||
      call.max_output_tokens() > transfer.call.max_output_tokens()) {
    return absl::InvalidArgumentError(absl::StrCat("max_output_tokens: is ",
                                                   call.max_output_tokens(), ", want 1 to ",
                                                   transfer.call.max_output_tokens()));
  }
  const auto num_tokens = static_cast<int64_t>(reserved);
  const auto held_tokens = static_cast<int64_t>(transfer.reservation.held_tokens());
  std::vector<transfer::ExpectedGroup> groups =
      GroupsOf(worker_->pool(), transfer.cache, num_tokens, held_tokens);
  PageStaging* const staging = worker_->staging();
  if (staging != nullptr) {  // The bytes have landed in the mirrors.
    for (transfer::ExpectedGroup& group : groups) {
      group.bytes = {staging->MirrorOf(group.bytes.data()), group.bytes.size()};
    }
  }
  ISTHMUS_ASSIGN_OR_RETURN(
      const uint64_t verified,
      transfer::VerifyGroups(handoff, groups, [&](const transfer::ExpectedGroup& group) {
        return DigestOf(handoff.transfer_id(), group);
      }));
  if (staging != nullptr) {
    ISTHMUS_RETURN_IF_ERROR(staging->CopyUp(transfer.cache, num_tokens, held_tokens));
  }
  return verified;
}

absl::StatusOr<v1::HandoffReply> DecodeService::Handoff(const v1::HandoffCall& call) {
  ISTHMUS_RETURN_IF_ERROR(worker_->CheckRole(v1::WORKER_ROLE_DECODE));
  const std::string& transfer_id = call.handoff().transfer_id();
  std::shared_ptr<Transfer> transfer;
  v1::HandoffReply reply;
  {
    MutexLock lock(mutex_);
    const auto found = transfers_.find(transfer_id);
    if (found == transfers_.end()) {
      metrics_->Add(kHandoffRefusals, 1);
      return GoneReservation();
    }
    transfer = found->second;
    if (transfer->state == Transfer::State::kRunning) {
      reply.set_digests_verified(transfer->digests_verified);
      return reply;  // A repeated call.
    }
    if (transfer->state == Transfer::State::kAdmitting) {
      return absl::AbortedError("transfer_id: another handoff of it is being verified");
    }
    transfer->state = Transfer::State::kAdmitting;
  }
  const absl::StatusOr<uint64_t> verified = Verify(call, *transfer);
  absl::Status status = verified.status();
  if (status.ok()) {
    transfer->digests_verified = *verified;
    status = Admit(call, transfer);
  }
  if (!status.ok()) {
    Refuse(call, *transfer, status);
    return status;
  }
  metrics_->Add(kVerifiedGroups, static_cast<double>(*verified));
  reply.set_digests_verified(*verified);
  return reply;
}

void DecodeService::Refuse(const v1::HandoffCall& call, Transfer& transfer,
                           const absl::Status& status) {
  metrics_->Add(kHandoffRefusals, 1);
  LogWarning("refused a handoff",
             {{"request_id", call.request_id()}, {"status", status.ToString()}});
  MutexLock lock(mutex_);
  // A handoff that is not what it should be is no proof that its writer has ended.
  if (transfer.cache.is_open()) Quarantine(transfer);
  const auto entry = transfers_.find(transfer.call.transfer_id());
  if (entry != transfers_.end()) Erase(entry);
}

// The sequence of one reply, without its cache.
absl::StatusOr<engine::Sequence> DecodeService::SequenceOf(const v1::HandoffCall& call,
                                                           const Transfer& transfer,
                                                           size_t reply_index) const {
  const v1::KvHandoff& handoff = call.handoff();
  const v1::ClusterValues& values = worker_->card().values();
  engine::Sequence sequence;
  sequence.request_id = call.request_id();
  sequence.tokens = transfer.prompt;
  sequence.cache_salt = transfer.call.cache_salt();
  sequence.prefix = transfer.prefix;
  sequence.num_prompt_tokens = static_cast<int64_t>(handoff.num_prompt_tokens());
  sequence.sampling = SamplingOf(handoff.sampler().sampling());
  sequence.sampling.max_tokens = static_cast<int64_t>(call.max_output_tokens());
  sequence.sampling.top_prompt_logprobs.reset();  // The client has them already.
  const size_t num_replies = sequence.sampling.further_seeds.size() + 1;
  if (num_replies != transfer.replies.size() ||
      static_cast<size_t>(handoff.first_tokens_size()) != num_replies) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_replies: ", transfer.replies.size(), " are reserved, the sampler has ",
                     num_replies, ", there are ", handoff.first_tokens_size(), " first tokens"));
  }
  if (reply_index > 0) {
    sequence.sampling.seed = sequence.sampling.further_seeds[reply_index - 1];
  }
  sequence.sampling.further_seeds.clear();  // Their first tokens have been drawn.
  ISTHMUS_RETURN_IF_ERROR(worker_->engine().Validate(sequence.tokens, sequence.sampling));
  const v1::FirstToken& first = handoff.first_tokens(static_cast<int>(reply_index));
  if (first.token_id() >= values.vocab_size()) {
    return absl::InvalidArgumentError(absl::StrCat("first_tokens: has token ", first.token_id(),
                                                   ", the vocabulary has ", values.vocab_size()));
  }
  const auto token = static_cast<int32_t>(first.token_id());
  sequence.finish = worker_->engine().FinishWith(sequence, token, 0);
  sequence.tokens.push_back(token);
  sequence.num_draws = handoff.sampler().num_draws();
  if (sequence.sampling.wants_logits_digests) {
    sequence.logits_crc32c.push_back(first.logits_crc32c());
  }
  if (sequence.sampling.top_logprobs.has_value()) {
    sequence.logprobs.push_back(FromWire(first.logprobs()));
  }
  return sequence;
}

// Of all replies. What arrived once becomes the cache of each.
absl::StatusOr<std::vector<engine::Sequence>> DecodeService::SequencesOf(
    const v1::HandoffCall& call, Transfer& transfer) {
  std::vector<engine::Sequence> sequences;
  for (size_t i = 0; i < transfer.replies.size(); ++i) {
    ISTHMUS_ASSIGN_OR_RETURN(engine::Sequence sequence, SequenceOf(call, transfer, i));
    sequences.push_back(std::move(sequence));
  }
  ISTHMUS_RETURN_IF_ERROR(transfer.cache.SetNumTokens(sequences[0].num_prompt_tokens));
  for (size_t i = 1; i < transfer.replies.size(); ++i) {
    ISTHMUS_RETURN_IF_ERROR(transfer.cache.ForkInto(transfer.replies[i].cache));
  }
  return sequences;
}

absl::Status DecodeService::Admit(const v1::HandoffCall& call,
                                  const std::shared_ptr<Transfer>& transfer) {
  ISTHMUS_ASSIGN_OR_RETURN(std::vector<engine::Sequence> sequences, SequencesOf(call, *transfer));
  std::shared_ptr<TokenQueue> queue;
  {
    MutexLock lock(mutex_);
    queue = streams_.Find(transfer->call.router_incarnation());
    if (queue == nullptr) return absl::CancelledError("the router's token stream has ended");
    if (*transfer->replies[0].is_cancelled) {
      return absl::CancelledError("cancelled before it was admitted");
    }
    transfer->replies[0].cache = std::move(transfer->cache);
    for (size_t i = 0; i < sequences.size(); ++i) {
      Reply& reply = transfer->replies[i];
      sequences[i].cache = std::move(reply.cache);
      sequences[i].claim = std::move(reply.claim);
      sequences[i].urgency = transfer->urgency;
      reply.is_open = true;
    }
    transfer->num_open = sequences.size();
    transfer->state = Transfer::State::kRunning;
  }
  // The next turn of its conversation may come before its first step.
  engine::PublishPrefix(worker_->pool(), sequences[0]);
  return Run(transfer, std::move(sequences), queue);
}

}  // namespace isthmus::worker
