// SPDX-License-Identifier: Apache-2.0
#include "services/engine/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/sampling/sampling.h"
#include "services/base/check.h"
#include "services/base/status_macros.h"

namespace isthmus::engine {

Engine::Engine(model::Forward* forward, kv::CachePool* pool, const EngineOptions& options,
               const kernels::Exec& exec)
    : forward_(forward), pool_(pool), options_(options), exec_(exec) {
  if (exec_.workspace == nullptr) exec_.workspace = &workspace_;
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

absl::Status Engine::Step(std::span<Sequence* const> sequences) {
  std::vector<int32_t> tokens;
  std::vector<kernels::SequenceKv> views;
  std::vector<int64_t> logit_rows;
  std::vector<Sequence*> caught_up;
  for (Sequence* sequence : sequences) {
    ISTHMUS_CHECK(!sequence->is_finished() && sequence->num_pending() > 0);
    const int64_t count = std::min(options_.chunk_tokens, sequence->num_pending());
    const int64_t start = sequence->cache.num_tokens();
    ISTHMUS_RETURN_IF_ERROR(sequence->cache.Reserve(start + count));
    views.push_back(sequence->cache.View(static_cast<int64_t>(tokens.size()), count));
    tokens.insert(tokens.end(), sequence->tokens.begin() + start,
                  sequence->tokens.begin() + start + count);
    if (count == sequence->num_pending()) {
      logit_rows.push_back(static_cast<int64_t>(tokens.size()) - 1);
      caught_up.push_back(sequence);
    }
  }
  const int64_t vocab = forward_->vocab_size();
  const auto num_rows = static_cast<int64_t>(logit_rows.size());
  logits_.resize(static_cast<size_t>(num_rows * vocab));
  kernels::Exec exec = exec_;
  exec.phase = tokens.size() == sequences.size() ? kPhaseDecode : kPhasePrefill;
  ISTHMUS_RETURN_IF_ERROR(
      forward_->Run({.tokens = tokens,
                     .sequences = views,
                     .logit_rows = logit_rows,
                     .logits = kernels::F32Matrix(logits_.data(), num_rows, vocab)},
                    exec));
  for (size_t i = 0; i < sequences.size(); ++i) {
    ISTHMUS_RETURN_IF_ERROR(
        sequences[i]->cache.SetNumTokens(views[i].start_position + views[i].num_rows));
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    ISTHMUS_RETURN_IF_ERROR(SampleNext(kernels::F32Vector(logits_.data() + r * vocab, vocab),
                                       *caught_up[static_cast<size_t>(r)]));
  }
#ifdef ISTHMUS_CHECK_INVARIANTS
  pool_->CheckConservation();
#endif
  return absl::OkStatus();
}

absl::Status Engine::SampleNext(const kernels::VectorView& logits, Sequence& sequence) {
  ISTHMUS_ASSIGN_OR_RETURN(const int32_t token,
                           kernels::Sample({.logits = logits,
                                            .temperature = sequence.sampling.temperature,
                                            .top_p = sequence.sampling.top_p,
                                            .top_k = sequence.sampling.top_k,
                                            .seed = sequence.sampling.seed,
                                            .counter = sequence.num_draws},
                                           exec_));
  ++sequence.num_draws;
  sequence.tokens.push_back(token);
  if (token == options_.eos_token_id) {
    sequence.finish = FinishReason::kStop;
  } else if (sequence.num_output_tokens() >= sequence.sampling.max_tokens ||
             static_cast<int64_t>(sequence.tokens.size()) >= forward_->max_positions()) {
    sequence.finish = FinishReason::kLength;
  }
  return absl::OkStatus();
}

}  // namespace isthmus::engine
