// SPDX-License-Identifier: Apache-2.0
// The token streams of a decode worker, one per router: bounded queues between the step loop, which
// must never wait, and the threads that write to the network.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/worker.pb.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/base/queue.h"

namespace isthmus::worker {

// A queue whose reader may sleep while tokens gather, since only the end of a sequence is urgent.
class TokenQueue : public BoundedQueue<v1::SequenceTokens> {
 public:
  TokenQueue(size_t capacity, Clock& clock) : BoundedQueue(capacity, clock), clock_(clock) {}

  bool TryPush(v1::SequenceTokens&& tokens) {
    const bool is_end = tokens.end() != v1::SEQUENCE_END_UNSPECIFIED;
    if (!BoundedQueue::TryPush(std::move(tokens))) return false;
    if (is_end) NoteUrgent();
    return true;
  }
  void Close() {
    BoundedQueue::Close();
    NoteUrgent();
  }

  // Ends of sequences, or of the queue, so far.
  uint64_t num_ends() const {
    MutexLock lock(mutex_);
    return num_ends_;
  }

  // Waits until there is another one than those `seen`, for at most `timeout`.
  void WaitForEnd(uint64_t seen, absl::Duration timeout) {
    MutexLock lock(mutex_);
    clock_.WaitFor(urgent_, lock, timeout, [&] { return num_ends_ != seen; });
  }

 private:
  void NoteUrgent() {
    MutexLock lock(mutex_);
    ++num_ends_;
    urgent_.notify_all();
  }

  Clock& clock_;
  mutable Mutex mutex_;
  CondVar urgent_;
  uint64_t num_ends_ = 0;  // Guarded by mutex_.
};

class TokenStreams {
 public:
  // A stream refuses tokens once `max_unread` messages wait in it; the messages that end sequences
  // find room twice that long. `clock` must outlive the streams.
  TokenStreams(size_t max_unread, Clock& clock) : max_unread_(max_unread), clock_(clock) {}

  // A queue for a router's stream, in place of the one it has: who comes again knows that the old
  // one is dead, and its reader sees it closed. ResourceExhausted: too many routers.
  absl::StatusOr<std::shared_ptr<TokenQueue>> Open(uint64_t router_incarnation);

  // False when that router has another stream by now, or none.
  bool Close(uint64_t router_incarnation, const std::shared_ptr<TokenQueue>& queue);

  // Ends all streams; further ones are refused.
  void CloseAll();

  // Null when that router has no stream.
  std::shared_ptr<TokenQueue> Find(uint64_t router_incarnation) const;

  // Whether `queue` takes tokens, or must be kept for ends.
  bool HasRoom(const TokenQueue& queue) const { return queue.size() < max_unread_; }

  // Routers that can have a stream at one time.
  static size_t max_routers();

 private:
  const size_t max_unread_;
  Clock& clock_;
  mutable Mutex mutex_;
  std::map<uint64_t, std::shared_ptr<TokenQueue>> queues_;  // Guarded by mutex_.
  bool is_closed_ = false;                                  // Guarded by mutex_.
};

}  // namespace isthmus::worker
