// SPDX-License-Identifier: Apache-2.0
#include "services/engine/engine.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/fault.h"
#include "services/base/request_limits.h"
#include "services/base/status_macros.h"
#include "services/engine/prefix_reuse.h"
#include "services/engine/sampler.h"

namespace isthmus::engine {

Engine::Engine(model::Forward* forward, kv::CachePool* pool, const EngineOptions& options,
               const kernels::Exec& exec)
    : forward_(forward), pool_(pool), options_(options), exec_(exec) {
  if (exec_.workspace == nullptr) exec_.workspace = &workspace_;
  sampling_exec_.threads = exec_.threads;
  sampling_exec_.patches = exec_.patches;
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
  if (sampling.top_prompt_logprobs.has_value() && size > kMaxLogprobPromptTokens) {
    return absl::InvalidArgumentError(absl::StrCat("top_prompt_logprobs: the prompt has ", size,
                                                   " tokens, want at most ",
                                                   kMaxLogprobPromptTokens));
  }
  return ValidateSamplingParams(sampling, SamplerModelOf());
}

absl::StatusOr<Sequence> Engine::Admit(std::string request_id, std::vector<int32_t> prompt,
                                       const SamplingParams& sampling, std::string cache_salt) {
  ISTHMUS_RETURN_IF_ERROR(Validate(prompt, sampling));
  Sequence sequence;
  sequence.request_id = std::move(request_id);
  sequence.num_prompt_tokens = static_cast<int64_t>(prompt.size());
  sequence.tokens = std::move(prompt);
  sequence.sampling = sampling;
  sequence.cache_salt = std::move(cache_salt);
  ISTHMUS_RETURN_IF_ERROR(OpenWithPrefix(*pool_, sequence.num_prompt_tokens + 1, sequence));
  sequence.num_reused_tokens = sequence.cache.num_tokens();
  if (kv::PrefixIndex* const index = pool_->prefixes(); index != nullptr) {
    index->CountQuery(sequence.num_prompt_tokens, sequence.num_reused_tokens);
  }
  return sequence;
}

// Everything that a step changes is collected here first, so that an error changes nothing.
struct Engine::Pass {
  struct Caught {
    Sequence* sequence = nullptr;
    size_t logit_row = 0;
    Gain gain = {};
  };
  // Rows of a prompt whose log probabilities are wanted: the first one is behind prompt token
  // number `first_token` - 1.
  struct PromptRows {
    Sequence* sequence = nullptr;
    size_t first_logit_row = 0;
    int64_t first_token = 0;
    std::vector<kernels::TokenLogprobs> logprobs = {};
  };

  std::span<const StepPart> parts;
  std::vector<int32_t> tokens;
  std::vector<kernels::SequenceKv> views;
  std::vector<int64_t> logit_rows;
  std::vector<Caught> caught_up;
  std::vector<PromptRows> prompts;
  // One per logit row each.
  std::vector<std::vector<int32_t>> accepted;
  std::vector<int64_t> limits;
  std::vector<std::optional<model::RowDraw>> draws;
  std::vector<int32_t> drawn;
};

// A prompt ends with one token, which travels alone; a reply never outgrows its longest length, nor
// a boundary that a step should end at. `num_cached`: with the rows of this step.
int64_t Engine::AcceptedLimit(const Sequence& sequence, int64_t num_cached) const {
  if (sequence.num_output_tokens() == 0 || !TakesDrafts(sequence)) return 0;
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
    const auto first_row = static_cast<int64_t>(pass.tokens.size());
    pass.tokens.insert(pass.tokens.end(), sequence->tokens.begin() + start,
                       sequence->tokens.begin() + start + count);
    GatherPromptRows(*sequence, first_row, count, pass);
    if (!is_caught_up) continue;
    pass.caught_up.push_back({.sequence = sequence, .logit_row = pass.logit_rows.size()});
    pass.logit_rows.push_back(first_row + count - 1);
    pass.limits.push_back(limit);
    pass.draws.push_back(DrawOf(*sequence));
  }
  pass.drawn.assign(pass.draws.size(), model::kNotDrawn);
  if (forward_->max_accepted() > 0) pass.accepted.resize(pass.logit_rows.size());
  return absl::OkStatus();
}

// The row of the prompt's last token is not among them: it is what the first token is drawn from.
void Engine::GatherPromptRows(Sequence& sequence, int64_t first_row, int64_t count, Pass& pass) {
  if (!sequence.lacks_prompt_logprobs()) return;
  const int64_t start = sequence.cache.num_tokens();
  const auto first_token = static_cast<int64_t>(sequence.prompt_logprobs.size()) + 1;
  const int64_t end_token = std::min(start + count + 1, sequence.num_prompt_tokens);
  if (start > first_token - 1 || first_token >= end_token) return;
  pass.prompts.push_back({.sequence = &sequence,
                          .first_logit_row = pass.logit_rows.size(),
                          .first_token = first_token});
  for (int64_t token = first_token; token < end_token; ++token) {
    pass.logit_rows.push_back(first_row + token - 1 - start);
    pass.limits.push_back(0);
    pass.draws.emplace_back();
    pass.prompts.back().logprobs.emplace_back();
  }
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
                             .accepted_limits = pass.limits,
                             .draws = pass.draws,
                             .drawn = pass.drawn},
                            exec)));
  ISTHMUS_RETURN_IF_ERROR(Sample(pass));
  Commit(pass, ++num_steps_);
#ifdef ISTHMUS_CHECK_INVARIANTS
  pool_->CheckConservation();
#endif
  return absl::OkStatus();
}

SamplerModel Engine::SamplerModelOf() const {
  return {.vocab_size = forward_->vocab_size(),
          .max_positions = forward_->max_positions(),
          .end_token_id = options_.eos_token_id};
}

absl::Status Engine::Sample(Pass& pass) {
  const int64_t vocab = forward_->vocab_size();
  const auto row = [&](size_t index) {
    return kernels::F32Vector(logits_ + static_cast<int64_t>(index) * vocab, vocab);
  };
  for (Pass::PromptRows& prompt : pass.prompts) {
    const auto look = [&](int64_t index, const kernels::Exec& exec) -> absl::Status {
      const auto i = static_cast<size_t>(index);
      const size_t token = static_cast<size_t>(prompt.first_token) + i;
      ISTHMUS_ASSIGN_OR_RETURN(
          prompt.logprobs[i],
          kernels::Logprobs({.logits = row(prompt.first_logit_row + i),
                             .chosen = prompt.sequence->tokens[token],
                             .num_top = prompt.sequence->sampling.top_prompt_logprobs.value_or(0)},
                            exec));
      return absl::OkStatus();
    };
    const auto count = static_cast<int64_t>(prompt.logprobs.size());
    ISTHMUS_RETURN_IF_ERROR(ForEachRow(count, vocab, sampling_exec_, look));
  }
  const auto draw = [&](int64_t index, const kernels::Exec& exec) -> absl::Status {
    Pass::Caught& caught = pass.caught_up[static_cast<size_t>(index)];
    std::span<const int32_t> accepted;
    if (!pass.accepted.empty()) accepted = pass.accepted[caught.logit_row];
    const int64_t limit = pass.limits[caught.logit_row];
    if (static_cast<int64_t>(accepted.size()) > limit) {
      return absl::InternalError(absl::StrCat("the forward pass accepted ", accepted.size(),
                                              " tokens of at most ", limit));
    }
    ISTHMUS_ASSIGN_OR_RETURN(
        caught.gain, DrawTokens(*caught.sequence, accepted, row(caught.logit_row), SamplerModelOf(),
                                exec, pass.drawn[caught.logit_row]));
    return absl::OkStatus();
  };
  const auto num_draws = static_cast<int64_t>(pass.caught_up.size());
  return ForEachRow(num_draws, vocab, sampling_exec_, draw);
}

void Engine::Commit(Pass& pass, uint64_t step) {
  for (Pass::PromptRows& prompt : pass.prompts) {
    std::vector<kernels::TokenLogprobs>& all = prompt.sequence->prompt_logprobs;
    std::ranges::move(prompt.logprobs, std::back_inserter(all));
  }
  for (Pass::Caught& caught : pass.caught_up) Append(std::move(caught.gain), *caught.sequence);
  size_t row = 0;
  for (size_t i = 0; i < pass.parts.size(); ++i) {
    Sequence& sequence = *pass.parts[i].sequence;
    sequence.last_step = step;
    int64_t cached = pass.views[i].start_position + pass.views[i].num_rows;
    if (row < pass.caught_up.size() && pass.caught_up[row].sequence == &sequence) {
      const size_t logit_row = pass.caught_up[row++].logit_row;
      if (!pass.accepted.empty()) cached += static_cast<int64_t>(pass.accepted[logit_row].size());
    }
    // Of a reply that was cut, more may be cached than it has.
    cached = std::min(cached, static_cast<int64_t>(sequence.tokens.size()));
    ISTHMUS_CHECK(sequence.cache.SetNumTokens(cached).ok());
    PublishPrefix(*pool_, sequence);
  }
}

}  // namespace isthmus::engine
