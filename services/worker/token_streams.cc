// SPDX-License-Identifier: Apache-2.0
#include "services/worker/token_streams.h"

#include "absl/strings/str_cat.h"

namespace isthmus::worker {
namespace {

// Messages between step loop and network. A router that leaves so many unread is not reading.
constexpr size_t kMaxQueued = 8192;
constexpr size_t kMaxRouters = 64;

}  // namespace

absl::StatusOr<std::shared_ptr<TokenQueue>> TokenStreams::Open(uint64_t router_incarnation) {
  MutexLock lock(mutex_);
  if (is_closed_) return absl::UnavailableError("this worker is stopping");
  if (queues_.size() >= kMaxRouters) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kMaxRouters, " routers have a token stream here already"));
  }
  auto queue = std::make_shared<TokenQueue>(kMaxQueued);
  if (!queues_.emplace(router_incarnation, queue).second) {
    return absl::AlreadyExistsError(
        absl::StrCat("router ", router_incarnation, " has a token stream here already"));
  }
  return queue;
}

void TokenStreams::Close(uint64_t router_incarnation) {
  MutexLock lock(mutex_);
  const auto found = queues_.find(router_incarnation);
  if (found == queues_.end()) return;
  found->second->Close();
  queues_.erase(found);
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
