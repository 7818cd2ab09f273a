// SPDX-License-Identifier: Apache-2.0
// Conversations of twenty turns in pages that have no room for all of them: alternating, idle,
// evicted, some of it in host memory. Every answer is the cold run's, bit by bit, and cached tokens
// grow with the transcript.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "services/base/crc32c.h"
#include "services/engine/engine.h"
#include "services/kv/sequence_cache.h"
#include "tests/fidelity/models.h"

namespace isthmus::fidelity {
namespace {

using engine::Sequence;
using kernels::Arithmetic;

constexpr int kTurns = 20;
constexpr int64_t kReplyTokens = 5;
constexpr int64_t kMiB = 1 << 20;

// A thousand conversations take an hour on two cores; the CTest entry of the label nightly asks.
// NOLINTNEXTLINE(concurrency-mt-unsafe): nothing in a test writes the environment.
bool IsNightly() { return std::getenv("ISTHMUS_NIGHTLY") != nullptr; }

// An answer's logits, by the digest of the row behind token `row`.
struct Answer {
  size_t row = 0;
  uint32_t digest = 0;
};

struct Conversation {
  std::vector<int32_t> transcript;
  std::vector<Answer> answers;
  std::string salt;
  int64_t num_reused = 0;
  int64_t num_known = 0;  // Of the transcript, when the turn before ended.
};

class ConversationsTest : public testing::Test {
 protected:
  void SetUp() override {
    auto local = OpenEngine({.checkpoint = BundledPath("tiny-recall"),
                             .arithmetic = Arithmetic::kReference,
                             .threads = 2});
    ASSERT_TRUE(local.ok()) << local.status();
    local_ = *std::move(local);
  }

  void Serve(int64_t cache_tokens, const kv::PrefixOptions& prefixes) {
    engine_.reset();
    pool_ = *kv::CachePool::Create(local_->forward().layout(), cache_tokens, 8, kv::kHostMemory,
                                   prefixes);
    engine_ = std::make_unique<engine::Engine>(
        &local_->forward(), pool_.get(),
        engine::EngineOptions{.chunk_tokens = 256, .max_batch_tokens = 512}, local_->exec());
  }

  std::vector<int32_t> Ids(int64_t size) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < size; ++i) {
      ids.push_back(static_cast<int32_t>(2 + random_() % 1900));  // Not the end token.
    }
    return ids;
  }

  // A turn of each at the same time: `user_tokens` more tokens, then a reply.
  void Turn(const std::vector<Conversation*>& conversations, int64_t user_tokens) {
    std::vector<Sequence> sequences;
    for (Conversation* conversation : conversations) {
      const std::vector<int32_t> said = Ids(user_tokens);
      std::vector<int32_t>& transcript = conversation->transcript;
      transcript.insert(transcript.end(), said.begin(), said.end());
      engine::SamplingParams sampling;
      sampling.max_tokens = kReplyTokens;
      sampling.ignores_end_token = true;
      sampling.wants_logits_digests = true;
      auto sequence = engine_->Admit("turn", transcript, sampling, conversation->salt);
      ASSERT_TRUE(sequence.ok()) << sequence.status();
      conversation->num_reused = sequence->num_reused_tokens;
      num_prompt_tokens_ += static_cast<int64_t>(transcript.size());
      num_reused_tokens_ += sequence->num_reused_tokens;
      sequences.push_back(*std::move(sequence));
    }
    for (;;) {
      std::vector<Sequence*> running;
      for (Sequence& sequence : sequences) {
        if (!sequence.is_finished()) running.push_back(&sequence);
      }
      if (running.empty()) break;
      const absl::Status status = engine_->Step(running);
      ASSERT_TRUE(status.ok()) << status;
    }
    for (size_t i = 0; i < sequences.size(); ++i) {
      Conversation& conversation = *conversations[i];
      const size_t size = conversation.transcript.size();
      for (size_t t = 0; t < sequences[i].logits_crc32c.size(); ++t) {
        conversation.answers.push_back({size + t - 1, sequences[i].logits_crc32c[t]});
      }
      conversation.transcript = sequences[i].tokens;
      conversation.num_known = static_cast<int64_t>(sequences[i].tokens.size());
    }
  }

  // In one pass over the whole transcript, in pages of its own: the row behind each token before an
  // answer's must have the answer's digest, and the answer must be its likeliest token.
  void ExpectColdRun(const Conversation& conversation) {
    const auto pool = *kv::CachePool::Create(local_->forward().layout(), 2048, 1);
    kv::SequenceCache cache = *pool->Open();
    const auto size = static_cast<int64_t>(conversation.transcript.size());
    ASSERT_TRUE(cache.Reserve(size).ok());
    const kernels::SequenceKv view = cache.View(0, size);
    std::vector<int64_t> rows;
    for (const Answer& answer : conversation.answers) {
      rows.push_back(static_cast<int64_t>(answer.row));
    }
    const int64_t vocabulary = local_->forward().vocab_size();
    const auto num_rows = static_cast<int64_t>(rows.size());
    std::vector<float> logits(static_cast<size_t>(num_rows * vocabulary));
    const absl::Status status =
        local_->forward().Run({.tokens = conversation.transcript,
                               .sequences = {&view, 1},
                               .logit_rows = rows,
                               .logits = kernels::F32Matrix(logits.data(), num_rows, vocabulary)},
                              local_->exec());
    ASSERT_TRUE(status.ok()) << status;
    for (int64_t i = 0; i < num_rows; ++i) {
      const float* row = logits.data() + i * vocabulary;
      const Answer& answer = conversation.answers[static_cast<size_t>(i)];
      ASSERT_EQ(Crc32c(row, static_cast<size_t>(vocabulary) * sizeof(float)), answer.digest)
          << "token " << answer.row + 1;
      ASSERT_EQ(std::max_element(row, row + vocabulary) - row,
                conversation.transcript[answer.row + 1]);
    }
  }

  // `count` conversations of kTurns turns, four at a time in an order by chance, some of them idle
  // for long; one in `compared` is held against its cold run.
  void RunConversations(size_t count, size_t compared) {
    std::vector<Conversation> conversations(count);
    std::vector<size_t> turns;
    for (size_t c = 0; c < count; ++c) {
      conversations[c].transcript = Ids(static_cast<int64_t>(20 + random_() % 40));
      conversations[c].salt = c % 5 == 0 ? "tenant" : "";
      turns.insert(turns.end(), kTurns, c);
    }
    // Half of the conversations have their turns close together, the others all along.
    std::shuffle(turns.begin(), turns.end(), random_);
    std::stable_partition(turns.begin(), turns.end(), [](size_t c) { return c % 2 == 0; });
    std::shuffle(turns.begin() + static_cast<ptrdiff_t>(turns.size() / 4), turns.end(), random_);
    for (size_t next = 0; next < turns.size();) {
      std::vector<Conversation*> together;
      for (; next < turns.size() && together.size() < 4; ++next) {
        Conversation* const conversation = &conversations[turns[next]];
        if (std::ranges::count(together, conversation) > 0) break;
        together.push_back(conversation);
      }
      Turn(together, static_cast<int64_t>(6 + random_() % 8));
      if (HasFatalFailure()) return;
    }
    pool_->CheckConservation();
    for (size_t c = 0; c < count; c += compared) {
      ExpectColdRun(conversations[c]);
      if (HasFatalFailure()) return;
    }
  }

  static int64_t ResidentBytes() {
    int64_t pages = 0;
    int64_t resident = 0;
    std::ifstream("/proc/self/statm") >> pages >> resident;
    return resident * sysconf(_SC_PAGESIZE);
  }

  std::mt19937 random_{7};
  std::unique_ptr<diag::LocalEngine> local_;
  std::unique_ptr<kv::CachePool> pool_;
  std::unique_ptr<engine::Engine> engine_;
  int64_t num_prompt_tokens_ = 0;
  int64_t num_reused_tokens_ = 0;
};

constexpr kv::PrefixOptions kPagesAlone = {.num_snapshots = 24};
constexpr kv::PrefixOptions kWithHost = {.num_snapshots = 24, .host_bytes = 512 * kMiB};

// Fifty transcripts are ten times what the pages have room for.
TEST_F(ConversationsTest, FiftyAnswerAsColdRunsWithHostMemory) {
  Serve(2048, kWithHost);
  RunConversations(50, 1);
  const kv::PrefixCounts counts = pool_->prefixes()->counts();
  EXPECT_GT(counts.evicted_blocks, 100u);
  EXPECT_GT(counts.host_hit_tokens, 10'000u);
  EXPECT_EQ(counts.host_refused_bytes, 0u);
  // All but what stands behind a transcript's last multiple of 128.
  EXPECT_GT(num_reused_tokens_, num_prompt_tokens_ / 2);
}

TEST_F(ConversationsTest, FiftyAnswerAsColdRunsWithPagesAlone) {
  Serve(6144, kPagesAlone);  // A third of them: the rest is computed again.
  RunConversations(50, 1);
  EXPECT_GT(pool_->prefixes()->counts().evicted_blocks, 100u);
}

// Long sessions of others had no cached tokens at all.
TEST_F(ConversationsTest, CachedTokensGrowWithTheTranscript) {
  Serve(4096, kPagesAlone);
  Conversation conversation;
  conversation.transcript = Ids(150);
  int64_t before = -1;
  for (int turn = 0; turn < 8; ++turn) {
    const int64_t known = conversation.num_known;
    Turn({&conversation}, 135);
    EXPECT_GT(conversation.num_reused, before) << "turn " << turn;
    if (turn > 0) {
      EXPECT_GE(conversation.num_reused, (known - 1) / 128 * 128);
    }
    before = conversation.num_reused;
  }
  ExpectColdRun(conversation);
}

// The second of two equal requests ended at once with others, since windows were not cached.
TEST_F(ConversationsTest, ASecondIdenticalRequestAnswersEqually) {
  Serve(4096, kPagesAlone);
  for (const int64_t size : {127, 128, 129, 300}) {
    Conversation first;
    first.transcript = Ids(size);
    Conversation second = first;
    const std::mt19937 random = random_;
    Turn({&first}, 1);
    random_ = random;
    Turn({&second}, 1);
    EXPECT_EQ(second.transcript, first.transcript);
    EXPECT_EQ(second.num_reused, size / 128 * 128);
    for (size_t i = 0; i < first.answers.size(); ++i) {
      EXPECT_EQ(second.answers[i].digest, first.answers[i].digest);
    }
  }
}

// One user's prompt leaked into another's under concurrency. Eight tenants with prompts that differ
// in one tag, all at once and again: each answers as alone, and reuses nothing of the others.
TEST_F(ConversationsTest, TenantsNeverSeeEachOther) {
  Serve(4096, kWithHost);
  const std::vector<int32_t> text = Ids(200);
  std::vector<Conversation> tenants(8);
  for (size_t t = 0; t < tenants.size(); ++t) {
    tenants[t].transcript = text;
    tenants[t].transcript[140] = static_cast<int32_t>(1000 + t);
    tenants[t].salt = "tenant " + std::to_string(t);
  }
  std::vector<Conversation*> all;
  for (Conversation& tenant : tenants) all.push_back(&tenant);
  for (int round = 0; round < 3; ++round) {
    Turn(all, 20);
    for (const Conversation& tenant : tenants) {
      if (round == 0) {
        EXPECT_EQ(tenant.num_reused, 0);
      }
    }
  }
  for (const Conversation& tenant : tenants) ExpectColdRun(tenant);
}

// A big session, a shorter one, and back: stale state of the big one faulted later.
TEST_F(ConversationsTest, AShortSessionAfterABigOneContinues) {
  Serve(1536, kWithHost);
  Conversation big;
  big.transcript = Ids(1200);
  Conversation small;
  small.transcript = Ids(90);
  for (int turn = 0; turn < 3; ++turn) {
    Turn({&big}, 30);
    Turn({&small}, 60);
    Turn({&small}, 60);
  }
  ExpectColdRun(big);
  ExpectColdRun(small);
}

// Memory that grew with every turn of others. Waves of fifty, so that what is alive is the same.
TEST_F(ConversationsTest, AThousandLeaveMemoryFlat) {
  if (!IsNightly()) GTEST_SKIP() << "nightly: a thousand conversations";
  Serve(2048, {.num_snapshots = 24, .host_bytes = 64 * kMiB});
  std::vector<int64_t> resident;
  for (int wave = 0; wave < 20; ++wave) {
    RunConversations(50, 20);
    ASSERT_FALSE(HasFatalFailure()) << "wave " << wave;
    resident.push_back(ResidentBytes());
    std::cout << "wave " << wave << ": " << resident.back() / kMiB << " MiB resident\n"
              << std::flush;
  }
  // Both halves behind the first waves, which fill pages and host memory.
  const auto mean = [&](int from, int to) {
    int64_t sum = 0;
    for (int i = from; i < to; ++i) sum += resident[static_cast<size_t>(i)];
    return static_cast<double>(sum) / (to - from);
  };
  EXPECT_LT(mean(12, 20), 1.01 * mean(4, 12));
}

}  // namespace
}  // namespace isthmus::fidelity
