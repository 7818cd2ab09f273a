// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/simulated_world.h"

#include <execinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"

namespace isthmus::sim {

struct SimulatedWorld::Task {
  SimulatedWorld* world = nullptr;
  int number = 0;
  std::string name;

  // What it waits for; `is_done` is empty for a sleep.
  absl::Time wake_at = absl::InfinitePast();
  absl::Time not_before = absl::InfinitePast();
  std::mutex* mutex = nullptr;
  const absl::FunctionRef<bool()>* is_done = nullptr;

  Mutex turn_mutex;
  CondVar turn_changed;
  bool has_turn = false;  // Guarded by turn_mutex.
};

namespace {

constexpr int kMaxFrames = 32;

void Print(absl::string_view text) {
  const std::string line = absl::StrCat(text, "\n");
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
}

void PrintStack() {
  void* frames[kMaxFrames];
  backtrace_symbols_fd(frames, backtrace(frames, kMaxFrames), STDERR_FILENO);
}

// The running thread's task; null in threads that are not of a world.
thread_local void* current_task = nullptr;

}  // namespace

SimulatedWorld::SimulatedWorld(const WorldOptions& options)
    : options_(options), random_(options.seed), now_(absl::UnixEpoch() + absl::Hours(24 * 365)) {
  before_lock = &SimulatedWorld::YieldAtLock;
}

SimulatedWorld::~SimulatedWorld() { before_lock = nullptr; }

void SimulatedWorld::Run(const std::function<void()>& body) {
  if (!tasks_.empty()) Fail("a world runs once");
  tasks_.push_back(std::make_unique<Task>());
  Task& first = *tasks_.back();
  first.world = this;
  first.name = "first";
  alive_.push_back(&first);
  current_task = &first;
  body();
  if (alive_.size() > 1) Fail("threads outlive the body of the world");
  current_task = nullptr;
}

absl::Time SimulatedWorld::Now() { return now_; }

void SimulatedWorld::Sleep(absl::Duration duration) {
  auto* const task = static_cast<Task*>(current_task);
  if (task == nullptr) Fail("a thread sleeps that is not of this world");
  task->wake_at = now_ + std::max(duration, absl::ZeroDuration());
  Park(*task);
}

bool SimulatedWorld::WaitFor(CondVar&, MutexLock& lock, absl::Duration timeout,
                             absl::FunctionRef<bool()> is_done) {
  auto* const task = static_cast<Task*>(current_task);
  if (task == nullptr) Fail("a thread waits that is not of this world");
  if (num_held_locks != 1) Fail("a lock is held over a wait for another one");
  if (is_done() && !random_.Chance(options_.yield_share)) {
    if (++num_steps_ > options_.max_steps) Fail("threads run for ever");
    return true;
  }
  task->wake_at = now_ + std::max(timeout, absl::ZeroDuration());
  task->mutex = lock.mutex();
  task->is_done = &is_done;
  lock.unlock();
  Park(*task);
  if (!lock.try_lock()) Fail("a thread that stands still holds a lock that another one waits for");
  task->is_done = nullptr;
  return is_done();
}

std::function<void()> SimulatedWorld::Adopt(std::function<void()> body) {
  if (current_task == nullptr) Fail("a thread is started by one that is not of this world");
  tasks_.push_back(std::make_unique<Task>());
  Task* const task = tasks_.back().get();
  task->world = this;
  task->number = static_cast<int>(tasks_.size()) - 1;
  task->name = absl::StrCat("started by ", thread_number());
  alive_.push_back(task);
  return [this, task, body = std::move(body)]() mutable {
    current_task = task;
    AwaitTurn(*task);
    body();
    body = nullptr;  // What it holds dies in this thread's turn.
    End(*task);
  };
}

void SimulatedWorld::YieldAtLock() {
  auto* const task = static_cast<Task*>(current_task);
  if (task == nullptr || num_held_locks > 0) return;
  SimulatedWorld& world = *task->world;
  if (world.is_drawing_ || world.reporter_ != nullptr) return;
  if (!world.random_.Chance(world.options_.lock_yield_share)) return;
  task->wake_at = world.now_;
  world.Park(*task);
}

void SimulatedWorld::Park(Task& task) {
  Task& next = Draw();
  if (&next == &task) return;
  PassTo(next);
  AwaitTurn(task);
}

void SimulatedWorld::End(Task& task) {
  std::erase(alive_, &task);
  PassTo(Draw());
}

void SimulatedWorld::PassTo(Task& next) {
  {
    const std::unique_lock<Mutex> lock(next.turn_mutex);
    next.has_turn = true;
  }
  next.turn_changed.notify_one();
}

void SimulatedWorld::AwaitTurn(Task& task) {
  while (true) {
    {
      std::unique_lock<Mutex> lock(task.turn_mutex);
      task.turn_changed.wait(lock, [&task] { return task.has_turn; });
      task.has_turn = false;
    }
    SimulatedWorld& world = *task.world;
    if (world.reporter_ == nullptr) return;
    PrintStack();
    PassTo(*world.reporter_);
  }
}

bool SimulatedWorld::CanGoOn(Task& task) {
  if (now_ < task.not_before) return false;
  if (now_ >= task.wake_at) return true;
  if (task.is_done == nullptr) return false;
  const std::unique_lock<std::mutex> lock(*task.mutex, std::try_to_lock);
  if (!lock.owns_lock()) Fail("a thread that stands still holds a lock that another one waits for");
  return (*task.is_done)();
}

SimulatedWorld::Task& SimulatedWorld::Draw() {
  if (++num_steps_ > options_.max_steps) Fail("threads run for ever");
  is_drawing_ = true;
  if (step_check_) step_check_();
  while (true) {
    able_.clear();
    for (Task* task : alive_) {
      if (CanGoOn(*task)) able_.push_back(task);
    }
    if (!able_.empty()) {
      Task& next = *able_[random_.Below(able_.size())];
      if (random_.Chance(options_.stall_share)) {
        next.not_before = now_ + random_.Between(absl::ZeroDuration(), options_.longest_stall);
        continue;
      }
      is_drawing_ = false;
      FoldIntoTrace(static_cast<uint64_t>(next.number));
      FoldIntoTrace(static_cast<uint64_t>(absl::ToUnixNanos(now_)));
      return next;
    }
    absl::Time earliest = absl::InfiniteFuture();
    for (const Task* task : alive_) {
      earliest = std::min(earliest, now_ < task->not_before ? task->not_before : task->wake_at);
    }
    if (earliest == absl::InfiniteFuture()) Fail("deadlock: no thread can ever go on");
    now_ = earliest;
  }
}

void SimulatedWorld::FoldIntoTrace(uint64_t bits) {
  trace_hash_ = (trace_hash_ ^ bits) * 0x100000001b3;
  trace_hash_ ^= trace_hash_ >> 29;
}

void SimulatedWorld::Note(absl::string_view event) {
  for (const char c : event) FoldIntoTrace(static_cast<unsigned char>(c));
  if (options_.trace) {
    Print(absl::StrCat(absl::FormatTime("%M:%E6S", now_, absl::UTCTimeZone()), " [",
                       thread_number(), "] ", event));
  }
}

void SimulatedWorld::NameThread(absl::string_view name) {
  if (current_task != nullptr) static_cast<Task*>(current_task)->name = std::string(name);
}

int SimulatedWorld::thread_number() const {
  return current_task == nullptr ? -1 : static_cast<const Task*>(current_task)->number;
}

void SimulatedWorld::ReportThreads() {
  Print(absl::StrCat("seed ", options_.seed, ", step ", num_steps_, ", time ",
                     absl::FormatTime("%H:%M:%E6S", now_, absl::UTCTimeZone()), ", trace ",
                     absl::Hex(trace_hash_), "; where each thread stands:"));
  auto* const self = static_cast<Task*>(current_task);
  if (self == nullptr) return;
  reporter_ = self;
  for (Task* task : std::vector<Task*>(alive_)) {
    Print(absl::StrCat("thread ", task->number, " (", task->name, "), ",
                       task == self               ? "reports"
                       : task->is_done == nullptr ? "sleeps"
                                                  : "waits",
                       " until ",
                       absl::FormatTime("%H:%M:%E6S", task->wake_at, absl::UTCTimeZone())));
    if (task == self) {
      PrintStack();
      continue;
    }
    PassTo(*task);
    std::unique_lock<Mutex> lock(self->turn_mutex);
    self->turn_changed.wait(lock, [self] { return self->has_turn; });
    self->has_turn = false;
  }
  reporter_ = nullptr;
}

void SimulatedWorld::Fail(absl::string_view what) {
  Print(absl::StrCat("simulation: ", what));
  ReportThreads();
  std::abort();
}

}  // namespace isthmus::sim
