// SPDX-License-Identifier: Apache-2.0
// One engine under load, with the scripted model and a clock that jumps: admission, step loop,
// engine and pools are the code that serves, run by one thread, so that hours of traffic take
// seconds. Whoever asks stands in one line, as at a router, and prompts are computed here.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "services/base/clock.h"
#include "services/base/urgency.h"
#include "services/engine/admission.h"
#include "services/engine/engine.h"
#include "services/model/scripted_forward.h"
#include "services/worker/step_loop.h"

namespace isthmus::sim {

// Jumps over every wait. For one thread.
class LoneClock : public Clock {
 public:
  absl::Time Now() override { return now_; }
  void Sleep(absl::Duration duration) override { now_ += duration; }
  bool WaitFor(CondVar&, MutexLock&, absl::Duration timeout,
               absl::FunctionRef<bool()> is_done) override {
    if (!is_done()) now_ += timeout;
    return is_done();
  }

 private:
  absl::Time now_ = absl::UnixEpoch();
};

struct LoadSizes {
  model::ScriptedOptions script;
  int64_t cache_tokens = 8192;
  int32_t max_sequences = 8;
  int64_t chunk_tokens = 512;
  int64_t max_batch_tokens = 512;
  engine::AdmissionOptions admission;
};

// One request, and how it went.
struct LoadRequest {
  int64_t num_prompt_tokens = 1;
  int64_t max_output_tokens = 1;
  Priority priority = Priority::kNormal;
  absl::Duration deadline = absl::InfiniteDuration();  // From its arrival; only for the order.
  absl::Duration leaves_after = absl::InfiniteDuration();
  std::string kind = {};  // For whoever looks at the outcome.

  uint64_t ask_id = 0;  // Its own.
  absl::Time arrived = {};
  absl::Time admitted = absl::InfiniteFuture();
  absl::Time ended = absl::InfiniteFuture();
  absl::Status status = {};
  int num_ends = 0;
  std::vector<absl::Time> token_times = {};
  std::vector<int32_t> prompt = {};
  std::vector<int32_t> output = {};
};

class LoadedEngine {
 public:
  explicit LoadedEngine(const LoadSizes& sizes);
  ~LoadedEngine();

  // Comes now. Lives as long as the engine.
  LoadRequest& Ask(const LoadRequest& request);

  // Goes on for so long, or until nothing is left to do; `on_round` is called before every round
  // of the step loop and may ask more.
  void RunFor(absl::Duration duration, const std::function<void()>& on_round = {});
  // Until every request has ended; check-fails after `patience`.
  void RunToTheEnd(absl::Duration patience);

  absl::Time now() { return clock_.Now(); }
  worker::StepLoop& loop() { return *loop_; }
  kv::CachePool& pool() { return *pool_; }
  const std::vector<std::unique_ptr<LoadRequest>>& requests() const { return requests_; }
  int64_t num_open() const { return num_open_; }
  int64_t num_waiting() const { return static_cast<int64_t>(line_.size()); }
  int64_t num_rounds() const { return num_rounds_; }
  // Output tokens of all requests from `begin` to `end`, per second.
  double TokensPerSecond(absl::Time begin, absl::Time end) const;
  // Whether a request's tokens are those of the script, all of them when it ended with OK.
  bool IsFaithful(const LoadRequest& request) const;

 private:
  struct Running;

  void AdmitFromLine();
  absl::Status Begin(LoadRequest& request);
  void Leave();
  void End(LoadRequest& request, const absl::Status& status);

  const LoadSizes sizes_;
  LoneClock clock_;
  std::unique_ptr<model::ScriptedForward> forward_;
  std::unique_ptr<kv::CachePool> pool_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<engine::Admission> admission_;
  std::unique_ptr<worker::StepLoop> loop_;
  std::vector<std::unique_ptr<LoadRequest>> requests_;
  std::vector<LoadRequest*> line_;                       // The most urgent first.
  std::map<LoadRequest*, worker::CancelFlag> patience_;  // Of those that leave some time.
  int64_t num_open_ = 0;
  int64_t num_rounds_ = 0;
};

// The value that `share` of all do not exceed.
absl::Duration QuantileOf(std::vector<absl::Duration> all, double share);

// Between a request's tokens, from the one behind `begin` to the last before `end`.
std::vector<absl::Duration> GapsOf(const LoadRequest& request, absl::Time begin, absl::Time end);

}  // namespace isthmus::sim
