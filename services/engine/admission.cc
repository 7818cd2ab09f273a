// SPDX-License-Identifier: Apache-2.0
#include "services/engine/admission.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/fault.h"
#include "services/base/status_macros.h"

namespace isthmus::engine {
void OutputLengths::Add(int64_t num_output_tokens) {
  if (lengths_.size() < kMaxLengths) {
    lengths_.push_back(num_output_tokens);
  } else {
    sorted_.erase(std::ranges::lower_bound(sorted_, lengths_[next_]));
    lengths_[next_] = num_output_tokens;
    next_ = (next_ + 1) % kMaxLengths;
  }
  sorted_.insert(std::ranges::upper_bound(sorted_, num_output_tokens), num_output_tokens);
}

int64_t OutputLengths::Expect(int64_t num_output_tokens, int64_t max_output_tokens,
                              const AdmissionOptions& options) const {
  int64_t expected = 2 * num_output_tokens;
  const auto longer = std::ranges::upper_bound(sorted_, num_output_tokens);
  if (sorted_.empty()) {
    expected = static_cast<int64_t>(
        std::ceil(options.first_output_share * static_cast<double>(max_output_tokens)));
  } else if (longer != sorted_.end()) {
    const auto last = static_cast<double>(sorted_.end() - longer - 1);
    expected = longer[static_cast<int64_t>(std::ceil(options.expected_output_quantile * last))];
  }
  return std::min(std::max(expected, num_output_tokens + 1), max_output_tokens);
}

// The state and the numbers change while a sequence runs, under no lock; the rest never.
struct Admission::Line {
  enum class State : uint8_t {
    kReserved,   // Holds pages; its prompt is on its way.
    kRunning,    // Grows, and may give way.
    kPreempted,  // Holds nothing, and waits until it may have its pages again.
  };

  Demand demand;
  std::atomic<int64_t> num_held_tokens = 0;
  std::atomic<int64_t> num_output_tokens = 0;
  std::atomic<State> state = State::kReserved;
  std::atomic<int64_t> num_output_tokens_then = -1;  // When it was preempted last.
  std::atomic<int64_t> num_fork_tokens = 0;          // Whose pages the first reply has, too.
  std::atomic<int64_t> num_forks_left = 0;

  bool is_preempted() const { return state == State::kPreempted; }
  bool GivesWayTo(const Urgency& newcomer) const {
    return state == State::kRunning && num_output_tokens > num_output_tokens_then &&
           GivesWay(demand.urgency, newcomer);
  }
};

Admission::Admission(kv::CachePool* pool, const AdmissionOptions& options, Clock& clock)
    : pool_(pool), options_(options), clock_(clock) {}

Admission::~Admission() { ISTHMUS_CHECK(lines_.empty()); }

Admission::Claim::Claim(Claim&& other) noexcept { *this = std::move(other); }

Admission::Claim& Admission::Claim::operator=(Claim&& other) noexcept {
  std::swap(admission_, other.admission_);
  std::swap(line_, other.line_);
  return *this;
}

Admission::Claim::~Claim() {
  if (!is_open()) return;
  MutexLock lock(admission_->mutex_);
  std::erase(admission_->lines_, line_.get());
}

void Admission::Claim::SetTokens(int64_t num_held_tokens, int64_t num_output_tokens) {
  if (!is_open()) return;
  line_->num_held_tokens = num_held_tokens;
  line_->num_output_tokens = num_output_tokens;
  line_->state = Line::State::kRunning;
}

void Admission::Claim::SetPreempted() {
  if (!is_open()) return;
  line_->num_held_tokens = 0;
  line_->num_fork_tokens = 0;
  line_->num_output_tokens_then = line_->num_output_tokens.load();
  line_->state = Line::State::kPreempted;
}

bool Admission::Claim::GivesWayTo(const Urgency& newcomer) const {
  return is_open() && line_->GivesWayTo(newcomer);
}

absl::Status Admission::Claim::CheckResume() const {
  if (!is_open()) return absl::OkStatus();
  MutexLock lock(admission_->mutex_);
  ISTHMUS_RETURN_IF_ERROR(admission_->CheckTurnLocked(*line_));
  return admission_->CheckRoomLocked(*line_, {});
}

void Admission::Claim::NoteEnd(int64_t num_output_tokens) const {
  if (!is_open()) return;
  MutexLock lock(admission_->mutex_);
  admission_->lengths_.Add(num_output_tokens);
}

// A fork shares the pages that the prompt fills; the others it has for itself.
int64_t Admission::FinalPagesLocked(const Line& line, kernels::CacheKindIndex kind) const {
  const kernels::KvLayout& layout = pool_->layout();
  const int64_t num_prompt_tokens = line.demand.num_prompt_tokens;
  const int64_t final_tokens =
      num_prompt_tokens +
      lengths_.Expect(line.num_output_tokens, line.demand.max_output_tokens, options_);
  const int64_t page_tokens = layout.geometry.page_tokens;
  const int64_t own = layout.PagesFor(kind, final_tokens);
  const int64_t shared = layout.PagesFor(kind, num_prompt_tokens / page_tokens * page_tokens);
  return own + line.num_forks_left * (own - shared);
}

std::shared_ptr<Admission::Line> Admission::LineOf(const Demand& demand) {
  auto line = std::make_shared<Line>();
  line->demand = demand;
  line->num_held_tokens = demand.num_prompt_tokens + 1;
  line->num_forks_left = demand.num_replies - 1;
  return line;
}

absl::StatusOr<Admission::Claim> Admission::Admit(const Demand& demand) {
  std::shared_ptr<Line> line = LineOf(demand);
  MutexLock lock(mutex_);
  ISTHMUS_RETURN_IF_ERROR(CheckTurnLocked(*line));
  if (absl::Status status = CheckRoomLocked(*line, {}); !status.ok()) {
    return AskLocked(std::move(line)) ? WithRoomSoon(std::move(status)) : status;
  }
  if (ask_.has_value() && ask_->line->demand.ask_id == demand.ask_id) ask_.reset();
  return OpenLocked(std::move(line));
}

// One at a time, and after one in vain a pause; the same one not again, since what it takes is
// shared and will not come back either. A higher class waits for no lower one's.
bool Admission::MayAskLocked(const Demand& demand) const {
  if (demand.ask_id == 0) return false;
  if (!ask_.has_value()) return true;
  const bool is_same = ask_->line->demand.ask_id == demand.ask_id;
  const absl::Time now = clock_.Now();
  if (is_same) return ask_->state != AskState::kInVain;
  if (now < ask_->until) return false;
  const bool was_in_vain = ask_->num_preempted > 0;
  return !was_in_vain || now >= ask_->until + kAskPause ||
         demand.urgency.priority < ask_->line->demand.urgency.priority;
}

bool Admission::AskLocked(std::shared_ptr<Line> line) {
  if (!MayAskLocked(line->demand)) return false;
  std::vector<const Line*> lower;
  for (const Line* other : lines_) {
    if (other->GivesWayTo(line->demand.urgency)) lower.push_back(other);
  }
  if (!CheckRoomLocked(*line, lower).ok()) return false;
  // What is held for it now will be idle then, and held for it again when it comes back.
  line->demand.num_shared_tokens = 0;
  const absl::Time now = clock_.Now();
  ask_ = Ask{std::move(line), AskState::kOpen, now + kAskPatience, now + kAskTime};
  return true;
}

std::optional<Demand> Admission::OpenAsk() const {
  MutexLock lock(mutex_);
  if (!ask_.has_value() || ask_->state != AskState::kOpen || clock_.Now() >= ask_->until) {
    return std::nullopt;
  }
  return ask_->line->demand;
}

bool Admission::HasRoomForAsk(uint64_t ask_id, std::span<const Claim* const> given_up) const {
  std::vector<const Line*> lines;
  for (const Claim* claim : given_up) lines.push_back(claim->line_.get());
  MutexLock lock(mutex_);
  if (!ask_.has_value() || ask_->line->demand.ask_id != ask_id) return true;
  return CheckRoomLocked(*ask_->line, lines).ok();
}

bool Admission::CloseAsk(uint64_t ask_id, int64_t num_preempted) {
  MutexLock lock(mutex_);
  if (!ask_.has_value() || ask_->line->demand.ask_id != ask_id) return true;
  const absl::Time now = clock_.Now();
  ask_->num_preempted = num_preempted;
  if (CheckRoomLocked(*ask_->line, {}).ok()) {
    ask_->state = AskState::kKept;
    ask_->until = ask_->kept_until = now + kAskTime;
    return true;
  }
  ask_->state = AskState::kInVain;
  ask_->until = ask_->kept_until = now;
  if (num_preempted == 0) ask_.reset();
  return false;
}

Admission::Claim Admission::OpenLocked(std::shared_ptr<Line> line) {
  lines_.push_back(line.get());
  Claim claim;
  claim.admission_ = this;
  claim.line_ = std::move(line);
  return claim;
}

Admission::Claim Admission::Claim::Fork() {
  if (!is_open()) return {};
  MutexLock lock(admission_->mutex_);
  ISTHMUS_CHECK(line_->num_forks_left > 0);
  --line_->num_forks_left;
  Demand demand = line_->demand;
  demand.num_replies = 1;
  std::shared_ptr<Line> fork = LineOf(demand);
  const int64_t page_tokens = admission_->pool_->layout().geometry.page_tokens;
  fork->num_fork_tokens = demand.num_prompt_tokens / page_tokens * page_tokens;
  return admission_->OpenLocked(std::move(fork));
}

// Those that wait to be resumed count only by going first. Among equals they go before newcomers,
// and any of them may be the first.
absl::Status Admission::CheckTurnLocked(const Line& newcomer) const {
  const bool is_room_kept = ask_.has_value() && clock_.Now() < ask_->kept_until;
  if (is_room_kept && ask_->line->demand.ask_id != newcomer.demand.ask_id &&
      !GoesBefore(newcomer.demand.urgency, ask_->line->demand.urgency)) {
    return absl::ResourceExhaustedError("the room is kept for a more urgent request");
  }
  int64_t num_preempted = 0;
  for (const Line* line : lines_) {
    if (line == &newcomer || !line->is_preempted()) continue;
    ++num_preempted;
    const bool goes_first = newcomer.is_preempted()
                                ? GoesBefore(line->demand.urgency, newcomer.demand.urgency)
                                : !GoesBefore(newcomer.demand.urgency, line->demand.urgency);
    if (goes_first) {
      return absl::ResourceExhaustedError("a sequence that was preempted goes first");
    }
  }
  const int64_t most = int64_t{kNumPriorities} * pool_->slots().num_pages();
  if (newcomer.is_preempted() || num_preempted < most) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(num_preempted, " sequences are preempted, want fewer than ", most));
}

// What the others hold is no longer free; what they will grow by is added up here. Those of
// `given_up` count as if they held nothing: pages that they share are then hoped for.
absl::Status Admission::CheckRoomLocked(const Line& newcomer,
                                        std::span<const Line* const> given_up) const {
  int64_t num_growing = 0;
  int64_t num_slots = 1 + newcomer.num_forks_left;
  std::array<int64_t, kernels::kNumPagedKinds> growth{};
  for (const Line* line : lines_) {
    if (line == &newcomer || line->is_preempted()) continue;
    if (std::ranges::find(given_up, line) != given_up.end()) {
      --num_slots;
      for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
        const auto kind = static_cast<kernels::CacheKindIndex>(k);
        growth[k] += pool_->layout().PagesFor(kind, line->num_fork_tokens) -
                     pool_->layout().PagesFor(kind, line->num_held_tokens);
      }
      continue;
    }
    ++num_growing;
    num_slots += line->num_forks_left;
    for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
      const auto kind = static_cast<kernels::CacheKindIndex>(k);
      const int64_t more =
          FinalPagesLocked(*line, kind) - pool_->layout().PagesFor(kind, line->num_held_tokens);
      growth[k] += std::max<int64_t>(more, 0);
    }
  }
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    const auto kind = static_cast<kernels::CacheKindIndex>(k);
    // Who was preempted has given back what it shared.
    const int64_t shared = newcomer.is_preempted() ? 0 : newcomer.demand.num_shared_tokens;
    const int64_t wanted =
        FinalPagesLocked(newcomer, kind) - pool_->layout().PagesFor(kind, shared);
    const int64_t available = pool_->pages(kind).num_available();
    if (wanted + growth[k] <= available) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "page pool ", pool_->layout().kinds[k].name, ": ", wanted, " pages are expected to be ",
        "wanted, ", available, " of ", pool_->pages(kind).num_pages(), " are available, of which ",
        num_growing, " other sequences will want ", growth[k]));
  }
  if (const int64_t available = pool_->slots().num_available(); num_slots > available) {
    return absl::ResourceExhaustedError(absl::StrCat("state slots: ", num_slots, " are wanted, ",
                                                     available, " of ", pool_->slots().num_pages(),
                                                     " are available"));
  }
  return absl::OkStatus();
}

}  // namespace isthmus::engine
