// SPDX-License-Identifier: Apache-2.0
// Sequences that run: their tokens into the stream, and their ends.
#include "services/worker/decode_service.h"

#include <utility>

#include "services/base/log.h"
#include "services/rpc/status.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {

StepLoop::Entry DecodeService::EntryOf(const std::shared_ptr<Transfer>& transfer,
                                       engine::Sequence sequence,
                                       const std::shared_ptr<TokenQueue>& queue) {
  StepLoop::Entry entry;
  entry.sequence = std::move(sequence);
  entry.is_cancelled = transfer->is_cancelled;
  entry.is_preemptible = true;
  entry.on_step = [this, transfer, queue](const engine::Sequence& running, int64_t num_gained) {
    if (num_gained == 0) return true;  // What was preempted is being recomputed.
    metrics_->Add(kOutputTokens, static_cast<double>(num_gained));
    if (running.is_finished()) return true;  // The last tokens leave when the pages are free.
    if (!streams_.HasRoom(*queue)) return false;
    v1::SequenceTokens message;
    SendTokens(*transfer, running, &message);
    return queue->TryPush(std::move(message));
  };
  entry.on_end = [this, transfer, queue](engine::Sequence ended, const absl::Status& status) {
    EndSequence(*transfer, std::move(ended), status, *queue);
  };
  return entry;
}

void DecodeService::SendTokens(Transfer& transfer, const engine::Sequence& sequence,
                               v1::SequenceTokens* message) const {
  message->set_transfer_id(transfer.call.transfer_id());
  message->set_first_index(static_cast<uint64_t>(transfer.num_sent));
  for (; transfer.num_sent < sequence.num_output_tokens(); ++transfer.num_sent) {
    const auto index = static_cast<size_t>(sequence.num_prompt_tokens + transfer.num_sent);
    message->add_token_ids(static_cast<uint32_t>(sequence.tokens[index]));
    if (!sequence.sampling.wants_logits_digests) continue;
    message->add_logits_crc32c(sequence.logits_crc32c[static_cast<size_t>(transfer.num_sent)]);
  }
}

void DecodeService::EndSequence(Transfer& transfer, engine::Sequence sequence,
                                const absl::Status& status, TokenQueue& queue) {
  v1::SequenceTokens message;
  if (status.ok() && sequence.is_finished()) {
    sequence.claim.NoteEnd(sequence.num_output_tokens());
    SendTokens(transfer, sequence, &message);
    message.set_end(sequence.finish == engine::FinishReason::kStop ? v1::SEQUENCE_END_STOP
                                                                   : v1::SEQUENCE_END_LENGTH);
  } else {
    const absl::Status error =
        status.ok() ? absl::ResourceExhaustedError("the router does not read its tokens") : status;
    message.set_transfer_id(transfer.call.transfer_id());
    message.set_first_index(static_cast<uint64_t>(transfer.num_sent));
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
    const auto entry = transfers_.find(transfer.call.transfer_id());
    if (entry != transfers_.end()) Erase(entry);
  }
  // A router must learn of every end: without room for it, by the end of its stream.
  if (!queue.TryPush(std::move(message))) queue.Close();
}

}  // namespace isthmus::worker
