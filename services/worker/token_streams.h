// SPDX-License-Identifier: Apache-2.0
// The token streams of a decode worker, one per router: bounded queues between the step loop, which
// must never wait, and the threads that write to the network.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "proto/worker.pb.h"
#include "services/base/mutex.h"
#include "services/base/queue.h"

namespace isthmus::worker {

using TokenQueue = BoundedQueue<v1::SequenceTokens>;

class TokenStreams {
 public:
  // A queue for a router's stream; AlreadyExists when it has one.
  absl::StatusOr<std::shared_ptr<TokenQueue>> Open(uint64_t router_incarnation);
  void Close(uint64_t router_incarnation);
  // Ends all streams; further ones are refused.
  void CloseAll();

  // Null when that router has no stream.
  std::shared_ptr<TokenQueue> Find(uint64_t router_incarnation) const;

 private:
  mutable Mutex mutex_;
  std::map<uint64_t, std::shared_ptr<TokenQueue>> queues_;  // Guarded by mutex_.
  bool is_closed_ = false;                                  // Guarded by mutex_.
};

}  // namespace isthmus::worker
