// SPDX-License-Identifier: Apache-2.0
#include "services/diag/generate_sampling.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "CLI/CLI.hpp"
#include "absl/strings/str_split.h"
#include "services/base/reply_seed.h"

namespace isthmus::diag {
namespace {

absl::StatusOr<GenerateSampling> Parse(absl::string_view line) {
  CLI::App app;
  GenerateSampling flags;
  std::string restored;
  AddSamplingFlags(&app, app.add_option("--restore", restored), flags);
  std::vector<std::string> arguments = absl::StrSplit(line, ' ', absl::SkipEmpty());
  std::ranges::reverse(arguments);  // As CLI11 wants them.
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return flags;
}

TEST(GenerateSamplingTest, EveryFlagArrives) {
  const GenerateSampling flags = *Parse(
      "--temperature 0.5 --top-p 0.75 --top-k 40 --min-p 0.25 --seed 18446744073709551615 --n 3 "
      "--max-tokens 9 --min-tokens 2 --stop a --stop b --stop-token 5 --ban 6 --ban 8 "
      "--logit-bias 7=-1.5 --logit-bias 9=2 --repetition-penalty 1.5 --frequency-penalty 0.125 "
      "--presence-penalty -0.25 --keep-stop --ignore-end --logprobs 4 --prompt-logprobs 0");
  EXPECT_EQ(flags.stops, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(flags.keeps_stop);
  EXPECT_EQ(flags.num_replies, 3);
  EXPECT_TRUE(flags.has_max_tokens);
  const engine::SamplingParams params = *ParamsOf(flags, 0);
  EXPECT_EQ(params.temperature, 0.5f);
  EXPECT_EQ(params.top_p, 0.75f);
  EXPECT_EQ(params.top_k, 40);
  EXPECT_EQ(params.min_p, 0.25f);
  EXPECT_EQ(params.seed, 18446744073709551615u);
  EXPECT_EQ(params.max_tokens, 9);
  EXPECT_EQ(params.min_tokens, 2);
  EXPECT_EQ(params.stop_token_ids, std::vector<int32_t>{5});
  EXPECT_EQ(params.banned_token_ids, (std::vector<int32_t>{6, 8}));
  ASSERT_EQ(params.logit_bias.size(), 2u);
  EXPECT_EQ(params.logit_bias[0].id, 7);
  EXPECT_EQ(params.logit_bias[0].bias, -1.5f);
  EXPECT_EQ(params.logit_bias[1].id, 9);
  EXPECT_EQ(params.repetition_penalty, 1.5f);
  EXPECT_EQ(params.frequency_penalty, 0.125f);
  EXPECT_EQ(params.presence_penalty, -0.25f);
  EXPECT_TRUE(params.ignores_end_token);
  EXPECT_EQ(params.top_logprobs, 4);
  EXPECT_EQ(params.top_prompt_logprobs, 0);
}

TEST(GenerateSamplingTest, WithoutFlagsNothingIsChanged) {
  const GenerateSampling flags = *Parse("");
  const engine::SamplingParams params = *ParamsOf(flags, 0);
  EXPECT_FALSE(flags.has_max_tokens);
  EXPECT_EQ(flags.num_replies, 1);
  EXPECT_EQ(params.max_tokens, engine::SamplingParams().max_tokens);
  EXPECT_EQ(params.repetition_penalty, 1.0f);
  EXPECT_FALSE(params.top_logprobs.has_value());
}

TEST(GenerateSamplingTest, FurtherRepliesHaveTheirOwnSeeds) {
  const GenerateSampling flags = *Parse("--seed 11 --n 2");
  EXPECT_EQ(ParamsOf(flags, 0)->seed, 11u);
  EXPECT_EQ(ParamsOf(flags, 1)->seed, ReplySeed(11, 1));
}

TEST(GenerateSamplingTest, RefusesWhatItCannotRead) {
  for (const char* line :
       {"--seed -1", "--seed 18446744073709551616", "--top-k x", "--n 0", "--n 17", "--ban x",
        "--stop-token 99999999999", "--restore a --min-p 0.5", "--restore a --ban 3",
        "--restore a --logprobs 1", "--restore a --stop b", "--restore a --ignore-end"}) {
    EXPECT_FALSE(Parse(line).ok()) << line;
  }
  EXPECT_TRUE(Parse("--restore a --max-tokens 5").ok());
  for (const char* line : {"--logit-bias 7", "--logit-bias x=1", "--logit-bias 7=x"}) {
    EXPECT_EQ(ParamsOf(*Parse(line), 0).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace isthmus::diag
