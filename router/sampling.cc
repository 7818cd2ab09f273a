// SPDX-License-Identifier: Apache-2.0
#include "router/sampling.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "services/base/request_limits.h"
#include "services/base/status_macros.h"
#include "services/rpc/identity.h"
#include "services/text/utf8.h"

namespace isthmus::router {
namespace {

constexpr int kMaxStopStrings = 16;
constexpr size_t kMaxStopStringBytes = 256;

template <typename Value>
absl::Status Refuse(absl::string_view field, Value value, absl::string_view want) {
  return absl::InvalidArgumentError(
      absl::StrCat("sampling.", field, ": is ", value, ", want ", want));
}

absl::Status TooMany(absl::string_view field, int size, int64_t most) {
  return absl::InvalidArgumentError(
      absl::StrCat("sampling.", field, ": has ", size, " entries, want at most ", most));
}

// Written so that a NaN fails.
absl::Status CheckRange(absl::string_view field, double value, double least, double most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Refuse(field, value, absl::StrCat(least, " to ", most));
}

absl::Status CheckNumbers(const v1::SamplingParams& sampling) {
  ISTHMUS_RETURN_IF_ERROR(CheckRange("temperature", sampling.temperature(), 0, 2));
  if (!(sampling.top_p() > 0.0 && sampling.top_p() <= 1.0)) {
    return Refuse("top_p", sampling.top_p(), "above 0, at most 1");
  }
  if (sampling.top_k() > uint32_t{INT32_MAX}) {
    return Refuse("top_k", sampling.top_k(), "at most 2147483647");
  }
  ISTHMUS_RETURN_IF_ERROR(CheckRange("min_p", sampling.min_p(), 0, 1));
  if (!(sampling.repetition_penalty() > 0.0 && sampling.repetition_penalty() <= 2.0)) {
    return Refuse("repetition_penalty", sampling.repetition_penalty(), "above 0, at most 2");
  }
  ISTHMUS_RETURN_IF_ERROR(CheckRange("frequency_penalty", sampling.frequency_penalty(), -2, 2));
  ISTHMUS_RETURN_IF_ERROR(CheckRange("presence_penalty", sampling.presence_penalty(), -2, 2));
  ISTHMUS_RETURN_IF_ERROR(CheckRange("num_replies", sampling.num_replies(), 1, kMaxReplies));
  ISTHMUS_RETURN_IF_ERROR(CheckRange("top_logprobs", sampling.top_logprobs(), 0, kMaxTopLogprobs));
  return CheckRange("top_prompt_logprobs", sampling.top_prompt_logprobs(), 0, kMaxTopLogprobs);
}

absl::Status CheckTokens(const v1::SamplingParams& sampling, const v1::ClusterValues& values) {
  TokenLists lists;
  for (const auto& [id, bias] : sampling.logit_bias()) {
    lists.biased.push_back(id);
    ISTHMUS_RETURN_IF_ERROR(CheckRange(absl::StrCat("logit_bias[", id, "]"), bias, -100, 100));
  }
  lists.banned.assign(sampling.banned_token_ids().begin(), sampling.banned_token_ids().end());
  lists.stops.assign(sampling.stop_token_ids().begin(), sampling.stop_token_ids().end());
  lists.may_not_end_at_once = sampling.min_output_tokens() > 1;
  if (!sampling.ignores_end_token()) lists.end_token_id = values.end_token_id();
  return CheckTokenLists("sampling.", lists, values.vocab_size());
}

absl::Status CheckStopStrings(const v1::SamplingParams& sampling) {
  if (sampling.stop_strings_size() > kMaxStopStrings) {
    return TooMany("stop_strings", sampling.stop_strings_size(), kMaxStopStrings);
  }
  for (int i = 0; i < sampling.stop_strings_size(); ++i) {
    const std::string field = absl::StrCat("sampling.stop_strings[", i, "]");
    const std::string& string = sampling.stop_strings(i);
    if (string.empty() || string.size() > kMaxStopStringBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": has ", string.size(), " bytes, want 1 to ", kMaxStopStringBytes));
    }
    ISTHMUS_RETURN_IF_ERROR(text::CheckUtf8(field, string));
    for (int j = 0; j < i; ++j) {
      if (sampling.stop_strings(j) != string) continue;
      return absl::InvalidArgumentError(absl::StrCat(field, ": is the same as number ", j));
    }
  }
  return absl::OkStatus();
}

// Also fills in the longest length.
absl::Status CheckLengths(const RouterConfig& config, const v1::ClusterValues& values,
                          uint64_t num_prompt_tokens, v1::SamplingParams* sampling) {
  uint64_t longest = static_cast<uint64_t>(config.default_output_tokens);
  if (sampling->has_max_output_tokens()) {
    longest = sampling->max_output_tokens();
    if (longest == 0) return Refuse("max_output_tokens", 0, "at least 1");
  }
  // A reply that meets the model's limit ends with FINISH_REASON_LENGTH, like any other limit.
  longest = std::min(longest, values.max_sequence_tokens() - num_prompt_tokens);
  sampling->set_max_output_tokens(static_cast<uint32_t>(longest));
  if (sampling->min_output_tokens() > longest) {
    return Refuse("min_output_tokens", sampling->min_output_tokens(),
                  absl::StrCat("at most ", longest, ", which the reply can have"));
  }
  if (sampling->has_top_prompt_logprobs() &&
      num_prompt_tokens > static_cast<uint64_t>(kMaxLogprobPromptTokens)) {
    return absl::InvalidArgumentError(absl::StrCat("sampling.top_prompt_logprobs: the prompt has ",
                                                   num_prompt_tokens, " tokens, want at most ",
                                                   kMaxLogprobPromptTokens));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::SamplingParams> CompleteSampling(const v1::SamplingParams& asked,
                                                    const RouterConfig& config,
                                                    const v1::ClusterValues& values,
                                                    uint64_t num_prompt_tokens) {
  v1::SamplingParams sampling = asked;
  if (!asked.has_temperature()) sampling.set_temperature(config.default_temperature);
  if (!asked.has_top_p()) sampling.set_top_p(config.default_top_p);
  if (!asked.has_top_k()) sampling.set_top_k(static_cast<uint32_t>(config.default_top_k));
  if (!asked.has_min_p()) sampling.set_min_p(config.default_min_p);
  if (!asked.has_seed()) sampling.set_seed(rpc::NewIncarnation());
  if (!asked.has_repetition_penalty()) sampling.set_repetition_penalty(1);
  if (!asked.has_frequency_penalty()) sampling.set_frequency_penalty(0);
  if (!asked.has_presence_penalty()) sampling.set_presence_penalty(0);
  if (!asked.has_min_output_tokens()) sampling.set_min_output_tokens(0);
  if (!asked.has_num_replies()) sampling.set_num_replies(1);
  ISTHMUS_RETURN_IF_ERROR(CheckNumbers(sampling));
  ISTHMUS_RETURN_IF_ERROR(CheckTokens(sampling, values));
  ISTHMUS_RETURN_IF_ERROR(CheckStopStrings(sampling));
  ISTHMUS_RETURN_IF_ERROR(CheckLengths(config, values, num_prompt_tokens, &sampling));
  return sampling;
}

v1::SamplerState SamplerOf(const v1::SamplingParams& complete) {
  v1::SamplerState state;
  *state.mutable_sampling() = complete;
  state.mutable_sampling()->clear_max_output_tokens();
  state.mutable_sampling()->clear_stop_strings();
  state.mutable_sampling()->clear_include_stop_string();
  return state;
}

}  // namespace isthmus::router
