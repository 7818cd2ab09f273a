// SPDX-License-Identifier: Apache-2.0
#include "services/worker/step_loop.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/fault.h"
#include "services/base/log.h"

namespace isthmus::worker {
namespace {

// An entry or the end wakes an idle loop at once; nothing else has to.
constexpr absl::Duration kIdleWait = absl::Seconds(30);

absl::Status Stopping() {
  return WithFaultScope(absl::UnavailableError("this worker is stopping"), FaultScope::kPeer);
}

}  // namespace

// A sequence as it was before a step.
struct StepLoop::Before {
  int64_t num_cached = 0;
  size_t num_tokens = 0;
};

StepLoop::StepLoop(engine::Engine* engine, size_t max_queued, size_t max_batch, Clock& clock)
    : engine_(engine),
      max_queued_(max_queued),
      max_batch_(max_batch),
      clock_(clock),
      inbox_(max_queued, clock) {}

StepLoop::~StepLoop() { Stop(); }

void StepLoop::Start(StepObserver observer) {
  observer_ = std::move(observer);
  Touch();
  thread_ = Thread(clock_, [this] { Run(); });
}

void StepLoop::Stop() {
  inbox_.Close();
  thread_.Join();
}

absl::Status StepLoop::Submit(Entry entry) {
  // From idle on, the time counts from here.
  if (num_sequences_++ == 0) Touch();
  if (inbox_.TryPush(std::move(entry))) return absl::OkStatus();
  --num_sequences_;
  if (inbox_.is_closed()) return Stopping();
  return absl::ResourceExhaustedError(
      absl::StrCat("all ", max_queued_, " places of the step loop's inbox are taken"));
}

void StepLoop::Touch() { progress_ns_ = absl::ToUnixNanos(clock_.Now()); }

absl::Duration StepLoop::stalled_for() const {
  if (num_sequences_ == 0) return absl::ZeroDuration();
  return clock_.Now() - absl::FromUnixNanos(progress_ns_);
}

void StepLoop::Run() {
  while (true) {
    TakeFromInbox();
    if (inbox_.is_closed()) break;
    DropCancelled();
    if (!running_.empty()) StepAll();
    Touch();
  }
  for (Entry& entry : running_) End(entry, Stopping());
  running_.clear();
  while (std::optional<Entry> entry = inbox_.PopFor(absl::ZeroDuration())) End(*entry, Stopping());
}

void StepLoop::TakeFromInbox() {
  while (running_.size() < max_batch_) {
    const absl::Duration wait = running_.empty() ? kIdleWait : absl::ZeroDuration();
    std::optional<Entry> entry = inbox_.PopFor(wait);
    if (!entry.has_value()) return;
    running_.push_back(*std::move(entry));
  }
}

void StepLoop::DropCancelled() {
  for (Entry& entry : running_) {
    if (*entry.is_cancelled) End(entry, absl::CancelledError("the sequence was cancelled"));
  }
  RemoveEnded();
}

void StepLoop::StepAll() {
  const absl::Time start = clock_.Now();
  std::vector<Entry*> entries;
  for (Entry& entry : running_) entries.push_back(&entry);
  if (const absl::Status status = StepThese(entries); !status.ok()) {
    // No sequence has advanced; one of them is the reason, and the others should not pay for it.
    for (Entry* entry : entries) {
      const absl::Status alone = entries.size() == 1 ? status : StepThese({entry});
      if (!alone.ok()) End(*entry, alone);
    }
  }
  if (observer_) observer_({clock_.Now() - start, static_cast<int64_t>(entries.size())});
  RemoveEnded();
}

absl::Status StepLoop::StepThese(std::vector<Entry*> entries) {
  std::vector<engine::Sequence*> sequences;
  std::vector<Before> before;
  for (Entry* entry : entries) {
    sequences.push_back(&entry->sequence);
    before.push_back({entry->sequence.cache.num_tokens(), entry->sequence.tokens.size()});
  }
  const absl::Status status = engine_->Step(sequences);
  if (FaultScopeOf(status) == FaultScope::kDevice) {
    // Whoever supervises this process starts another one; routers retry elsewhere meanwhile.
    const std::string last_word = absl::StrCat("the device is lost: ", status.message());
    CheckFailed(__FILE__, __LINE__, last_word.c_str());
  }
  if (!status.ok()) return status;
  for (size_t i = 0; i < entries.size(); ++i) FinishStep(*entries[i], before[i]);
  return absl::OkStatus();
}

void StepLoop::FinishStep(Entry& entry, const Before& before) {
  const auto num_gained = static_cast<int64_t>(entry.sequence.tokens.size() - before.num_tokens);
  // The step's budget may have left it out.
  if (num_gained == 0 && entry.sequence.cache.num_tokens() == before.num_cached) return;
  const bool goes_on = entry.on_step(entry.sequence, num_gained);
  if (!goes_on || entry.sequence.is_finished()) End(entry, absl::OkStatus());
}

void StepLoop::End(Entry& entry, const absl::Status& status) {
  if (!entry.on_end) return;
  --num_sequences_;
  std::exchange(entry.on_end, nullptr)(std::move(entry.sequence), status);
}

void StepLoop::RemoveEnded() {
  std::erase_if(running_, [](const Entry& entry) { return !entry.on_end; });
}

}  // namespace isthmus::worker
