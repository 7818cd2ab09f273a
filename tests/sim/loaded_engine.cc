// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/loaded_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/status_macros.h"

namespace isthmus::sim {
namespace {

// Room may appear without a sign of it, as for a router that asks again.
constexpr absl::Duration kIdlePause = absl::Milliseconds(10);

Urgency UrgencyOf(const LoadRequest& request) {
  return {request.priority, request.arrived + request.deadline, request.arrived};
}

}  // namespace

LoadedEngine::LoadedEngine(const LoadSizes& sizes) : sizes_(sizes) {
  forward_ = *model::ScriptedForward::Create(sizes.script, clock_);
  pool_ = *kv::CachePool::Create(forward_->layout(), sizes.cache_tokens, sizes.max_sequences);
  engine::EngineOptions options;
  options.chunk_tokens = sizes.chunk_tokens;
  options.max_batch_tokens = sizes.max_batch_tokens;
  options.eos_token_id = sizes.script.end_token_id;
  engine_ = std::make_unique<engine::Engine>(forward_.get(), pool_.get(), options, kernels::Exec{});
  admission_ = std::make_unique<engine::Admission>(pool_.get(), sizes.admission, clock_);
  const auto max_sequences = static_cast<size_t>(sizes.max_sequences);
  loop_ = std::make_unique<worker::StepLoop>(engine_.get(), admission_.get(), max_sequences,
                                             max_sequences, clock_);
}

// The loop has no thread here: its last round ends what is left.
LoadedEngine::~LoadedEngine() {
  for (const auto& [request, flag] : patience_) *flag = true;
  while (loop_->num_sequences() > 0) loop_->RunOnce();
}

LoadRequest& LoadedEngine::Ask(const LoadRequest& request) {
  requests_.push_back(std::make_unique<LoadRequest>(request));
  LoadRequest& asked = *requests_.back();
  asked.arrived = clock_.Now();
  asked.ask_id = requests_.size();
  for (int64_t i = 0; i < asked.num_prompt_tokens; ++i) {
    const auto bits = static_cast<int64_t>(requests_.size() * 7919) + i * 31;
    asked.prompt.push_back(static_cast<int32_t>(2 + bits % (sizes_.script.vocab_size - 2)));
  }
  ++num_open_;
  const auto goes_before = [](const LoadRequest* a, const LoadRequest* b) {
    return GoesBefore(UrgencyOf(*a), UrgencyOf(*b));
  };
  line_.insert(std::ranges::upper_bound(line_, &asked, goes_before), &asked);
  return asked;
}

absl::Status LoadedEngine::Begin(LoadRequest& request) {
  const Urgency urgency = UrgencyOf(request);
  ISTHMUS_ASSIGN_OR_RETURN(engine::Admission::Claim claim,
                           admission_->Admit({.num_prompt_tokens = request.num_prompt_tokens,
                                              .max_output_tokens = request.max_output_tokens,
                                              .urgency = urgency,
                                              .ask_id = request.ask_id,
                                              .request_id = request.kind}));
  engine::SamplingParams sampling;
  sampling.max_tokens = request.max_output_tokens;
  ISTHMUS_ASSIGN_OR_RETURN(engine::Sequence sequence,
                           engine_->Admit("load", request.prompt, sampling));
  sequence.claim = std::move(claim);
  sequence.urgency = urgency;
  request.admitted = clock_.Now();
  worker::StepLoop::Entry entry;
  entry.sequence = std::move(sequence);
  entry.is_preemptible = true;
  entry.is_cancelled = std::make_shared<std::atomic<bool>>(false);
  patience_[&request] = entry.is_cancelled;
  LoadRequest* const asked = &request;
  entry.on_step = [this, asked](const engine::Sequence& running, int64_t num_gained) {
    for (auto token = running.tokens.end() - num_gained; token != running.tokens.end(); ++token) {
      asked->output.push_back(*token);
      asked->token_times.push_back(clock_.Now());
    }
    return true;
  };
  entry.on_end = [this, asked](engine::Sequence ended, const absl::Status& status) {
    if (status.ok()) ended.claim.NoteEnd(ended.num_output_tokens());
    End(*asked, status);
  };
  return loop_->Submit(std::move(entry));
}

void LoadedEngine::End(LoadRequest& request, const absl::Status& status) {
  request.status = status;
  request.ended = clock_.Now();
  ++request.num_ends;
  --num_open_;
  patience_.erase(&request);
}

// Who has no room keeps the line waiting, so that large ones are not passed for ever.
void LoadedEngine::AdmitFromLine() {
  while (!line_.empty()) {
    const absl::Status status = Begin(*line_.front());
    if (absl::IsResourceExhausted(status)) return;
    LoadRequest* const request = line_.front();
    line_.erase(line_.begin());
    if (!status.ok()) End(*request, status);
  }
}

void LoadedEngine::Leave() {
  const absl::Time now = clock_.Now();
  std::erase_if(line_, [&](LoadRequest* request) {
    if (now < request->arrived + request->leaves_after) return false;
    End(*request, absl::CancelledError("the client left the line"));
    return true;
  });
  for (const auto& [request, flag] : patience_) {
    if (now >= request->arrived + request->leaves_after) *flag = true;
  }
}

void LoadedEngine::RunFor(absl::Duration duration, const std::function<void()>& on_round) {
  const absl::Time end = clock_.Now() + duration;
  while (clock_.Now() < end) {
    if (on_round) on_round();
    Leave();
    AdmitFromLine();
    if (loop_->num_sequences() == 0) {
      if (!on_round && line_.empty()) return;
      clock_.Sleep(kIdlePause);
      continue;
    }
    loop_->RunOnce();
    ++num_rounds_;
    pool_->CheckConservation();
  }
}

void LoadedEngine::RunToTheEnd(absl::Duration patience) {
  RunFor(patience);
  ISTHMUS_CHECK(num_open_ == 0);
}

double LoadedEngine::TokensPerSecond(absl::Time begin, absl::Time end) const {
  int64_t count = 0;
  for (const auto& request : requests_) {
    const auto first = std::ranges::lower_bound(request->token_times, begin);
    count += std::ranges::lower_bound(request->token_times, end) - first;
  }
  return static_cast<double>(count) / absl::ToDoubleSeconds(end - begin);
}

bool LoadedEngine::IsFaithful(const LoadRequest& request) const {
  const std::vector<int32_t> script =
      model::ScriptedReply(sizes_.script, request.prompt, request.max_output_tokens);
  if (request.status.ok() && request.num_ends == 1) return request.output == script;
  return request.output.size() <= script.size() &&
         std::equal(request.output.begin(), request.output.end(), script.begin());
}

absl::Duration QuantileOf(std::vector<absl::Duration> all, double share) {
  ISTHMUS_CHECK(!all.empty());
  std::ranges::sort(all);
  return all[static_cast<size_t>(share * static_cast<double>(all.size() - 1))];
}

std::vector<absl::Duration> GapsOf(const LoadRequest& request, absl::Time begin, absl::Time end) {
  std::vector<absl::Duration> gaps;
  for (size_t i = 1; i < request.token_times.size(); ++i) {
    const absl::Time at = request.token_times[i];
    if (request.token_times[i - 1] >= begin && at < end) {
      gaps.push_back(at - request.token_times[i - 1]);
    }
  }
  return gaps;
}

}  // namespace isthmus::sim
