// SPDX-License-Identifier: Apache-2.0
#include "services/diag/generate_sampling.h"

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "services/base/reply_seed.h"
#include "services/base/request_limits.h"

namespace isthmus::diag {
namespace {

// CLI11 alone would take -1 and what exceeds 64 bits for the largest number.
std::string SeedProblem(const std::string& text) {
  uint64_t seed = 0;
  if (absl::SimpleAtoi(text, &seed)) return "";
  return absl::StrCat("\"", text, "\" is not a number from 0 to 18446744073709551615");
}

void AddDraws(CLI::App* command, CLI::Option* restore, GenerateSampling& flags) {
  engine::SamplingParams& params = flags.params;
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->excludes(restore);
  };
  add("--temperature", params.temperature, "0: greedy")->capture_default_str();
  add("--top-p", params.top_p, "In (0, 1]")->capture_default_str();
  add("--top-k", params.top_k, "0: no limit")->capture_default_str();
  add("--min-p", params.min_p, "Drop tokens less likely than this share of the likeliest")
      ->capture_default_str();
  add("--seed", params.seed, "Of the sampler")->check(SeedProblem)->capture_default_str();
  add("--repetition-penalty", params.repetition_penalty,
      "Divides logits of tokens that occurred; 1: none")
      ->capture_default_str();
  add("--frequency-penalty", params.frequency_penalty,
      "Taken from a token's logit for each time it was drawn")
      ->capture_default_str();
  add("--presence-penalty", params.presence_penalty,
      "Taken from the logits of tokens that were drawn")
      ->capture_default_str();
  add("--logit-bias", flags.logit_bias, "id=bias, added to a token's logit");
  add("--ban", params.banned_token_ids, "Token ids that are never drawn");
  add("--n", flags.num_replies, "Replies to the same prompt, one after another")
      ->check(CLI::Range(1, static_cast<int>(kMaxReplies)))
      ->capture_default_str();
}

void AddEnds(CLI::App* command, CLI::Option* restore, GenerateSampling& flags) {
  engine::SamplingParams& params = flags.params;
  command
      ->add_option_function<int64_t>(
          "--max-tokens",
          [&flags](const int64_t& value) {
            flags.params.max_tokens = value;
            flags.has_max_tokens = true;
          },
          "Most output tokens; of a restored reply in all, default as saved")
      ->default_str(absl::StrCat(params.max_tokens));
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->excludes(restore);
  };
  add("--min-tokens", params.min_tokens, "Nothing ends the reply earlier")->capture_default_str();
  add("--stop", flags.stops, "The reply ends before the first of these texts");
  add("--stop-token", params.stop_token_ids, "Token ids that end the reply");
  command->add_flag("--keep-stop", flags.keeps_stop, "What stopped the reply stays in its text")
      ->excludes(restore);
  command->add_flag("--ignore-end", params.ignores_end_token, "The model's end token ends nothing")
      ->excludes(restore);
  add("--logprobs", params.top_logprobs,
      "With --json: log probabilities of each token and of so many likeliest ones");
  add("--prompt-logprobs", params.top_prompt_logprobs, "The same of the prompt");
}

}  // namespace

void AddSamplingFlags(CLI::App* command, CLI::Option* restore, GenerateSampling& flags) {
  AddDraws(command, restore, flags);
  AddEnds(command, restore, flags);
}

absl::StatusOr<engine::SamplingParams> ParamsOf(const GenerateSampling& flags, int reply) {
  engine::SamplingParams params = flags.params;
  params.seed = ReplySeed(params.seed, static_cast<uint32_t>(reply));
  for (const std::string& text : flags.logit_bias) {
    const std::vector<std::string> parts = absl::StrSplit(text, '=');
    kernels::LogitBias bias;
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &bias.id) ||
        !absl::SimpleAtof(parts[1], &bias.bias)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--logit-bias: is \"", text, "\", want id=number"));
    }
    params.logit_bias.push_back(bias);
  }
  return params;
}

}  // namespace isthmus::diag
