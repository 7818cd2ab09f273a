// SPDX-License-Identifier: Apache-2.0
#include "services/engine/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/sampling/sampling.h"
#include "services/base/check.h"
#include "services/base/crc32c.h"
#include "services/base/fault.h"
#include "services/base/status_macros.h"

namespace isthmus::engine {

Engine::Engine(model::Forward* forward, kv::CachePool* pool, const EngineOptions& options,
               const kernels::Exec& exec)
    : forward_(forward), pool_(pool), options_(options), exec_(exec) {
  if (exec_.workspace == nullptr) exec_.workspace = &workspace_;
  sampling_exec_.threads = exec_.threads;
  sampling_exec_.workspace = kernels::IsDevice(exec_.arch) ? &workspace_ : exec_.workspace;
}

// A device that answers nothing but errors any more fails every later step as well.
absl::Status Engine::ScopeOf(absl::Status status) const {
  if (status.ok() || !kernels::IsDevice(exec_.arch) || !kernels::IsStickyError()) return status;
  return WithFaultScope(std::move(status), FaultScope::kDevice);
}

absl::Status Engine::TakeLogits(int64_t count) {
  if (!kernels::IsDevice(exec_.arch)) {
    host_logits_.resize(static_cast<size_t>(count));
    logits_ = host_logits_.data();
    return absl::OkStatus();
  }
  if (const int64_t bytes = 4 * count; bytes > pinned_logits_.bytes()) {
    ISTHMUS_ASSIGN_OR_RETURN(pinned_logits_, kernels::PinnedBuffer::Allocate(2 * bytes));
  }
  logits_ = pinned_logits_.as<float>();
  return absl::OkStatus();
}

absl::Status Engine::Validate(std::span<const int32_t> prompt,
                              const SamplingParams& sampling) const {
  if (prompt.empty()) return absl::InvalidArgumentError("prompt: it has no tokens");
  const auto size = static_cast<int64_t>(prompt.size());
  if (size >= forward_->max_positions()) {
    return absl::InvalidArgumentError(absl::StrCat("prompt: it has ", size,
                                                   " tokens, the model's limit is ",
                                                   forward_->max_positions(), " with the output"));
  }
  for (int64_t t = 0; t < size; ++t) {
    const int32_t id = prompt[static_cast<size_t>(t)];
    if (id < 0 || id >= forward_->vocab_size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "prompt: token ", t, " has id ", id, ", the vocabulary has ", forward_->vocab_size()));
    }
  }
  if (sampling.max_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_tokens is ", sampling.max_tokens, ", must be at least 1"));
  }
  return kernels::ValidateSampling(sampling.temperature, sampling.top_p, sampling.top_k);
}

absl::StatusOr<Sequence> Engine::Admit(std::string request_id, std::vector<int32_t> prompt,
                                       const SamplingParams& sampling) {
  ISTHMUS_RETURN_IF_ERROR(Validate(prompt, sampling));
  Sequence sequence;
  sequence.request_id = std::move(request_id);
  sequence.num_prompt_tokens = static_cast<int64_t>(prompt.size());
  sequence.tokens = std::move(prompt);
  sequence.sampling = sampling;
  ISTHMUS_ASSIGN_OR_RETURN(sequence.cache, pool_->Open());
  ISTHMUS_RETURN_IF_ERROR(sequence.cache.Reserve(sequence.num_prompt_tokens + 1));
  return sequence;
}

// Everything that a step changes is collected here first, so that an error changes nothing.
struct Engine::Pass {
  struct Caught {
    Sequence* sequence = nullptr;
    std::vector<int32_t> tokens = {};  // What it gains.
    std::vector<uint32_t> digests = {};
    FinishReason finish = FinishReason::kNone;
  };

  std::span<const StepPart> parts;
  std::vector<int32_t> tokens;
  std::vector<kernels::SequenceKv> views;
  std::vector<int64_t> logit_rows;
  std::vector<Caught> caught_up;  // One per logit row.
  std::vector<std::vector<int32_t>> accepted;
  std::vector<int64_t> limits;
};

// A prompt ends with one token, which travels alone; a reply never outgrows its longest length, nor
// a boundary that a step should end at. `num_cached`: with the rows of this step.
int64_t Engine::AcceptedLimit(const Sequence& sequence, int64_t num_cached) const {
  if (sequence.num_output_tokens() == 0) return 0;
  const auto size = static_cast<int64_t>(sequence.tokens.size());
  const int64_t room = std::min(sequence.sampling.max_tokens - sequence.num_output_tokens(),
                                forward_->max_positions() - size);
  const int64_t limit = std::clamp<int64_t>(room - 1, 0, forward_->max_accepted());
  const int64_t to_boundary = sequence.wanted_boundary - num_cached;
  return to_boundary >= 0 ? std::min(limit, to_boundary) : limit;
}

absl::Status Engine::Gather(std::span<const StepPart> parts, Pass& pass) {
  pass.parts = parts;
  for (const auto& [sequence, count] : parts) {
    const int64_t start = sequence->cache.num_tokens();
    const bool is_caught_up = count == sequence->num_pending();
    const int64_t limit = is_caught_up ? AcceptedLimit(*sequence, start + count) : 0;
    ISTHMUS_RETURN_IF_ERROR(sequence->cache.Reserve(start + count + limit));
    pass.views.push_back(sequence->cache.View(static_cast<int64_t>(pass.tokens.size()), count));
    pass.tokens.insert(pass.tokens.end(), sequence->tokens.begin() + start,
                       sequence->tokens.begin() + start + count);
    if (!is_caught_up) continue;
    pass.logit_rows.push_back(static_cast<int64_t>(pass.tokens.size()) - 1);
    pass.caught_up.push_back({.sequence = sequence});
    pass.limits.push_back(limit);
  }
  if (forward_->max_accepted() > 0) pass.accepted.resize(pass.logit_rows.size());
  return absl::OkStatus();
}

absl::Status Engine::Step(std::span<Sequence* const> sequences) {
  for (const Sequence* sequence : sequences) {
    ISTHMUS_CHECK(!sequence->is_finished() && sequence->num_pending() > 0);
  }
  const std::vector<StepPart> parts =
      PlanStep(sequences, options_.chunk_tokens, options_.max_batch_tokens);
  Pass pass;
  ISTHMUS_RETURN_IF_ERROR(Gather(parts, pass));
  const int64_t vocab = forward_->vocab_size();
  const auto num_rows = static_cast<int64_t>(pass.logit_rows.size());
  // Steps may come from another thread than the one that made the engine.
  if (kernels::IsDevice(exec_.arch)) ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(pool_->device()));
  ISTHMUS_RETURN_IF_ERROR(TakeLogits(num_rows * vocab));
  kernels::Exec exec = exec_;
  exec.phase = pass.tokens.size() == parts.size() ? kPhaseDecode : kPhasePrefill;
  ISTHMUS_RETURN_IF_ERROR(
      ScopeOf(forward_->Run({.tokens = pass.tokens,
                             .sequences = pass.views,
                             .logit_rows = pass.logit_rows,
                             .logits = kernels::F32Matrix(logits_, num_rows, vocab),
                             .accepted = pass.accepted,
                             .accepted_limits = pass.limits},
                            exec)));
  ISTHMUS_RETURN_IF_ERROR(Sample(pass));
  Commit(pass, ++num_steps_);
#ifdef ISTHMUS_CHECK_INVARIANTS
  pool_->CheckConservation();
#endif
  return absl::OkStatus();
}

absl::Status Engine::Sample(Pass& pass) {
  const int64_t vocab = forward_->vocab_size();
  for (size_t r = 0; r < pass.caught_up.size(); ++r) {
    Pass::Caught& caught = pass.caught_up[r];
    const Sequence& sequence = *caught.sequence;
    const auto gain = [&](int32_t token, uint32_t digest) {
      caught.tokens.push_back(token);
      caught.digests.push_back(digest);
      const auto gained = static_cast<int64_t>(caught.tokens.size());
      if (token == options_.eos_token_id) {
        caught.finish = FinishReason::kStop;
      } else if (sequence.num_output_tokens() + gained >= sequence.sampling.max_tokens ||
                 static_cast<int64_t>(sequence.tokens.size()) + gained >=
                     forward_->max_positions()) {
        caught.finish = FinishReason::kLength;
      }
      return caught.finish == FinishReason::kNone;
    };
    bool goes_on = true;
    if (!pass.accepted.empty()) {
      const std::vector<int32_t>& accepted = pass.accepted[r];
      if (static_cast<int64_t>(accepted.size()) > pass.limits[r]) {
        return absl::InternalError(absl::StrCat("the forward pass accepted ", accepted.size(),
                                                " tokens of at most ", pass.limits[r]));
      }
      for (size_t i = 0; i < accepted.size() && goes_on; ++i) goes_on = gain(accepted[i], 0);
    }
    if (!goes_on) continue;
    const float* row = logits_ + static_cast<int64_t>(r) * vocab;
    ISTHMUS_ASSIGN_OR_RETURN(const int32_t token,
                             kernels::Sample({.logits = kernels::F32Vector(row, vocab),
                                              .temperature = sequence.sampling.temperature,
                                              .top_p = sequence.sampling.top_p,
                                              .top_k = sequence.sampling.top_k,
                                              .seed = sequence.sampling.seed,
                                              .counter = sequence.num_draws + caught.tokens.size()},
                                             sampling_exec_));
    const bool wants_digest = sequence.sampling.wants_logits_digests;
    gain(token, wants_digest ? Crc32c(row, static_cast<size_t>(vocab) * sizeof(float)) : 0);
  }
  return absl::OkStatus();
}

void Engine::Commit(Pass& pass, uint64_t step) {
  for (size_t r = 0; r < pass.caught_up.size(); ++r) {
    Pass::Caught& caught = pass.caught_up[r];
    Sequence& sequence = *caught.sequence;
    sequence.tokens.insert(sequence.tokens.end(), caught.tokens.begin(), caught.tokens.end());
    sequence.num_draws += caught.tokens.size();
    sequence.finish = caught.finish;
    if (sequence.sampling.wants_logits_digests) {
      sequence.logits_crc32c.insert(sequence.logits_crc32c.end(), caught.digests.begin(),
                                    caught.digests.end());
    }
  }
  size_t row = 0;
  for (size_t i = 0; i < pass.parts.size(); ++i) {
    Sequence& sequence = *pass.parts[i].sequence;
    sequence.last_step = step;
    int64_t cached = pass.views[i].start_position + pass.views[i].num_rows;
    if (row < pass.caught_up.size() && pass.caught_up[row].sequence == &sequence) {
      if (!pass.accepted.empty()) cached += static_cast<int64_t>(pass.accepted[row].size());
      ++row;
    }
    // Of a reply that was cut, more may be cached than it has.
    cached = std::min(cached, static_cast<int64_t>(sequence.tokens.size()));
    ISTHMUS_CHECK(sequence.cache.SetNumTokens(cached).ok());
  }
}

}  // namespace isthmus::engine
