// SPDX-License-Identifier: Apache-2.0
#include "services/ctl/sampling_flags.h"

#include <CLI/CLI.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace isthmus::ctl {
namespace {

// CLI11 alone would take -1 and what exceeds 64 bits for the largest number.
std::string SeedProblem(const std::string& text) {
  uint64_t seed = 0;
  if (absl::SimpleAtoi(text, &seed)) return "";
  return absl::StrCat("\"", text, "\" is not a number from 0 to 18446744073709551615");
}

// The same for 32 bits.
std::string CountProblem(const std::string& text) {
  uint32_t count = 0;
  if (absl::SimpleAtoi(text, &count)) return "";
  return absl::StrCat("\"", text, "\" is not a number from 0 to 4294967295");
}

void AddDraws(CLI::App* command, SamplingFlags& flags) {
  command->add_option("--temperature", flags.temperature, "0 is greedy")->capture_default_str();
  command->add_option("--top-p", flags.top_p, "Share of probability kept")->capture_default_str();
  command->add_option("--top-k", flags.top_k, "Tokens kept; 0: all")
      ->check(CountProblem)
      ->capture_default_str();
  command->add_option("--min-p", flags.min_p,
                      "Drop tokens less likely than this share of the likeliest");
  command->add_option("--seed", flags.seed, "Seed of the sampler; absent: a random one")
      ->check(SeedProblem);
  command->add_option("--repetition-penalty", flags.repetition_penalty,
                      "Divides logits of tokens that occurred; 1: none");
  command->add_option("--frequency-penalty", flags.frequency_penalty,
                      "Taken from a token's logit for each time it was drawn");
  command->add_option("--presence-penalty", flags.presence_penalty,
                      "Taken from the logits of tokens that were drawn");
  command->add_option("--logit-bias", flags.logit_bias, "id=bias, added to a token's logit");
  command->add_option("--ban", flags.banned_tokens, "Token ids that are never drawn")
      ->check(CountProblem);
  command->add_option("--n", flags.num_replies, "Replies to the same prompt")
      ->check(CountProblem)
      ->capture_default_str();
}

void AddEnds(CLI::App* command, SamplingFlags& flags) {
  command->add_option("--max-tokens", flags.max_tokens, "Output tokens at most")
      ->check(CountProblem)
      ->capture_default_str();
  command->add_option("--min-tokens", flags.min_tokens, "Nothing ends the reply earlier")
      ->check(CountProblem);
  command->add_option("--stop", flags.stops, "The reply ends before the first of these texts");
  command->add_option("--stop-token", flags.stop_tokens, "Token ids that end the reply")
      ->check(CountProblem);
  command->add_flag("--keep-stop", flags.keeps_stop, "What stopped the reply stays in its text");
  command->add_flag("--ignore-end", flags.ignores_end, "The model's end token ends nothing");
  command
      ->add_option("--logprobs", flags.top_logprobs,
                   "Log probabilities of each token and of so many likeliest ones")
      ->check(CountProblem);
  command->add_option("--prompt-logprobs", flags.top_prompt_logprobs, "The same of the prompt")
      ->check(CountProblem);
}

}  // namespace

void AddSamplingFlags(CLI::App* command, SamplingFlags& flags) {
  AddDraws(command, flags);
  AddEnds(command, flags);
}

absl::StatusOr<v1::SamplingParams> ParamsOf(const SamplingFlags& flags) {
  v1::SamplingParams params;
  params.set_temperature(flags.temperature);
  params.set_top_p(flags.top_p);
  params.set_top_k(flags.top_k);
  if (flags.min_p.has_value()) params.set_min_p(*flags.min_p);
  if (flags.seed.has_value()) params.set_seed(*flags.seed);
  params.set_max_output_tokens(flags.max_tokens);
  if (flags.min_tokens.has_value()) params.set_min_output_tokens(*flags.min_tokens);
  if (flags.repetition_penalty.has_value()) {
    params.set_repetition_penalty(*flags.repetition_penalty);
  }
  if (flags.frequency_penalty.has_value()) params.set_frequency_penalty(*flags.frequency_penalty);
  if (flags.presence_penalty.has_value()) params.set_presence_penalty(*flags.presence_penalty);
  for (const std::string& text : flags.logit_bias) {
    const std::vector<std::string> parts = absl::StrSplit(text, '=');
    uint32_t id = 0;
    double bias = 0;
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &id) ||
        !absl::SimpleAtod(parts[1], &bias)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--logit-bias: is \"", text, "\", want id=number"));
    }
    if (!params.mutable_logit_bias()->insert({id, bias}).second) {
      return absl::InvalidArgumentError(absl::StrCat("--logit-bias: has token ", id, " twice"));
    }
  }
  params.mutable_banned_token_ids()->Add(flags.banned_tokens.begin(), flags.banned_tokens.end());
  for (const std::string& stop : flags.stops) params.add_stop_strings(stop);
  params.mutable_stop_token_ids()->Add(flags.stop_tokens.begin(), flags.stop_tokens.end());
  params.set_include_stop_string(flags.keeps_stop);
  params.set_ignores_end_token(flags.ignores_end);
  params.set_num_replies(flags.num_replies);
  if (flags.top_logprobs.has_value()) params.set_top_logprobs(*flags.top_logprobs);
  if (flags.top_prompt_logprobs.has_value()) {
    params.set_top_prompt_logprobs(*flags.top_prompt_logprobs);
  }
  return params;
}

}  // namespace isthmus::ctl
