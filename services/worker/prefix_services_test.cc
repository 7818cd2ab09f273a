// SPDX-License-Identifier: Apache-2.0
// Prefixes that both workers have from earlier requests: what is neither computed nor sent again,
// and that nobody can tell from the reply.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "services/worker/testing/worker_pair.h"

namespace isthmus::worker {
namespace {

using ::testing::HasSubstr;

WorkerConfig ModelConfig(int32_t page_tokens, int32_t snapshots) {
  WorkerConfig config = TinyModelConfig();
  config.page_tokens = page_tokens;
  config.cache_tokens = 4096;
  config.chunk_tokens = 100;
  config.prefix_snapshots = snapshots;
  return config;
}

TestRequest Again(const TestRequest& request) {
  TestRequest again = request;
  again.transfer_id = rpc::NewTransferId();
  return again;
}

// What one request took.
struct Cost {
  uint64_t held_tokens = 0;
  uint64_t cached_prompt_tokens = 0;
  uint64_t kv_bytes = 0;
};

TestReply RunAtCost(WorkerPair& pair, const TestRequest& request, Cost* cost) {
  const auto reservation = pair.Reserve(request);
  EXPECT_TRUE(reservation.ok()) << reservation.status();
  if (!reservation.ok()) return {};
  const auto handoff = pair.Prefill(request, *reservation);
  EXPECT_TRUE(handoff.ok()) << handoff.status();
  if (!handoff.ok()) return {};
  *cost = {reservation->held_tokens(), handoff->cached_prompt_tokens(), handoff->kv_bytes()};
  return pair.RunFrom(request, *handoff);
}

class PrefixServicesTest : public testing::TestWithParam<int32_t> {
 protected:
  uint64_t WholePages(uint64_t num_tokens) const {
    const auto page_tokens = static_cast<uint64_t>(GetParam());
    return num_tokens / page_tokens * page_tokens;
  }
};

TEST_P(PrefixServicesTest, TheSameRequestTwiceHasTheReplyOfAColdOne) {
  WorkerPair cold(ModelConfig(GetParam(), 0), ModelConfig(GetParam(), 0));
  WorkerPair warm(ModelConfig(GetParam(), 8), ModelConfig(GetParam(), 8));
  for (const size_t size : {100u, 128u, 256u, 300u, 385u, 512u}) {
    const TestRequest request = RequestOf(size, 5, static_cast<uint32_t>(size));
    Cost cost;
    const TestReply want = RunAtCost(cold, request, &cost);
    EXPECT_EQ(cost.held_tokens + cost.cached_prompt_tokens, 0u);
    for (int round = 0; round < 3; ++round) {
      Cost now;
      const TestReply reply = RunAtCost(warm, Again(request), &now);
      EXPECT_EQ(reply.tokens, want.tokens) << size;
      EXPECT_EQ(reply.digests, want.digests) << size;
      EXPECT_EQ(now.cached_prompt_tokens, round == 0 ? 0 : (size - 1) / 128 * 128) << size;
      EXPECT_EQ(now.held_tokens, round == 0 ? 0 : WholePages(size)) << size;
      EXPECT_EQ(now.kv_bytes < cost.kv_bytes, (now.held_tokens > 0));
    }
  }
}

TEST_P(PrefixServicesTest, ATalkIsSentOnceAndComputedOnce) {
  WorkerPair cold(ModelConfig(GetParam(), 0), ModelConfig(GetParam(), 0));
  WorkerPair warm(ModelConfig(GetParam(), 8), ModelConfig(GetParam(), 8));
  TestRequest request = RequestOf(200, 60);
  size_t turn_before = 0;
  for (uint32_t turn = 0; turn < 4; ++turn) {
    Cost cost;
    const TestReply want = RunAtCost(cold, Again(request), &cost);
    const TestReply reply = RunAtCost(warm, Again(request), &cost);
    EXPECT_EQ(reply.tokens, want.tokens) << turn;
    EXPECT_EQ(reply.digests, want.digests) << turn;
    // The decode worker has the reply's pages, the prefill worker the prompt's.
    if (turn > 0) {
      EXPECT_EQ(cost.cached_prompt_tokens, (turn_before - 1) / 128 * 128) << turn;
      EXPECT_EQ(cost.held_tokens, WholePages(request.prompt.size() - 31)) << turn;
    }
    turn_before = request.prompt.size();
    for (const int32_t token : reply.tokens) request.prompt.push_back(uint32_t(token));
    for (uint32_t i = 0; i < 30; ++i) request.prompt.push_back(2 + (turn * 50 + i) % 250);
  }
}

TEST_P(PrefixServicesTest, OtherSaltsShareNothingOnEitherWorker) {
  WorkerPair pair(ModelConfig(GetParam(), 8), ModelConfig(GetParam(), 8));
  TestRequest request = RequestOf(300, 3);
  for (const char* salt : {"one", "two", ""}) {
    request.cache_salt = salt;
    Cost cost;
    const TestReply reply = RunAtCost(pair, Again(request), &cost);
    EXPECT_EQ(reply.end, v1::SEQUENCE_END_LENGTH);
    EXPECT_EQ(cost.held_tokens + cost.cached_prompt_tokens, 0u) << salt;
  }
  Cost cost;
  RunAtCost(pair, Again(request), &cost);
  EXPECT_GT(cost.held_tokens, 0u);
  EXPECT_GT(cost.cached_prompt_tokens, 0u);
}

INSTANTIATE_TEST_SUITE_P(PageTokens, PrefixServicesTest, testing::Values(128, 256));

// ---- The bookkeeping, without a model

WorkerConfig SmallConfig() {
  WorkerConfig config = ScriptedConfig();
  config.page_tokens = 128;
  config.cache_tokens = 1024;
  config.prefix_snapshots = 4;
  return config;
}

TEST(PrefixServicesBookTest, WhatPrefixesHoldCountsAsFree) {
  WorkerPair pair(SmallConfig(), SmallConfig());
  for (uint32_t first = 0; first < 6; ++first) {
    const TestReply reply = pair.Run(RequestOf(600, 20, 40 * first));
    EXPECT_EQ(reply.end, v1::SEQUENCE_END_LENGTH) << reply.error.DebugString();
    EXPECT_EQ(pair.decode->load().free_pages(), pair.decode->load().total_pages());
    EXPECT_EQ(pair.prefill->load().free_pages(), pair.prefill->load().total_pages());
  }
  EXPECT_GT(pair.decode->pool().prefixes()->counts().evicted_blocks, 0u);
  EXPECT_GT(pair.prefill->pool().prefixes()->counts().evicted_blocks, 0u);
}

// Pages that are shared into a reservation do not end with it, nor with its quarantine.
TEST(PrefixServicesBookTest, ACancelledReservationLeavesSharedPagesAlone) {
  WorkerConfig config = SmallConfig();
  config.cache_tokens = 2048;
  WorkerPair pair(config, config);
  const TestRequest request = RequestOf(600, 20);
  const TestReply want = pair.Run(request);
  for (const bool writer_is_done : {true, false, true}) {
    const TestRequest again = Again(request);
    const auto reservation = pair.Reserve(again);
    ASSERT_TRUE(reservation.ok()) << reservation.status();
    EXPECT_EQ(reservation->held_tokens(), 512u);
    ASSERT_TRUE(
        pair.decode_service->Cancel(WorkerPair::CancelOf(again, writer_is_done), absl::Seconds(5))
            .ok());
    pair.decode->pool().CheckConservation();
  }
  EXPECT_EQ(pair.Run(Again(request)).tokens, want.tokens);
}

// Four sequences of five pages in eight, of which four are the same.
TEST(PrefixServicesBookTest, SharedPagesNeedNoRoom) {
  WorkerPair pair(SmallConfig(), SmallConfig());
  const TestRequest request = RequestOf(600, 20);
  EXPECT_EQ(pair.Run(request).end, v1::SEQUENCE_END_LENGTH);
  std::vector<TestRequest> others;
  for (int i = 0; i < 4; ++i) {
    others.push_back(Again(request));
    const auto reservation = pair.Reserve(others.back());
    ASSERT_TRUE(reservation.ok()) << i << ": " << reservation.status();
    EXPECT_EQ(reservation->held_tokens(), 512u);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(pair.Reserve(Again(request)).status()));
  for (const TestRequest& other : others) {
    EXPECT_TRUE(
        pair.decode_service->Cancel(WorkerPair::CancelOf(other, true), absl::Seconds(5)).ok());
  }
  EXPECT_EQ(pair.decode->load().free_pages(), pair.decode->load().total_pages());
}

TEST(PrefixServicesBookTest, RefusesWhatDoesNotFit) {
  WorkerPair pair(SmallConfig(), SmallConfig());
  const TestRequest request = RequestOf(300, 3);
  v1::ReserveCall call;
  call.set_transfer_id(request.transfer_id);
  call.set_num_prompt_tokens(300);
  call.set_max_output_tokens(3);
  call.set_router_incarnation(request.router);
  EXPECT_THAT(std::string(pair.decode_service->Reserve(call).status().message()),
              HasSubstr("prompt_token_ids: has 0 ids, want 300"));
  call.mutable_prompt_token_ids()->Add(request.prompt.begin(), request.prompt.end());
  call.set_cache_salt(std::string(129, 's'));
  EXPECT_THAT(std::string(pair.decode_service->Reserve(call).status().message()),
              HasSubstr("cache_salt: has 129 bytes, want at most 128"));

  const auto reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok()) << reservation.status();
  for (const uint64_t held : {100u, 384u, 512u}) {
    v1::KvReservation wrong = *reservation;
    wrong.set_held_tokens(held);
    TestRequest again = request;
    again.transfer_id = rpc::NewTransferId();
    wrong.set_transfer_id(again.transfer_id);
    EXPECT_THAT(std::string(pair.Prefill(again, wrong).status().message()),
                HasSubstr("reservation.held_tokens"));
  }
  // Pages that the reservation says it holds are not among those to fill.
  v1::KvReservation wrong = *reservation;
  wrong.set_held_tokens(128);
  EXPECT_THAT(std::string(pair.Prefill(request, wrong).status().message()),
              HasSubstr("has 3 pages, 300 tokens of which 128 are held need 2"));
}

}  // namespace
}  // namespace isthmus::worker
