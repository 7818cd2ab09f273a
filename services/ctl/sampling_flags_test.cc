// SPDX-License-Identifier: Apache-2.0
#include "services/ctl/sampling_flags.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

namespace isthmus::ctl {
namespace {

absl::StatusOr<v1::SamplingParams> Parse(std::vector<std::string> arguments) {
  CLI::App app;
  SamplingFlags flags;
  AddSamplingFlags(&app, flags);
  std::ranges::reverse(arguments);  // As CLI11 wants them.
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return ParamsOf(flags);
}

TEST(SamplingFlagsTest, EveryFlagArrives) {
  const auto params = Parse({"--temperature",
                             "0.5",
                             "--top-p",
                             "0.9",
                             "--top-k",
                             "40",
                             "--min-p",
                             "0.05",
                             "--seed",
                             "7",
                             "--n",
                             "3",
                             "--max-tokens",
                             "9",
                             "--min-tokens",
                             "2",
                             "--stop",
                             "a b",
                             "--stop",
                             "c",
                             "--stop-token",
                             "5",
                             "--ban",
                             "6",
                             "--logit-bias",
                             "7=-1.5",
                             "--repetition-penalty",
                             "1.1",
                             "--frequency-penalty",
                             "0.1",
                             "--presence-penalty",
                             "0.2",
                             "--keep-stop",
                             "--ignore-end",
                             "--logprobs",
                             "4",
                             "--prompt-logprobs",
                             "0"});
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->ShortDebugString(),
            "temperature: 0.5 top_p: 0.9 top_k: 40 seed: 7 max_output_tokens: 9 min_p: 0.05 "
            "repetition_penalty: 1.1 frequency_penalty: 0.1 presence_penalty: 0.2 "
            "logit_bias { key: 7 value: -1.5 } banned_token_ids: 6 stop_strings: \"a b\" "
            "stop_strings: \"c\" stop_token_ids: 5 include_stop_string: true "
            "ignores_end_token: true min_output_tokens: 2 num_replies: 3 top_logprobs: 4 "
            "top_prompt_logprobs: 0");
}

TEST(SamplingFlagsTest, WhatIsNotSaidIsLeftToTheRouter) {
  const auto params = Parse({});
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_FALSE(params->has_seed() || params->has_min_p() || params->has_top_logprobs() ||
               params->has_repetition_penalty() || params->has_min_output_tokens());
}

TEST(SamplingFlagsTest, RefusesWhatIsNoNumber) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"--logit-bias", "7"},
                                             {"--logit-bias", "x=1"},
                                             {"--logit-bias", "7=1", "--logit-bias", "7=2"},
                                             {"--seed", "-1"},
                                             {"--n", "-1"},
                                             {"--ban", "4294967296"}}) {
    EXPECT_EQ(Parse(arguments).status().code(), absl::StatusCode::kInvalidArgument) << arguments[1];
  }
}

}  // namespace
}  // namespace isthmus::ctl
