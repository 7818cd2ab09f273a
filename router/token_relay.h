// SPDX-License-Identifier: Apache-2.0
// From one decode worker's token stream to the requests that wait for its tokens.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "proto/worker.pb.h"
#include "services/base/mutex.h"
#include "services/base/queue.h"

namespace isthmus::router {

// Tokens of one sequence, in order. Closed without a last message when its client was too slow.
using SequenceQueue = BoundedQueue<v1::SequenceTokens>;

class TokenRelay {
 public:
  // Before the handoff, so that no token can be missed.
  std::shared_ptr<SequenceQueue> Subscribe(const std::string& transfer_id);
  void Unsubscribe(const std::string& transfer_id);

  // Never waits: a sequence whose queue is full loses its queue, not the others their time.
  void Deliver(const v1::StepTokens& step);

  // Ends every subscription with `status`: the stream is gone.
  void FailAll(const absl::Status& status);

 private:
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<SequenceQueue>> queues_;  // Guarded by mutex_.
};

}  // namespace isthmus::router
