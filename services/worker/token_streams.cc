// SPDX-License-Identifier: Apache-2.0
#include "services/worker/token_streams.h"

#include "absl/strings/str_cat.h"

namespace isthmus::worker {
namespace {

constexpr size_t kMaxRouters = 64;

}  // namespace

size_t TokenStreams::max_routers() { return kMaxRouters; }

absl::StatusOr<std::shared_ptr<TokenQueue>> TokenStreams::Open(uint64_t router_incarnation) {
  MutexLock lock(mutex_);
  if (is_closed_) return absl::UnavailableError("this worker is stopping");
  auto queue = std::make_shared<TokenQueue>(2 * max_unread_, clock_);
  const auto found = queues_.find(router_incarnation);
  if (found != queues_.end()) {
    found->second->Close();
    found->second = queue;
    return queue;
  }
  if (queues_.size() >= kMaxRouters) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kMaxRouters, " routers have a token stream here already"));
  }
  queues_.emplace(router_incarnation, queue);
  return queue;
}

bool TokenStreams::Close(uint64_t router_incarnation, const std::shared_ptr<TokenQueue>& queue) {
  MutexLock lock(mutex_);
  queue->Close();
  const auto found = queues_.find(router_incarnation);
  if (found == queues_.end() || found->second != queue) return false;
  queues_.erase(found);
  return true;
}

void TokenStreams::CloseAll() {
  MutexLock lock(mutex_);
  is_closed_ = true;
  for (auto& [router, queue] : queues_) queue->Close();
}

std::shared_ptr<TokenQueue> TokenStreams::Find(uint64_t router_incarnation) const {
  MutexLock lock(mutex_);
  const auto found = queues_.find(router_incarnation);
  return found == queues_.end() ? nullptr : found->second;
}

}  // namespace isthmus::worker
