// SPDX-License-Identifier: Apache-2.0
// Idle conversations that the pages had no room for come back from host memory: not computed again,
// and bit by bit what they were, which the scripted forward pass verifies of all that it reads.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <random>

#include "services/base/clock.h"
#include "services/engine/engine.h"
#include "services/engine/prefix_reuse.h"
#include "services/model/scripted_forward.h"

namespace isthmus::engine {
namespace {

// The script, with a count of the rows that it computes.
class CountedForward : public model::Forward {
 public:
  explicit CountedForward(const model::ScriptedOptions& options)
      : script_(*model::ScriptedForward::Create(options, clock_)) {}

  absl::Status Run(const model::ForwardBatch& batch, const kernels::Exec& exec) override {
    num_rows += static_cast<int64_t>(batch.tokens.size());
    return script_->Run(batch, exec);
  }
  int64_t vocab_size() const override { return script_->vocab_size(); }
  int64_t max_positions() const override { return script_->max_positions(); }
  const kernels::KvLayout& layout() const override { return script_->layout(); }
  int64_t max_accepted() const override { return script_->max_accepted(); }

  int64_t num_rows = 0;

 private:
  SimulatedClock clock_;
  std::unique_ptr<model::ScriptedForward> script_;
};

constexpr int64_t kMiB = 1 << 20;

class Offloading {
 public:
  Offloading(int64_t cache_tokens, kv::PrefixOptions prefixes, int32_t page_tokens = 256) {
    options.vocab_size = 64;
    options.page_tokens = page_tokens;
    options.max_tokens_per_step = 3;
    forward = std::make_unique<CountedForward>(options);
    pool = *kv::CachePool::Create(forward->layout(), cache_tokens, 3, kv::kHostMemory, prefixes);
    engine = std::make_unique<Engine>(forward.get(), pool.get(), EngineOptions{.chunk_tokens = 96},
                                      kernels::Exec());
  }

  // The rows that the prompt's reply of `max_tokens` takes; its tokens join the transcript.
  int64_t Turn(std::vector<int32_t>& transcript, int64_t max_tokens = 20,
               const std::string& salt = "") {
    const int64_t before = forward->num_rows;
    SamplingParams sampling;
    sampling.max_tokens = max_tokens;
    auto sequence = engine->Admit("r", transcript, sampling, salt);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    if (!sequence.ok()) return -1;
    num_reused = sequence->num_reused_tokens;
    Sequence* const one = &*sequence;
    while (!sequence->is_finished()) {
      const absl::Status status = engine->Step({&one, 1});
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) return -1;
    }
    const std::vector<int32_t> reply = model::ScriptedReply(options, transcript, max_tokens);
    transcript.insert(transcript.end(), reply.begin(), reply.end());
    EXPECT_EQ(sequence->tokens, transcript);
    pool->CheckConservation();
    return forward->num_rows - before;
  }
  kv::PrefixCounts counts() const { return pool->prefixes()->counts(); }

  model::ScriptedOptions options;
  std::unique_ptr<CountedForward> forward;
  std::unique_ptr<kv::CachePool> pool;
  std::unique_ptr<Engine> engine;
  int64_t num_reused = 0;
};

std::vector<int32_t> PromptOf(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < size; ++i) prompt.push_back(static_cast<int32_t>(random() % 60 + 2));
  return prompt;
}

kv::PrefixOptions WithHost(int64_t bytes) { return {.num_snapshots = 16, .host_bytes = bytes}; }

TEST(OffloadTest, AnEvictedConversationIsNotComputedAgain) {
  for (const int32_t page_tokens : {128, 256, 512}) {
    for (const int64_t size : {130, 255, 256, 300, 640, 900}) {
      for (const bool has_host : {false, true}) {
        // Room for one conversation at a time.
        Offloading served(1024, WithHost(has_host ? 64 * kMiB : 0), page_tokens);
        std::vector<int32_t> first = PromptOf(size, 1);
        std::vector<int32_t> second = PromptOf(900, 2);
        served.Turn(first);
        served.Turn(second);
        const std::vector<int32_t> more = PromptOf(15, 3);
        first.insert(first.end(), more.begin(), more.end());
        const auto whole = static_cast<int64_t>(first.size());
        const int64_t rows = served.Turn(first);
        if (!has_host) {
          EXPECT_EQ(served.num_reused, 0) << size;
          continue;
        }
        // All but what lies behind the last boundary before the turn, and the reply.
        EXPECT_GE(served.num_reused, (size - 1) / 128 * 128) << size;
        EXPECT_LE(rows, whole - served.num_reused + 20) << size;
        EXPECT_GT(served.counts().offloaded_blocks, 0u);
        EXPECT_GT(served.counts().host_hit_tokens, 0u);
      }
    }
  }
}

// Ten conversations in a pool for two of them: turn by turn, each finds all of its own.
TEST(OffloadTest, ManyAlternatingConversationsGrowWithoutBeingComputedAgain) {
  Offloading served(4096, WithHost(256 * kMiB));
  std::vector<std::vector<int32_t>> transcripts;
  for (uint32_t c = 0; c < 10; ++c) transcripts.push_back(PromptOf(700 + 37 * c, c));
  for (uint32_t turn = 0; turn < 6; ++turn) {
    for (uint32_t c = 0; c < 10; ++c) {
      const std::vector<int32_t> more = PromptOf(60, 100 * turn + c);
      transcripts[c].insert(transcripts[c].end(), more.begin(), more.end());
      const auto size = static_cast<int64_t>(transcripts[c].size());
      served.Turn(transcripts[c], 30);
      if (turn > 0) {
        EXPECT_GE(served.num_reused, size - 90 - 128) << turn << " of " << c;
      }
    }
  }
  EXPECT_EQ(served.counts().lost_blocks, 0u);
}

TEST(OffloadTest, TheStoreIsBoundedAndForgetsTheLongestIdle) {
  const int64_t block = kv::BlockBytes(Offloading(1024, {}).forward->layout());
  Offloading served(1024, WithHost(40 * block));
  int64_t most = 0;
  std::vector<std::vector<int32_t>> transcripts;
  for (uint32_t c = 0; c < 12; ++c) {
    transcripts.push_back(PromptOf(800, c));
    served.Turn(transcripts.back());
    most = std::max(most, served.pool->prefixes()->host_bytes());
  }
  EXPECT_GT(most, 20 * block);
  EXPECT_LE(most, 40 * block);
  served.Turn(transcripts[0]);
  EXPECT_EQ(served.num_reused, 0);
  served.Turn(transcripts[11]);
  EXPECT_GT(served.num_reused, 0);
}

TEST(OffloadTest, ACallCopiesNoMoreThanItMay) {
  kv::PrefixOptions prefixes = WithHost(64 * kMiB);
  prefixes.host_step_bytes = 100;  // Less than a block.
  Offloading served(1024, prefixes);
  std::vector<int32_t> first = PromptOf(900, 1);
  std::vector<int32_t> second = PromptOf(900, 2);
  served.Turn(first);
  served.Turn(second);
  EXPECT_GT(served.counts().lost_blocks, 0u);
  EXPECT_EQ(served.counts().offloaded_blocks, 0u);
  served.Turn(first);
  EXPECT_EQ(served.num_reused, 0);
}

TEST(OffloadTest, OtherSaltsFindNothing) {
  Offloading served(1024, WithHost(64 * kMiB));
  const std::vector<int32_t> prompt = PromptOf(900, 1);
  std::vector<int32_t> second = PromptOf(900, 2);
  std::vector<int32_t> transcript = prompt;
  served.Turn(transcript, 20, "one");
  served.Turn(second, 20, "one");
  transcript = prompt;
  served.Turn(transcript, 20, "two");
  EXPECT_EQ(served.num_reused, 0);
  served.Turn(second, 20, "one");
  transcript = prompt;
  served.Turn(transcript, 20, "one");
  EXPECT_EQ(served.num_reused, 896);
}

int64_t ResidentBytes() {
  int64_t pages = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Memory that grew with every turn of others: a thousand conversations of twenty turns, fifty alive
// at a time, in pages for a few of them.
TEST(OffloadTest, AThousandConversationsLeaveMemoryFlat) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer keeps what was freed";
#endif
  Offloading served(4096, WithHost(8 * kMiB));
  std::vector<int64_t> resident;
  for (uint32_t wave = 0; wave < 20; ++wave) {
    std::vector<std::vector<int32_t>> transcripts;
    for (uint32_t c = 0; c < 50; ++c) transcripts.push_back(PromptOf(60, 1000 * wave + c));
    for (uint32_t turn = 0; turn < 20; ++turn) {
      for (uint32_t c = 0; c < 50; ++c) {
        const std::vector<int32_t> more = PromptOf(9, turn);
        transcripts[c].insert(transcripts[c].end(), more.begin(), more.end());
        served.Turn(transcripts[c], 6);
        ASSERT_FALSE(testing::Test::HasFailure()) << "wave " << wave << " turn " << turn;
      }
    }
    resident.push_back(ResidentBytes());
  }
  EXPECT_GT(served.counts().host_hit_tokens, 100'000u);
  // From when pages and host memory are full.
  const int64_t first = *std::max_element(resident.begin() + 3, resident.begin() + 8);
  const int64_t last = *std::max_element(resident.end() - 5, resident.end());
  EXPECT_LT(last, first + kMiB) << "first " << first << ", last " << last;
}

// The sums are compared before anything is used; what differs is computed, and forgotten.
TEST(OffloadTest, DamagedBytesAreRefusedOnceAndComputed) {
  Offloading served(1024, WithHost(64 * kMiB));
  std::vector<int32_t> transcript = PromptOf(900, 1);
  std::vector<int32_t> second = PromptOf(900, 2);
  const std::vector<int32_t> prompt = transcript;
  served.Turn(transcript);
  served.Turn(second);
  kv::PrefixIndex& index = *served.pool->prefixes();
  const PrefixHash root = index.RootOf("");
  std::vector<PrefixHash> chain;
  ExtendChain(root, prompt, chain);
  kv::HostHit hit = index.FindHost(root, chain, prompt, 0, 899);
  ASSERT_EQ(hit.num_tokens, 896);
  ASSERT_FALSE(hit.blocks.empty());
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): memory goes bad without asking.
  const_cast<kv::HostBytes&>(*hit.blocks[0]).bytes[50] ^= std::byte{4};
  hit = kv::HostHit();
  transcript = prompt;
  served.Turn(transcript);
  EXPECT_LT(served.num_reused, 896);
  const uint64_t refused = served.counts().host_refused_bytes;
  EXPECT_GT(refused, 0u);
  served.Turn(second);
  transcript = prompt;
  served.Turn(transcript);
  EXPECT_EQ(served.num_reused, 896);
  EXPECT_EQ(served.counts().host_refused_bytes, refused);
}

}  // namespace
}  // namespace isthmus::engine
