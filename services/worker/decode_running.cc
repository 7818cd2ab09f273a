// SPDX-License-Identifier: Apache-2.0
// Sequences that run: their tokens into the stream, and their ends.
#include "services/worker/decode_service.h"

#include <utility>

#include "services/base/log.h"
#include "services/rpc/status.h"
#include "services/worker/call_checks.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {

absl::Status DecodeService::Run(const std::shared_ptr<Transfer>& transfer,
                                std::vector<engine::Sequence> sequences,
                                const std::shared_ptr<TokenQueue>& queue) {
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i].is_finished()) {
      EndSequence(*transfer, i, std::move(sequences[i]), absl::OkStatus(), *queue);
      continue;
    }
    const absl::Status submitted =
        worker_->loop().Submit(EntryOf(transfer, i, std::move(sequences[i]), queue));
    if (submitted.ok()) continue;
    transfer->CancelAll();  // Those that run already.
    return submitted;
  }
  return absl::OkStatus();
}

StepLoop::Entry DecodeService::EntryOf(const std::shared_ptr<Transfer>& transfer,
                                       size_t reply_index, engine::Sequence sequence,
                                       const std::shared_ptr<TokenQueue>& queue) {
  StepLoop::Entry entry;
  entry.sequence = std::move(sequence);
  entry.is_cancelled = transfer->replies[reply_index].is_cancelled;
  entry.is_preemptible = true;
  entry.on_step = [this, transfer, reply_index, queue](const engine::Sequence& running,
                                                       int64_t num_gained) {
    if (num_gained == 0) return true;  // What was preempted is being recomputed.
    metrics_->Add(kOutputTokens, static_cast<double>(num_gained));
    if (running.is_finished()) return true;  // The last tokens leave when the pages are free.
    if (!streams_.HasRoom(*queue)) return false;
    v1::SequenceTokens message;
    SendTokens(*transfer, reply_index, running, &message);
    return queue->TryPush(std::move(message));
  };
  entry.on_end = [this, transfer, reply_index, queue](engine::Sequence ended,
                                                      const absl::Status& status) {
    EndSequence(*transfer, reply_index, std::move(ended), status, *queue);
  };
  return entry;
}

void DecodeService::SendTokens(Transfer& transfer, size_t reply_index,
                               const engine::Sequence& sequence, v1::SequenceTokens* message) {
  Reply& reply = transfer.replies[reply_index];
  message->set_transfer_id(transfer.call.transfer_id());
  message->set_reply_index(static_cast<uint32_t>(reply_index));
  message->set_first_index(static_cast<uint64_t>(reply.num_sent));
  for (; reply.num_sent < sequence.num_output_tokens(); ++reply.num_sent) {
    const auto index = static_cast<size_t>(sequence.num_prompt_tokens + reply.num_sent);
    message->add_token_ids(static_cast<uint32_t>(sequence.tokens[index]));
    const auto output = static_cast<size_t>(reply.num_sent);
    if (sequence.sampling.wants_logits_digests) {
      message->add_logits_crc32c(sequence.logits_crc32c[output]);
    }
    if (sequence.sampling.top_logprobs.has_value()) {
      ToWire(sequence.logprobs[output], message->add_logprobs());
    }
  }
}

void DecodeService::EndSequence(Transfer& transfer, size_t reply_index, engine::Sequence sequence,
                                const absl::Status& status, TokenQueue& queue) {
  v1::SequenceTokens message;
  if (status.ok() && sequence.is_finished()) {
    sequence.claim.NoteEnd(sequence.num_output_tokens());
    SendTokens(transfer, reply_index, sequence, &message);
    message.set_end(sequence.finish == engine::FinishReason::kStop ? v1::SEQUENCE_END_STOP
                                                                   : v1::SEQUENCE_END_LENGTH);
  } else {
    const absl::Status error =
        status.ok() ? absl::ResourceExhaustedError("the router does not read its tokens") : status;
    message.set_transfer_id(transfer.call.transfer_id());
    message.set_reply_index(static_cast<uint32_t>(reply_index));
    message.set_first_index(static_cast<uint64_t>(transfer.replies[reply_index].num_sent));
    message.set_end(v1::SEQUENCE_END_FAILED);
    *message.mutable_error() = rpc::ToWorkerError(error);
    metrics_->Add(kEarlyEnds, 1, {absl::StatusCodeToString(error.code())});
    LogWarning("a sequence ended early",
               {{"request_id", sequence.request_id}, {"status", error.ToString()}});
  }
  // Its handoff was in order, so its writer has ended: the pages may be used again at once.
  sequence.cache = kv::SequenceCache();
  sequence.claim = engine::Admission::Claim();
  {
    MutexLock lock(mutex_);
    transfer.replies[reply_index].is_open = false;
    changed_.notify_all();
    const auto entry = transfers_.find(transfer.call.transfer_id());
    if (--transfer.num_open == 0 && entry != transfers_.end()) Erase(entry);
  }
  // A router must learn of every end: without room for it, by the end of its stream.
  if (!queue.TryPush(std::move(message))) queue.Close();
}

}  // namespace isthmus::worker
