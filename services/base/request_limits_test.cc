// SPDX-License-Identifier: Apache-2.0
#include "services/base/request_limits.h"

#include <gtest/gtest.h>

#include <numeric>

namespace isthmus {
namespace {

std::string Refusal(const TokenLists& lists, int64_t vocab_size = 2000) {
  const absl::Status status = CheckTokenLists("p.", lists, vocab_size);
  EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

std::vector<int64_t> Many(int64_t count) {
  std::vector<int64_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

TEST(CheckTokenListsTest, TakesTheLimitsThemselves) {
  EXPECT_EQ(Refusal({}), "");
  EXPECT_EQ(Refusal({.banned = Many(kMaxBannedTokens), .stops = Many(kMaxStopTokens)}), "");
  EXPECT_EQ(Refusal({.biased = Many(kMaxLogitBiases)}), "");
  EXPECT_EQ(Refusal({.biased = {0, 1999}, .banned = {1, 1998}}), "");
}

TEST(CheckTokenListsTest, NamesTheListAndTheToken) {
  EXPECT_EQ(Refusal({.biased = {2000}}), "p.logit_bias: has token 2000, want 0 to 1999");
  EXPECT_EQ(Refusal({.biased = {3, 4, 3}}), "p.logit_bias: has token 3 twice");
  EXPECT_EQ(Refusal({.banned = {-1}}), "p.banned_token_ids: has token -1, want 0 to 1999");
  EXPECT_EQ(Refusal({.stops = {4294967295}}),
            "p.stop_token_ids: has token 4294967295, want 0 to 1999");
  EXPECT_EQ(Refusal({.stops = Many(65)}), "p.stop_token_ids: has 65 entries, want at most 64");
  EXPECT_EQ(Refusal({.banned = Many(1025)}),
            "p.banned_token_ids: has 1025 entries, want at most 1024");
  EXPECT_EQ(Refusal({.biased = {5}, .banned = {4, 5}}),
            "p.banned_token_ids: has token 5, which logit_bias has as well");
}

TEST(CheckTokenListsTest, LeavesATokenToDraw) {
  const std::string refusal = "p.banned_token_ids: leaves no token of the 8 of the vocabulary";
  EXPECT_EQ(Refusal({.banned = Many(8)}, 8), refusal);
  EXPECT_EQ(Refusal({.banned = Many(7)}, 8), "");
  // What may not be drawn yet counts, each token once.
  TokenLists lists = {.banned = Many(6), .stops = {5, 6}, .end_token_id = 7};
  EXPECT_EQ(Refusal(lists, 8), "");
  lists.may_not_end_at_once = true;
  EXPECT_EQ(Refusal(lists, 8), refusal);
  lists.end_token_id.reset();
  EXPECT_EQ(Refusal(lists, 8), "");
}

}  // namespace
}  // namespace isthmus
