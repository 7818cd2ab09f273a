// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/timekeeper.h"

#include <algorithm>

namespace isthmus::rpc {

Timekeeper::Timekeeper() : wakes_at_(absl::InfinitePast()), thread_(clock_, [this] { Run(); }) {}

Timekeeper::~Timekeeper() {
  {
    MutexLock lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.Join();
}

uint64_t Timekeeper::Add(grpc::ServerContext* context, absl::Duration patience) {
  bool is_sooner = false;
  uint64_t ticket = 0;
  {
    MutexLock lock(mutex_);
    const absl::Time end = clock_.Now() + patience;
    is_sooner = end < wakes_at_;
    wakes_at_ = std::min(wakes_at_, end);
    ticket = next_ticket_++;
    calls_[ticket] = {context, end};
  }
  if (is_sooner) changed_.notify_all();
  return ticket;
}

void Timekeeper::Remove(uint64_t ticket) {
  MutexLock lock(mutex_);
  calls_.erase(ticket);
}

void Timekeeper::Run() {
  MutexLock lock(mutex_);
  while (!stops_) {
    const absl::Time now = clock_.Now();
    absl::Time next = now + absl::Hours(1);
    for (auto& [ticket, call] : calls_) {
      if (call.end <= now) {
        call.context->TryCancel();
        call.end = absl::InfiniteFuture();
      }
      next = std::min(next, call.end);
    }
    wakes_at_ = next;
    // Only a call that ends before the time already set is a reason to look again.
    clock_.WaitFor(changed_, lock, next - now, [this, next] { return stops_ || wakes_at_ < next; });
  }
}

}  // namespace isthmus::rpc
