// SPDX-License-Identifier: Apache-2.0
#include "services/engine/rank_forward.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/fault.h"
#include "services/base/status_macros.h"

namespace isthmus::engine {

struct RankForward::RankStep {
  RankStep(const Rank& rank, const model::ForwardBatch& whole, bool is_first);

  model::ForwardBatch batch;
  std::vector<kernels::SequenceKv> sequences;
  std::vector<std::vector<std::byte*>> tables;
  model::Tap tap;
};

namespace {

// Between the first refusal of a batch and the last.
constexpr absl::Duration kGrace = absl::Milliseconds(200);

// What steps work in.
std::vector<const kv::Arena*> ArenasOf(kv::CachePool& pool) {
  std::vector<const kv::Arena*> arenas;
  arenas.reserve(kernels::kNumPagedKinds + 1);
  for (int kind = 0; kind < kernels::kNumPagedKinds; ++kind) {
    arenas.push_back(&pool.pages(static_cast<kernels::CacheKindIndex>(kind)).arena());
  }
  arenas.push_back(&pool.slots().arena());
  return arenas;
}

std::byte* InCopy(const std::vector<CacheCopy>& caches, std::byte* address) {
  if (address == nullptr) return nullptr;
  for (const CacheCopy& cache : caches) {
    if (address >= cache.whole && address < cache.whole + cache.bytes) {
      return cache.copy + (address - cache.whole);
    }
  }
  CheckFailed(__FILE__, __LINE__, "a page lies in no cache of the rank");
}

}  // namespace

std::vector<CacheCopy> CopiesOf(kv::CachePool& whole, kv::CachePool& copy) {
  const std::vector<const kv::Arena*> from = ArenasOf(whole);
  const std::vector<const kv::Arena*> to = ArenasOf(copy);
  std::vector<CacheCopy> out;
  for (size_t i = 0; i < from.size(); ++i) {
    ISTHMUS_CHECK(from[i]->bytes() == to[i]->bytes());
    if (from[i]->bytes() > 0) out.push_back({from[i]->data(), from[i]->bytes(), to[i]->data()});
  }
  return out;
}

std::vector<CacheCopy> CopiesOf(kv::CachePool& pool, int rank) {
  std::vector<CacheCopy> out;
  if (rank == 0) return out;
  for (const kv::Arena* arena : ArenasOf(pool)) {
    if (arena->bytes() == 0) continue;
    ISTHMUS_CHECK(rank < arena->num_ranks());
    out.push_back({arena->data(), arena->bytes(), arena->data_of(rank)});
  }
  return out;
}

RankForward::RankStep::RankStep(const Rank& rank, const model::ForwardBatch& whole, bool is_first)
    : batch(whole) {
  if (!rank.caches.empty()) {
    sequences.assign(whole.sequences.begin(), whole.sequences.end());
    tables.reserve(sequences.size() * kernels::kNumPagedKinds);
    for (kernels::SequenceKv& sequence : sequences) {
      for (auto& pages : sequence.pages) {
        std::vector<std::byte*>& table = tables.emplace_back();
        for (std::byte* page : pages) table.push_back(InCopy(rank.caches, page));
        pages = table;
      }
      sequence.state = InCopy(rank.caches, sequence.state);
    }
    batch.sequences = sequences;
  }
  if (!whole.logit_rows.empty()) {
    batch.logits = whole.logits.Columns(rank.vocabulary.first, rank.vocabulary.count);
  }
  batch.draws = {};  // A rank has columns of the rows alone; the tokens are the caller's to draw.
  batch.drawn = {};
  if (whole.tap != nullptr && !is_first) {
    tap.input_streams = whole.tap->input_streams;
    batch.tap = &tap;
  }
}

RankForward::RankForward(std::vector<Rank> ranks, Clock& clock, absl::Duration step_limit,
                         std::function<void(const absl::Status&)> on_stall)
    : ranks_(std::move(ranks)),
      clock_(clock),
      step_limit_(step_limit),
      on_stall_(std::move(on_stall)) {
  ISTHMUS_CHECK(!ranks_.empty());
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    threads_.emplace_back(clock_, [this, rank] { Serve(rank); });
  }
}

RankForward::~RankForward() {
  {
    MutexLock lock(mutex_);
    is_stopping_ = true;
    changed_.notify_all();
  }
  for (Thread& thread : threads_) thread.Join();
}

void RankForward::Serve(size_t rank) {
  const Rank& own = ranks_[rank];
  const absl::Status started = own.on_start ? own.on_start() : absl::OkStatus();
  uint64_t num_seen = 0;
  while (true) {
    const model::ForwardBatch* batch = nullptr;
    const kernels::Exec* exec = nullptr;
    {
      MutexLock lock(mutex_);
      clock_.WaitFor(changed_, lock, absl::Hours(1),
                     [&] { return is_stopping_ || num_steps_ > num_seen; });
      if (is_stopping_) return;
      if (num_steps_ == num_seen) continue;
      num_seen = num_steps_;
      batch = batch_;
      exec = exec_;
    }
    absl::Status status = started.ok() ? RunRank(own, *batch, *exec) : started;
    MutexLock lock(mutex_);
    ends_[rank] = {true, std::move(status)};
    changed_.notify_all();
  }
}

absl::Status RankForward::RunRank(const Rank& rank, const model::ForwardBatch& batch,
                                  const kernels::Exec& exec) const {
  const RankStep step(rank, batch, &rank == &ranks_[0]);
  kernels::Exec own = rank.exec;
  own.phase = exec.phase;
  own.patches = exec.patches;
  own.batch_invariant = exec.batch_invariant;
  return rank.forward->Run(step.batch, own);
}

bool RankForward::HaveAllEnded() const {
  return std::all_of(ends_.begin(), ends_.end(), [](const End& end) { return end.has_come; });
}

bool RankForward::HasOneFailed() const {
  return std::any_of(ends_.begin(), ends_.end(),
                     [](const End& end) { return end.has_come && !end.status.ok(); });
}

bool RankForward::HaveAllEndedAlike() const {
  return std::all_of(ends_.begin(), ends_.end(), [&](const End& end) {
    return end.has_come && end.status.code() == ends_[0].status.code();
  });
}

absl::Status RankForward::WhyUnlike() const {
  for (size_t rank = 0; rank < ends_.size(); ++rank) {
    const absl::Status& status = ends_[rank].status;
    if (status.ok()) continue;
    return WithFaultScope(
        absl::Status(status.code(), absl::StrCat("rank ", rank, " of ", ends_.size(),
                                                 " failed alone: ", status.message())),
        FaultScope::kDevice);
  }
  const auto missing =
      std::find_if(ends_.begin(), ends_.end(), [](const End& end) { return !end.has_come; }) -
      ends_.begin();
  return WithFaultScope(absl::DeadlineExceededError(absl::StrCat(
                            "rank ", missing, " of ", ends_.size(), " did not end its step within ",
                            absl::FormatDuration(step_limit_))),
                        FaultScope::kDevice);
}

absl::Status RankForward::Run(const model::ForwardBatch& batch, const kernels::Exec& exec) {
  absl::Status why;
  {
    MutexLock lock(mutex_);
    ISTHMUS_RETURN_IF_ERROR(broken_);
    batch_ = &batch;
    exec_ = &exec;
    ends_.assign(ranks_.size(), End{});
    ++num_steps_;
    changed_.notify_all();
    // One that has failed alone is not worth the whole wait, since the others hang in its absence;
    // but ranks that all refuse a batch do so one after another.
    clock_.WaitFor(changed_, lock, step_limit_, [&] { return HaveAllEnded() || HasOneFailed(); });
    clock_.WaitFor(changed_, lock, kGrace, [&] { return HaveAllEnded() || !HasOneFailed(); });
    if (HaveAllEndedAlike()) return ends_[0].status;
    why = broken_ = WhyUnlike();
  }
  if (on_stall_) on_stall_(why);
  MutexLock lock(mutex_);
  if (!clock_.WaitFor(changed_, lock, step_limit_, [&] { return HaveAllEnded(); })) {
    CheckFailed(__FILE__, __LINE__, "a rank's step does not end after its group was aborted");
  }
  return why;
}

}  // namespace isthmus::engine
