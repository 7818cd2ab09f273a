// SPDX-License-Identifier: Apache-2.0
#include "services/worker/step_loop.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/fault.h"
#include "services/base/log.h"
#include "services/engine/preemption.h"

namespace isthmus::worker {
namespace {

// An entry or the end wakes an idle loop at once; nothing else has to.
constexpr absl::Duration kIdleWait = absl::Seconds(30);
// Pages that reservations or quarantine hold come back without a sign of it.
constexpr absl::Duration kPagePoll = absl::Milliseconds(5);

absl::Status Stopping() {
  return WithFaultScope(absl::UnavailableError("this worker is stopping"), FaultScope::kPeer);
}

bool GoesFirst(const StepLoop::Entry& a, const StepLoop::Entry& b) {
  return GoesBefore(a.sequence.urgency, b.sequence.urgency);
}

}  // namespace

// A sequence as it was before a step.
struct StepLoop::Before {
  int64_t num_cached = 0;
  size_t num_tokens = 0;
};

StepLoop::StepLoop(engine::Engine* engine, engine::Admission* admission, size_t max_queued,
                   size_t max_batch, Clock& clock)
    : engine_(engine),
      admission_(admission),
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
  while (!inbox_.is_closed()) RunOnce();
  for (std::vector<Entry>* entries : {&running_, &preempted_}) {
    for (Entry& entry : *entries) End(entry, Stopping());
    entries->clear();
  }
  while (std::optional<Entry> entry = inbox_.PopFor(absl::ZeroDuration())) End(*entry, Stopping());
}

void StepLoop::RunOnce() {
  TakeFromInbox();
  if (inbox_.is_closed()) return;
  DropCancelled();
  GiveWay();
  ResumePreempted();
  lacks_pages_ = !MakeRoom();
  num_preempted_ = static_cast<int64_t>(preempted_.size());
  if (!lacks_pages_ && !running_.empty()) {
    StepAll();
  } else if (figures_.num_preemptions > 0) {
    Observe();
  }
  Touch();
}

void StepLoop::TakeFromInbox() {
  absl::Duration wait = absl::ZeroDuration();
  if (running_.empty()) wait = preempted_.empty() ? kIdleWait : kPagePoll;
  if (lacks_pages_) wait = kPagePoll;
  while (running_.size() < max_batch_) {
    std::optional<Entry> entry = inbox_.PopFor(wait);
    if (!entry.has_value()) return;
    if (entry->sequence.cache.is_open()) {
      running_.push_back(*std::move(entry));
    } else {
      WaitForPages(*std::move(entry));
    }
    wait = absl::ZeroDuration();
  }
  // It waits for pages with a full batch.
  if (wait > absl::ZeroDuration()) clock_.Sleep(wait);
}

void StepLoop::DropCancelled() {
  for (std::vector<Entry>* entries : {&running_, &preempted_}) {
    for (Entry& entry : *entries) {
      if (*entry.is_cancelled) End(entry, absl::CancelledError("the sequence was cancelled"));
    }
  }
  RemoveEnded();
}

// The most urgent first, and none past one that cannot be resumed yet.
void StepLoop::ResumePreempted() {
  size_t num_resumed = 0;
  for (Entry& entry : preempted_) {
    if (running_.size() >= max_batch_) break;
    if (!engine::Resume(*engine_, entry.sequence).ok()) break;
    running_.push_back(std::move(entry));
    ++num_resumed;
  }
  preempted_.erase(preempted_.begin(), preempted_.begin() + static_cast<int64_t>(num_resumed));
}

// Room for the newcomer that asks for it. Nobody is preempted when that would not be enough, so
// only who shares pages can be so in vain.
void StepLoop::GiveWay() {
  const std::optional<engine::Demand> newcomer = admission_->OpenAsk();
  if (!newcomer.has_value()) return;
  const auto gives_way = [&](const Entry& entry) {
    return entry.is_preemptible && entry.sequence.claim.GivesWayTo(newcomer->urgency);
  };
  std::vector<const engine::Admission::Claim*> claims;
  for (const Entry& entry : running_) {
    if (gives_way(entry)) claims.push_back(&entry.sequence.claim);
  }
  int64_t num_preempted = 0;
  if (admission_->HasRoomForAsk(newcomer->ask_id, claims)) {
    while (!admission_->HasRoomForAsk(newcomer->ask_id, {}) && PreemptLeastUrgent(gives_way)) {
      ++num_preempted;
    }
  }
  const bool has_room = admission_->CloseAsk(newcomer->ask_id, num_preempted);
  if (num_preempted == 0) return;
  figures_.num_given_way += num_preempted;
  LogInfo("sequences of lower classes gave way to a newcomer",
          {{"request_id", newcomer->request_id},
           {"num_preempted", num_preempted},
           {"has_room", has_room}});
}

// Pages for the next step, at the cost of the less urgent. False: the most urgent one has not got
// them; what holds them besides are transfers on their way, which end, or are preemptible then.
bool StepLoop::MakeRoom() {
  while (!running_.empty()) {
    std::vector<engine::Sequence*> sequences;
    sequences.reserve(running_.size());
    for (Entry& entry : running_) sequences.push_back(&entry.sequence);
    const absl::Status status = engine::ReserveStep(*engine_, sequences);
    if (!absl::IsResourceExhausted(status)) return true;  // The step will meet any other error.
    // The most urgent one never is, so that it can go on.
    const Entry* const first = &*std::ranges::min_element(running_, GoesFirst);
    if (PreemptLeastUrgent(
            [&](const Entry& entry) { return entry.is_preemptible && &entry != first; })) {
      continue;
    }
    bool has_ended = false;
    for (Entry& entry : running_) {
      const absl::Status alone = engine::CheckFitsAlone(*engine_, entry.sequence);
      if (alone.ok()) continue;
      End(entry, alone);
      has_ended = true;
    }
    if (!has_ended) return false;
    RemoveEnded();
  }
  return true;
}

// Of those that `may` be. False: there is none.
bool StepLoop::PreemptLeastUrgent(absl::FunctionRef<bool(const Entry& entry)> may) {
  auto last = running_.end();
  for (auto it = running_.begin(); it != running_.end(); ++it) {
    if (!may(*it)) continue;
    if (last == running_.end() || !GoesFirst(*it, *last)) last = it;
  }
  if (last == running_.end()) return false;
  Entry entry = std::move(*last);
  running_.erase(last);
  LogInfo("a sequence gives its pages back for a while",
          {{"request_id", entry.sequence.request_id},
           {"cached_tokens", entry.sequence.cache.num_tokens()}});
  engine::Preempt(entry.sequence);
  ++figures_.num_preemptions;
  ++num_preemptions_;
  WaitForPages(std::move(entry));
  return true;
}

void StepLoop::WaitForPages(Entry entry) {
  entry.sequence.claim.SetPreempted();
  const auto place = std::ranges::upper_bound(preempted_, entry, GoesFirst);
  preempted_.insert(place, std::move(entry));
}

void StepLoop::StepAll() {
  const absl::Time start = clock_.Now();
  std::vector<Entry*> entries;
  entries.reserve(running_.size());
  for (Entry& entry : running_) entries.push_back(&entry);
  if (const absl::Status status = StepThese(entries); !status.ok()) {
    // No sequence has advanced; one of them is the reason, and the others should not pay for it.
    for (Entry* entry : entries) {
      const absl::Status alone = entries.size() == 1 ? status : StepThese({entry});
      if (!alone.ok()) End(*entry, alone);
    }
  }
  figures_.duration = clock_.Now() - start;
  figures_.num_sequences = static_cast<int64_t>(entries.size());
  Observe();
  RemoveEnded();
}

void StepLoop::Observe() {
  figures_.num_preempted = num_preempted_;
  if (observer_) observer_(figures_);
  figures_ = {};
}

absl::Status StepLoop::StepThese(std::vector<Entry*> entries) {
  std::vector<engine::Sequence*> sequences;
  std::vector<Before> before;
  for (Entry* entry : entries) {
    sequences.push_back(&entry->sequence);
    before.push_back({entry->sequence.cache.num_tokens(), entry->sequence.tokens.size()});
  }
  absl::Status status = engine_->Step(sequences);
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
  const int64_t num_cached = entry.sequence.cache.num_tokens();
  // The step's budget may have left it out.
  if (num_gained == 0 && num_cached == before.num_cached) return;
  figures_.num_recomputed_tokens += std::max<int64_t>(
      0, std::min(num_cached, entry.sequence.num_once_cached) - before.num_cached);
  const bool goes_on = entry.on_step(entry.sequence, num_gained);
  if (!goes_on || entry.sequence.is_finished()) End(entry, absl::OkStatus());
}

void StepLoop::End(Entry& entry, const absl::Status& status) {
  if (!entry.on_end) return;
  --num_sequences_;
  std::exchange(entry.on_end, nullptr)(std::move(entry.sequence), status);
}

void StepLoop::RemoveEnded() {
  for (std::vector<Entry>* entries : {&running_, &preempted_}) {
    std::erase_if(*entries, [](const Entry& entry) { return !entry.on_end; });
  }
}

}  // namespace isthmus::worker
