// SPDX-License-Identifier: Apache-2.0
#include "services/engine/admission.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"
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

// The numbers change while a sequence runs, under no lock; the rest never.
struct Admission::Line {
  Demand demand;
  std::atomic<int64_t> num_held_tokens = 0;
  std::atomic<int64_t> num_output_tokens = 0;
  std::atomic<bool> is_preempted = false;
  std::atomic<int64_t> num_forks_left = 0;
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
  line_->is_preempted = false;
}

void Admission::Claim::SetPreempted() {
  if (!is_open()) return;
  line_->num_held_tokens = 0;
  line_->is_preempted = true;
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
    if (demand.may_preempt) AskLocked(std::move(line));
    return status;
  }
  if (ask_.has_value() && ask_->line->demand.request_id == demand.request_id) ask_.reset();
  return OpenLocked(std::move(line));
}

bool Admission::AskStandsLocked() const { return ask_.has_value() && clock_.Now() < ask_->until; }

// An ask that was in vain keeps the next one off for a while, so that nobody can have sequences
// preempted all the time.
void Admission::AskLocked(std::shared_ptr<Line> line) {
  const absl::Time now = clock_.Now();
  if (ask_.has_value() && now < ask_->until + kAskPause) return;
  std::vector<const Line*> lower;
  for (const Line* other : lines_) {
    const bool gives_way = GivesWay(other->demand.urgency, line->demand.urgency);
    if (gives_way && !other->is_preempted) lower.push_back(other);
  }
  if (!CheckRoomLocked(*line, lower).ok()) return;
  ask_ = Ask{std::move(line), now + kAskTime};
}

// So many as run at one time, and for whom others were preempted as many of each class more: it
// must not be kept out by those very sequences.
int64_t Admission::MostPreemptedLocked(const Line& newcomer) const {
  const int64_t num_slots = pool_->slots().num_pages();
  const bool is_awaited =
      AskStandsLocked() && ask_->line->demand.request_id == newcomer.demand.request_id;
  return is_awaited ? kNumPriorities * num_slots : num_slots;
}

std::optional<Urgency> Admission::OpenAsk() const {
  MutexLock lock(mutex_);
  if (!AskStandsLocked() || !ask_->is_open) return std::nullopt;
  return ask_->line->demand.urgency;
}

bool Admission::HasRoomForAsk(std::span<const Claim* const> given_up) const {
  std::vector<const Line*> lines;
  for (const Claim* claim : given_up) lines.push_back(claim->line_.get());
  MutexLock lock(mutex_);
  return ask_.has_value() && CheckRoomLocked(*ask_->line, lines).ok();
}

void Admission::CloseAsk() {
  MutexLock lock(mutex_);
  if (!ask_.has_value()) return;
  ask_->is_open = false;
  if (!CheckRoomLocked(*ask_->line, {}).ok()) ask_->until = std::min(ask_->until, clock_.Now());
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
  return admission_->OpenLocked(LineOf(demand));
}

// Those that wait to be resumed count only by going first. Among equals they go before newcomers,
// and any of them may be the first.
absl::Status Admission::CheckTurnLocked(const Line& newcomer) const {
  if (AskStandsLocked() && ask_->line->demand.request_id != newcomer.demand.request_id &&
      !GoesBefore(newcomer.demand.urgency, ask_->line->demand.urgency)) {
    return absl::ResourceExhaustedError("the room is kept for a more urgent request");
  }
  int64_t num_preempted = 0;
  for (const Line* line : lines_) {
    if (line == &newcomer || !line->is_preempted) continue;
    ++num_preempted;
    const bool goes_first = newcomer.is_preempted
                                ? GoesBefore(line->demand.urgency, newcomer.demand.urgency)
                                : !GoesBefore(newcomer.demand.urgency, line->demand.urgency);
    if (goes_first) {
      return absl::ResourceExhaustedError("a sequence that was preempted goes first");
    }
  }
  const int64_t most = MostPreemptedLocked(newcomer);
  if (newcomer.is_preempted || num_preempted < most) return absl::OkStatus();
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
    if (line == &newcomer || line->is_preempted) continue;
    if (std::ranges::find(given_up, line) != given_up.end()) {
      --num_slots;
      for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
        const auto kind = static_cast<kernels::CacheKindIndex>(k);
        growth[k] -= pool_->layout().PagesFor(kind, line->num_held_tokens);
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
    const int64_t shared = newcomer.is_preempted ? 0 : newcomer.demand.num_shared_tokens;
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
