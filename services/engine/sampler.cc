// SPDX-License-Identifier: Apache-2.0
#include "services/engine/sampler.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/scratch_count.h"
#include "kernels/core/workspace.h"
#include "kernels/logit_edits/logit_edits.h"
#include "kernels/sampling/sampling.h"
#include "services/base/crc32c.h"
#include "services/base/request_limits.h"
#include "services/base/status_macros.h"

namespace isthmus::engine {
namespace {

template <typename Value>
absl::Status Refuse(absl::string_view field, Value value, absl::string_view want) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": is ", value, ", want ", want));
}

// Written so that a NaN fails.
absl::Status CheckRange(absl::string_view field, double value, double least, double most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Refuse(field, value, absl::StrCat(least, " to ", most));
}

absl::Status CheckLists(const SamplingParams& sampling, const SamplerModel& model) {
  TokenLists lists;
  for (const kernels::LogitBias& bias : sampling.logit_bias) {
    lists.biased.push_back(bias.id);
    ISTHMUS_RETURN_IF_ERROR(
        CheckRange(absl::StrCat("logit_bias[", bias.id, "]"), bias.bias, -100.0, 100.0));
  }
  lists.banned.assign(sampling.banned_token_ids.begin(), sampling.banned_token_ids.end());
  lists.stops.assign(sampling.stop_token_ids.begin(), sampling.stop_token_ids.end());
  lists.may_not_end_at_once = sampling.min_tokens > 1;
  if (!sampling.ignores_end_token) lists.end_token_id = model.end_token_id;
  return CheckTokenLists("", lists, model.vocab_size);
}

bool HasPenalties(const SamplingParams& sampling) {
  return sampling.repetition_penalty != 1.0f || sampling.frequency_penalty != 0.0f ||
         sampling.presence_penalty != 0.0f;
}

bool HasEdits(const SamplingParams& sampling) {
  return HasPenalties(sampling) || !sampling.logit_bias.empty() ||
         !sampling.banned_token_ids.empty();
}

// Whether output token number `index` may be one that ends the reply.
bool MayEnd(const SamplingParams& sampling, int64_t index) {
  return index + 1 >= sampling.min_tokens;
}

// What is never drawn as output token number `index`.
std::vector<int32_t> BannedAt(const SamplingParams& sampling, int64_t index, int32_t end_token_id) {
  std::vector<int32_t> banned = sampling.banned_token_ids;
  if (MayEnd(sampling, index)) return banned;
  banned.insert(banned.end(), sampling.stop_token_ids.begin(), sampling.stop_token_ids.end());
  if (!sampling.ignores_end_token) banned.push_back(end_token_id);
  return banned;
}

// Draws output tokens of one sequence from one row.
class RowSampler {
 public:
  RowSampler(const Sequence& sequence, const kernels::VectorView& logits, const kernels::Exec& exec)
      : sampling_(sequence.sampling),
        logits_(logits),
        edited_(logits),
        exec_(exec),
        scope_(exec.workspace) {}

  // Before the first draw. Whoever has edits takes no drafts, so all output is in the sequence.
  // `index` is that of the output token to be drawn.
  absl::Status Edit(Sequence& sequence, int64_t index, int32_t end_token_id) {
    const std::vector<int32_t> banned = BannedAt(sampling_, index, end_token_id);
    if (banned.empty() && !HasEdits(sampling_)) return absl::OkStatus();
    std::span<const kernels::TokenMention> mentions;
    if (HasPenalties(sampling_)) {
      ISTHMUS_RETURN_IF_ERROR(CountTokens(sequence.tokens, sequence.num_prompt_tokens, logits_.size,
                                          exec_.workspace, sequence.counts));
      mentions = sequence.counts.mentions;
    }
    auto* copy = scope_.Take<float>(logits_.size);
    std::copy_n(logits_.f32(), logits_.size, copy);
    edited_ = kernels::F32Vector(copy, logits_.size);
    return kernels::EditLogits({.logits = {copy, static_cast<size_t>(logits_.size)},
                                .mentions = mentions,
                                .repetition_penalty = sampling_.repetition_penalty,
                                .frequency_penalty = sampling_.frequency_penalty,
                                .presence_penalty = sampling_.presence_penalty,
                                .biases = sampling_.logit_bias,
                                .banned_ids = banned},
                               exec_);
  }

  absl::StatusOr<DrawnToken> Draw(uint64_t seed, uint64_t counter) const {
    DrawnToken drawn;
    ISTHMUS_ASSIGN_OR_RETURN(drawn.id, kernels::Sample({.logits = edited_,
                                                        .temperature = sampling_.temperature,
                                                        .top_p = sampling_.top_p,
                                                        .top_k = sampling_.top_k,
                                                        .min_p = sampling_.min_p,
                                                        .seed = seed,
                                                        .counter = counter},
                                                       exec_));
    if (sampling_.wants_logits_digests) {
      const auto bytes = static_cast<size_t>(logits_.size) * sizeof(float);
      drawn.logits_crc32c = Crc32c(logits_.data, bytes);
    }
    if (sampling_.top_logprobs.has_value()) {
      ISTHMUS_ASSIGN_OR_RETURN(
          drawn.logprobs,
          kernels::Logprobs(
              {.logits = logits_, .chosen = drawn.id, .num_top = *sampling_.top_logprobs}, exec_));
    }
    return drawn;
  }

 private:
  const SamplingParams& sampling_;
  const kernels::VectorView logits_;
  kernels::VectorView edited_;  // A copy where the request changes them.
  const kernels::Exec& exec_;
  kernels::Workspace::Scope scope_;
};

// Of rows drawn at a time: more would take scratch for little.
constexpr int64_t kMaxDrawThreads = 16;
// Fewer logits are not worth waking a thread for.
constexpr int64_t kLogitsPerThread = 16384;

// Bytes of scratch that the draws of one row take, at most.
int64_t RowScratchBytes(int64_t vocab) {
  kernels::ScratchCount scratch;
  scratch.Lend(CountScratchBytes(vocab));
  scratch.Take<float>(vocab);  // A copy where the request changes the logits.
  scratch.Lend(kernels::EditLogitsScratchBytes(kMaxLogitBiases));
  scratch.Lend(kernels::SampleScratchBytes(vocab));
  return scratch.peak_bytes();
}

}  // namespace

absl::Status ValidateSamplingParams(const SamplingParams& sampling, const SamplerModel& model) {
  if (sampling.max_tokens < 1) {
    return Refuse("max_tokens", sampling.max_tokens, "at least 1");
  }
  if (sampling.min_tokens < 0 || sampling.min_tokens > sampling.max_tokens) {
    return Refuse("min_tokens", sampling.min_tokens,
                  absl::StrCat("0 to max_tokens, which is ", sampling.max_tokens));
  }
  ISTHMUS_RETURN_IF_ERROR(kernels::ValidateSampling(sampling.temperature, sampling.top_p,
                                                    sampling.top_k, sampling.min_p));
  if (!(sampling.repetition_penalty > 0.0f && sampling.repetition_penalty <= 2.0f)) {
    return Refuse("repetition_penalty", sampling.repetition_penalty, "above 0, at most 2");
  }
  ISTHMUS_RETURN_IF_ERROR(CheckRange("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0));
  ISTHMUS_RETURN_IF_ERROR(CheckRange("presence_penalty", sampling.presence_penalty, -2.0, 2.0));
  if (sampling.top_logprobs.has_value()) {
    ISTHMUS_RETURN_IF_ERROR(CheckRange("top_logprobs", *sampling.top_logprobs, 0, kMaxTopLogprobs));
  }
  if (sampling.top_prompt_logprobs.has_value()) {
    ISTHMUS_RETURN_IF_ERROR(
        CheckRange("top_prompt_logprobs", *sampling.top_prompt_logprobs, 0, kMaxTopLogprobs));
  }
  const auto num_replies = static_cast<int64_t>(sampling.further_seeds.size()) + 1;
  if (num_replies > kMaxReplies) {
    return Refuse("num_replies", num_replies, absl::StrCat("1 to ", kMaxReplies));
  }
  return CheckLists(sampling, model);
}

int64_t DrawScratchBytes(int64_t vocab, int threads) {
  kernels::ScratchCount scratch;
  scratch.Take<std::byte>(std::min<int64_t>(threads, kMaxDrawThreads) * RowScratchBytes(vocab));
  return scratch.peak_bytes();
}

absl::Status ForEachRow(
    int64_t count, int64_t vocab, const kernels::Exec& exec,
    absl::FunctionRef<absl::Status(int64_t row, const kernels::Exec& exec)> look) {
  if (count == 0) return absl::OkStatus();
  const int64_t most = std::min<int64_t>({kernels::NumThreads(exec), kMaxDrawThreads, count});
  const int64_t workers = std::clamp<int64_t>(count * vocab / kLogitsPerThread, 1, most);
  const int64_t bytes = RowScratchBytes(vocab);
  kernels::Workspace::Scope scope(exec.workspace);
  auto* scratch = scope.Take<std::byte>(workers * bytes);
  std::vector<absl::Status> results(static_cast<size_t>(count));
  std::atomic<int64_t> next = 0;
  // Rows differ in what they cost, so whoever is free takes the next one.
  kernels::ParallelFor(exec, workers, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t worker = begin; worker < end; ++worker) {
      kernels::Workspace workspace(scratch + worker * bytes, bytes);
      const kernels::Exec own = {
          .phase = exec.phase, .patches = exec.patches, .workspace = &workspace};
      for (int64_t row = next++; row < count; row = next++) {
        results[static_cast<size_t>(row)] = look(row, own);
      }
    }
  });
  for (absl::Status& result : results) ISTHMUS_RETURN_IF_ERROR(std::move(result));
  return absl::OkStatus();
}

bool TakesDrafts(const Sequence& sequence) {
  const SamplingParams& sampling = sequence.sampling;
  return !HasEdits(sampling) && !sampling.top_logprobs.has_value() &&
         MayEnd(sampling, sequence.num_output_tokens());
}

std::optional<model::RowDraw> DrawOf(const Sequence& sequence) {
  const SamplingParams& sampling = sequence.sampling;
  const bool has_further = sequence.num_output_tokens() == 0 && !sampling.further_seeds.empty();
  // Drafts stand for tokens that nothing but the logits decides as well.
  if (!TakesDrafts(sequence) || sampling.wants_logits_digests || has_further) return std::nullopt;
  return model::RowDraw{.temperature = sampling.temperature,
                        .top_p = sampling.top_p,
                        .top_k = sampling.top_k,
                        .min_p = sampling.min_p,
                        .seed = sampling.seed,
                        .counter = sequence.num_draws};
}

FinishReason FinishWith(const Sequence& sequence, int32_t token, int64_t index,
                        const SamplerModel& model) {
  const SamplingParams& sampling = sequence.sampling;
  const bool is_end = token == model.end_token_id && !sampling.ignores_end_token;
  const bool is_stop =
      std::ranges::find(sampling.stop_token_ids, token) != sampling.stop_token_ids.end();
  if ((is_end || is_stop) && MayEnd(sampling, index)) return FinishReason::kStop;
  const bool is_full = sequence.num_prompt_tokens + index + 1 >= model.max_positions;
  if (index + 1 >= sampling.max_tokens || is_full) return FinishReason::kLength;
  return FinishReason::kNone;
}

absl::StatusOr<Gain> DrawTokens(Sequence& sequence, std::span<const int32_t> drafted,
                                const kernels::VectorView& logits, const SamplerModel& model,
                                const kernels::Exec& exec, int32_t drawn_id) {
  Gain gain;
  const int64_t first = sequence.num_output_tokens();
  for (size_t i = 0; i < drafted.size(); ++i) {
    gain.tokens.push_back({.id = drafted[i]});
    gain.finish = FinishWith(sequence, drafted[i], first + static_cast<int64_t>(i), model);
    if (gain.finish != FinishReason::kNone) return gain;
  }
  const int64_t index = first + static_cast<int64_t>(drafted.size());
  if (drawn_id != model::kNotDrawn) {
    if (drawn_id < 0) return kernels::NoFiniteLogit(model.vocab_size);
    gain.finish = FinishWith(sequence, drawn_id, index, model);
    gain.tokens.push_back({.id = drawn_id});
    return gain;
  }
  RowSampler sampler(sequence, logits, exec);
  ISTHMUS_RETURN_IF_ERROR(sampler.Edit(sequence, index, model.end_token_id));
  const uint64_t counter = sequence.num_draws + gain.tokens.size();
  ISTHMUS_ASSIGN_OR_RETURN(DrawnToken drawn, sampler.Draw(sequence.sampling.seed, counter));
  gain.finish = FinishWith(sequence, drawn.id, index, model);
  gain.tokens.push_back(std::move(drawn));
  if (first > 0) return gain;
  for (const uint64_t seed : sequence.sampling.further_seeds) {
    ISTHMUS_ASSIGN_OR_RETURN(DrawnToken further, sampler.Draw(seed, counter));
    gain.further.push_back(std::move(further));
  }
  return gain;
}

void Append(Gain gain, Sequence& sequence) {
  for (DrawnToken& drawn : gain.tokens) {
    sequence.tokens.push_back(drawn.id);
    if (sequence.sampling.wants_logits_digests) {
      sequence.logits_crc32c.push_back(drawn.logits_crc32c);
    }
    if (sequence.sampling.top_logprobs.has_value()) {
      sequence.logprobs.push_back(std::move(drawn.logprobs));
    }
  }
  sequence.num_draws += gain.tokens.size();
  sequence.finish = gain.finish;
  for (DrawnToken& drawn : gain.further) sequence.further_first.push_back(std::move(drawn));
}

}  // namespace isthmus::engine
