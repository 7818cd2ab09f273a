// SPDX-License-Identifier: Apache-2.0
#include "router/token_relay.h"

#include <utility>

#include "services/rpc/status.h"

namespace isthmus::router {
namespace {

// Messages that a client may be behind. One step gives one message, so this is seconds.
constexpr size_t kMaxBehind = 2048;

}  // namespace

std::shared_ptr<SequenceQueue> TokenRelay::Subscribe(const std::string& transfer_id) {
  auto queue = std::make_shared<SequenceQueue>(kMaxBehind);
  MutexLock lock(mutex_);
  queues_[transfer_id] = queue;
  return queue;
}

void TokenRelay::Unsubscribe(const std::string& transfer_id) {
  MutexLock lock(mutex_);
  queues_.erase(transfer_id);
}

void TokenRelay::Deliver(const v1::StepTokens& step) {
  MutexLock lock(mutex_);
  for (const v1::SequenceTokens& tokens : step.sequences()) {
    const auto found = queues_.find(tokens.transfer_id());
    if (found == queues_.end()) continue;  // Its client has left.
    if (found->second->TryPush(v1::SequenceTokens(tokens))) continue;
    found->second->Close();
    queues_.erase(found);
  }
}

void TokenRelay::FailAll(const absl::Status& status) {
  MutexLock lock(mutex_);
  for (auto& [transfer_id, queue] : queues_) {
    v1::SequenceTokens last;
    last.set_transfer_id(transfer_id);
    last.set_end(v1::SEQUENCE_END_FAILED);
    *last.mutable_error() = rpc::ToWorkerError(status);
    if (!queue->TryPush(std::move(last))) queue->Close();
  }
  queues_.clear();
}

}  // namespace isthmus::router
