// SPDX-License-Identifier: Apache-2.0
// Two workers of each role under load, and one of each killed: who has not streamed a token yet
// does not notice; the others end once, with an error.
#include <gtest/gtest.h>

#include <atomic>

#include "absl/time/clock.h"
#include "tests/integration/held_request.h"

namespace isthmus::testing {
namespace {

constexpr int kClients = 6;
constexpr int kRoundsAfterwards = 2;  // Of each client, after the last death.

ClusterOptions TwoOfEach() {
  ClusterOptions options = ScriptedPair();
  options.num_prefill = 2;
  options.num_decode = 2;
  options.workers.push_back("scripted.step_time=10ms");
  options.workers.push_back("scripted.prefill_token_time=200us");
  options.workers.push_back("scripted.max_tokens_per_step=4");
  options.router = {"max_active_requests=8"};
  return options;
}

// What became of the requests of all clients.
struct Tally {
  std::atomic<int> num_whole = 0;
  std::atomic<int> num_cut_off = 0;
};

void RunClient(Cluster& cluster, int client, const std::atomic<bool>& is_calm, Tally& tally) {
  int rounds_left = kRoundsAfterwards;
  for (int round = 0; rounds_left > 0 && round < 200; ++round) {
    if (is_calm) --rounds_left;
    const auto length = static_cast<size_t>(20 + (client * 97 + round * 53) % 400);
    v1::GenerateRequest asked = RequestOf(length, 80);
    RunningRequest request(cluster.router().address(), asked);
    const absl::Status status = request.Wait();
    const std::vector<uint32_t> tokens = request.tokens();
    const std::vector<uint32_t> right = ScriptedTokens(asked, 4);
    EXPECT_LE(tokens.size(), right.size());
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), right.begin())) << "prompt of " << length;
    if (status.ok()) {
      EXPECT_EQ(tokens.size(), right.size());
      ++tally.num_whole;
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_FALSE(tokens.empty()) << "had not streamed: " << status;
      ++tally.num_cut_off;
    }
  }
}

TEST(LoadTest, TheDeathOfOneWorkerOfEachRoleCostsOnlyWhatHadStreamed) {
  Cluster cluster(TwoOfEach());
  ASSERT_TRUE(cluster.WaitUntilReady());
  std::atomic<bool> is_calm = false;
  Tally tally;
  std::vector<Thread> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.emplace_back(RealClock(), [&, i] { RunClient(cluster, i, is_calm, tally); });
  }
  absl::SleepFor(absl::Milliseconds(800));
  cluster.prefill(0).Kill();
  absl::SleepFor(absl::Milliseconds(800));
  cluster.decode(1).Kill();
  absl::SleepFor(absl::Milliseconds(500));
  is_calm = true;
  for (Thread& client : clients) client.Join();
  EXPECT_GE(tally.num_whole, kClients * kRoundsAfterwards);
  EXPECT_LE(tally.num_cut_off, kClients);
  RecordProperty("whole", tally.num_whole);
  RecordProperty("cut_off", tally.num_cut_off);
  EXPECT_TRUE(cluster.WaitUntilFree(kFreePatience));
  cluster.prefill(0).Restart();
  cluster.decode(1).Restart();
  ASSERT_TRUE(cluster.WaitUntilReady());
  EXPECT_TRUE(cluster.WaitUntilFree(kAcknowledgedPatience));
}

}  // namespace
}  // namespace isthmus::testing
