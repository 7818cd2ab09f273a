// SPDX-License-Identifier: Apache-2.0
#include "services/worker/step_loop.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/log.h"

namespace isthmus::worker {
namespace {

// How long an idle loop sleeps at most before it looks whether it should stop.
constexpr absl::Duration kIdleWait = absl::Milliseconds(200);

}  // namespace

StepLoop::StepLoop(engine::Engine* engine, size_t max_queued, size_t max_batch)
    : engine_(engine), max_queued_(max_queued), max_batch_(max_batch), inbox_(max_queued) {}

StepLoop::~StepLoop() { Stop(); }

void StepLoop::Start() {
  thread_ = std::thread([this] { Run(); });
}

void StepLoop::Stop() {
  inbox_.Close();
  if (thread_.joinable()) thread_.join();
}

absl::Status StepLoop::Submit(Entry entry) {
  ++num_sequences_;
  if (inbox_.TryPush(std::move(entry))) return absl::OkStatus();
  --num_sequences_;
  if (inbox_.is_closed()) return absl::UnavailableError("this worker is stopping");
  return absl::ResourceExhaustedError(
      absl::StrCat("all ", max_queued_, " places of the step loop's inbox are taken"));
}

void StepLoop::Run() {
  while (true) {
    TakeFromInbox();
    if (inbox_.is_closed()) break;
    DropCancelled();
    if (!running_.empty()) StepAll();
  }
  for (Entry& entry : running_) End(entry, absl::CancelledError("this worker is stopping"));
  running_.clear();
  while (std::optional<Entry> entry = inbox_.PopFor(absl::ZeroDuration())) {
    End(*entry, absl::CancelledError("this worker is stopping"));
  }
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
  std::vector<engine::Sequence*> sequences;
  std::vector<size_t> tokens_before;
  for (Entry& entry : running_) {
    sequences.push_back(&entry.sequence);
    tokens_before.push_back(entry.sequence.tokens.size());
  }
  const absl::Status status = engine_->Step(sequences);
  if (!status.ok() && running_.size() > 1) {
    // No sequence has advanced; one of them is the reason, and the others should not pay for it.
    StepOneByOne();
    return;
  }
  for (size_t i = 0; i < running_.size(); ++i) {
    if (status.ok()) {
      FinishStep(i, tokens_before[i]);
    } else {
      End(running_[i], status);
    }
  }
  RemoveEnded();
}

void StepLoop::StepOneByOne() {
  for (size_t i = 0; i < running_.size(); ++i) {
    const size_t tokens_before = running_[i].sequence.tokens.size();
    engine::Sequence* sequence = &running_[i].sequence;
    const absl::Status status = engine_->Step({&sequence, 1});
    if (status.ok()) {
      FinishStep(i, tokens_before);
    } else {
      End(running_[i], status);
    }
  }
  RemoveEnded();
}

void StepLoop::FinishStep(size_t index, size_t tokens_before) {
  Entry& entry = running_[index];
  if (entry.sequence.tokens.size() == tokens_before) return;  // A chunk of the prompt.
  const bool goes_on = entry.on_token(entry.sequence);
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
