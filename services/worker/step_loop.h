// SPDX-License-Identifier: Apache-2.0
// The one thread that runs the engine. RPC threads put sequences into its bounded inbox; it steps
// all running ones together and hands each back when it ends. When a step cannot have its pages,
// or a newcomer of a higher class asks for them, the least urgent ones give theirs back and wait
// until they may have them again: nobody outside sees more of that than time.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/base/queue.h"
#include "services/base/thread.h"
#include "services/engine/admission.h"
#include "services/engine/engine.h"

namespace isthmus::worker {

using CancelFlag = std::shared_ptr<std::atomic<bool>>;

// What one step was, for metrics; also a round that preempted and had nothing left to step.
struct StepFigures {
  absl::Duration duration;
  // Running ones; a budget may have kept some of them out of the step. 0: there was no step.
  int64_t num_sequences = 0;
  int64_t num_preemptions = 0;  // Before it: for its pages, or for newcomers.
  int64_t num_given_way = 0;    // Of these, for newcomers.
  // Tokens that were cached once before.
  int64_t num_recomputed_tokens = 0;
  int64_t num_preempted = 0;  // Sequences that wait for pages.
};
using StepObserver = std::function<void(const StepFigures& figures)>;

class StepLoop {
 public:
  // One sequence in the care of the loop. Both functions run on the loop's thread and must not
  // block.
  struct Entry {
    engine::Sequence sequence;

    // After a step that advanced the sequence: more of its prompt is cached, or it gained
    // `num_gained` tokens. False ends it here.
    std::function<bool(const engine::Sequence& sequence, int64_t num_gained)> on_step;

    // Exactly once, whatever happens: OK when finished or ended by on_step, CANCELLED, UNAVAILABLE
    // when the loop stops, or the error of its step. The pages are still held by `sequence`.
    std::function<void(engine::Sequence sequence, const absl::Status& status)> on_end;

    // True: the sequence ends before its next step.
    CancelFlag is_cancelled;

    // Its pages may be taken away, or it has none yet; else they must be all that it needs, and
    // others may be reading them.
    bool is_preemptible = false;
  };

  // All must outlive the loop. `admission` is the book of what it runs. At most `max_batch`
  // sequences run.
  StepLoop(engine::Engine* engine, engine::Admission* admission, size_t max_queued,
           size_t max_batch, Clock& clock);
  ~StepLoop();

  // `observer` may be empty; it is called by the loop's thread after every step.
  void Start(StepObserver observer = {});

  // Ends every sequence with UNAVAILABLE, scope peer, and the thread. Later entries are refused.
  void Stop();

  // ResourceExhausted: the inbox is full. Unavailable: the loop has stopped. `on_end` is then not
  // called.
  absl::Status Submit(Entry entry);

  // One round of the loop's thread: takes what has come, drops what is cancelled, resumes, steps.
  // For simulations without that thread; waits for work when there is none.
  void RunOnce();

  // Running and waiting.
  int64_t num_sequences() const { return num_sequences_; }
  // Since the start, and those that wait for their pages now.
  int64_t num_preemptions() const { return num_preemptions_; }
  int64_t num_preempted() const { return num_preempted_; }
  int64_t num_queued() const { return static_cast<int64_t>(inbox_.size()); }

  // How long ago the loop last got anywhere while there is work for it; zero when there is none.
  // The measure of liveness.
  absl::Duration stalled_for() const;

 private:
  struct Before;

  void Run();
  void TakeFromInbox();
  void DropCancelled();
  void ResumePreempted();
  void GiveWay();
  bool MakeRoom();
  bool PreemptLeastUrgent(absl::FunctionRef<bool(const Entry& entry)> may);
  void WaitForPages(Entry entry);
  void StepAll();
  void Observe();
  absl::Status StepThese(std::vector<Entry*> entries);
  void FinishStep(Entry& entry, const Before& before);
  void End(Entry& entry, const absl::Status& status);
  void RemoveEnded();
  void Touch();

  engine::Engine* const engine_;
  engine::Admission* const admission_;
  const size_t max_queued_;
  const size_t max_batch_;
  Clock& clock_;
  StepObserver observer_;
  BoundedQueue<Entry> inbox_;
  // The loop's thread alone, as all below. An ended entry has no on_end.
  std::vector<Entry> running_;
  // Without cache, the most urgent first. Not bounded by itself: admission refuses who would go
  // behind them, and who goes before them arrived at most five patiences later (urgency.h).
  std::vector<Entry> preempted_;
  bool lacks_pages_ = false;  // The last round could not step for want of pages.
  StepFigures figures_;       // Of the round, and of those before it that nobody observed.
  std::atomic<int64_t> num_sequences_ = 0;
  std::atomic<int64_t> num_preemptions_ = 0;
  std::atomic<int64_t> num_preempted_ = 0;
  std::atomic<int64_t> progress_ns_ = 0;  // Unix time of the last progress.
  Thread thread_;
};

}  // namespace isthmus::worker
