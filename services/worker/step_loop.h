// SPDX-License-Identifier: Apache-2.0
// The one thread that runs the engine. RPC threads put sequences into its bounded inbox; it steps
// all running ones together and hands each back when it ends.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "services/base/queue.h"
#include "services/engine/engine.h"

namespace isthmus::worker {

using CancelFlag = std::shared_ptr<std::atomic<bool>>;

class StepLoop {
 public:
  // One sequence in the care of the loop. Both functions run on the loop's thread and must not
  // block.
  struct Entry {
    engine::Sequence sequence;

    // After a step that gave the sequence a token. False ends it here (a prefill is then done).
    std::function<bool(const engine::Sequence& sequence)> on_token;

    // Exactly once, whatever happens: OK when finished or ended by on_token, CANCELLED, or the
    // error of its step. The pages are still held by `sequence`.
    std::function<void(engine::Sequence sequence, const absl::Status& status)> on_end;

    // True: the sequence ends before its next step.
    CancelFlag is_cancelled;
  };

  // `engine` must outlive the loop. At most `max_batch` sequences in a step.
  StepLoop(engine::Engine* engine, size_t max_queued, size_t max_batch);
  ~StepLoop();

  void Start();

  // Ends every sequence with CANCELLED and the thread. Later entries are refused.
  void Stop();

  // ResourceExhausted: the inbox is full. Unavailable: the loop has stopped. `on_end` is then not
  // called.
  absl::Status Submit(Entry entry);

  // Running and waiting.
  int64_t num_sequences() const { return num_sequences_; }

 private:
  void Run();
  void TakeFromInbox();
  void DropCancelled();
  void StepAll();
  void StepOneByOne();
  void FinishStep(size_t index, size_t tokens_before);
  void End(Entry& entry, const absl::Status& status);
  void RemoveEnded();

  engine::Engine* const engine_;
  const size_t max_queued_;
  const size_t max_batch_;
  BoundedQueue<Entry> inbox_;
  std::vector<Entry> running_;  // The loop's thread alone. An ended entry has no on_end.
  std::atomic<int64_t> num_sequences_ = 0;
  std::thread thread_;
};

}  // namespace isthmus::worker
