// SPDX-License-Identifier: Apache-2.0
// A prefix hit gives bitwise the logits of a cold run: for every length of a prompt modulo 4 and
// 128, for hits that end inside a page and at its end, behind prompts and behind replies, while
// other prefixes are evicted, in both arithmetics.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "services/engine/engine.h"
#include "services/engine/prefix_reuse.h"
#include "services/kv/sequence_cache.h"
#include "tests/fidelity/models.h"

namespace isthmus::fidelity {
namespace {

using engine::Sequence;
using kernels::Arithmetic;

constexpr kv::PrefixOptions kPrefixes = {.num_snapshots = 8};

class PrefixTest : public testing::TestWithParam<std::tuple<Arithmetic, int, std::string>> {
 protected:
  void SetUp() override {
    const std::string& device = std::get<2>(GetParam());
    ISTHMUS_REQUIRE_PLACE(device);
    diag::LocalEngineOptions options;
    options.checkpoint = BundledPath("tiny-recall");
    options.arithmetic = std::get<0>(GetParam());
    options.max_tokens = 1024;
    options.page_tokens = std::get<1>(GetParam());
    options.threads = 1;
    options.device = device;
    options.batch_invariant = true;
    auto opened = diag::LocalEngine::Create(options);
    ASSERT_TRUE(opened.ok()) << opened.status();
    local_ = *std::move(opened);
  }

  std::unique_ptr<kv::CachePool> PoolOf(int64_t num_tokens, const kv::PrefixOptions& prefixes) {
    return *kv::CachePool::Create(local_->forward().layout(), num_tokens, 4,
                                  local_->pool().device(), prefixes);
  }

  std::vector<int32_t> Ids(uint64_t seed, int64_t size) {
    return SeededIds(seed, size, local_->forward().vocab_size());
  }

  // Feeds what the sequence has not cached, in steps of at most `chunk` tokens that end at wanted
  // boundaries: the logits of every row.
  std::vector<float> Feed(kv::CachePool& pool, Sequence& sequence, int64_t chunk) {
    const int64_t vocabulary = local_->forward().vocab_size();
    std::vector<float> all;
    while (sequence.num_pending() > 0) {
      const int64_t start = sequence.cache.num_tokens();
      int64_t count = std::min(chunk, sequence.num_pending());
      if (sequence.wanted_boundary > start) {
        count = std::min(count, sequence.wanted_boundary - start);
      }
      const kernels::SequenceKv view = sequence.cache.View(0, count);
      std::vector<int64_t> rows;
      for (int64_t row = 0; row < count; ++row) rows.push_back(row);
      std::vector<float> logits(static_cast<size_t>(count * vocabulary));
      const absl::Status status = local_->forward().Run(
          {.tokens = std::span(sequence.tokens)
                         .subspan(static_cast<size_t>(start), static_cast<size_t>(count)),
           .sequences = {&view, 1},
           .logit_rows = rows,
           .logits = kernels::F32Matrix(logits.data(), count, vocabulary)},
          local_->exec());
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_TRUE(sequence.cache.SetNumTokens(start + count).ok());
      engine::PublishPrefix(pool, sequence);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

  Sequence Open(kv::CachePool& pool, std::vector<int32_t> tokens, const std::string& salt = "") {
    Sequence sequence;
    sequence.tokens = std::move(tokens);
    sequence.num_prompt_tokens = static_cast<int64_t>(sequence.tokens.size());
    sequence.cache_salt = salt;
    const absl::Status status =
        engine::OpenWithPrefix(pool, sequence.num_prompt_tokens + 8, sequence);
    EXPECT_TRUE(status.ok()) << status;
    return sequence;
  }

  // `rows` are the last ones of the first `end` positions of `whole`.
  bool EndsEqually(const std::vector<float>& whole, int64_t end,
                   const std::vector<float>& rows) const {
    const auto last = static_cast<size_t>(end * local_->forward().vocab_size());
    return rows.size() <= last && std::memcmp(whole.data() + last - rows.size(), rows.data(),
                                              rows.size() * sizeof(float)) == 0;
  }

  std::unique_ptr<diag::LocalEngine> local_;
};

TEST_P(PrefixTest, AHitGivesTheBitsOfAColdRunForEveryLengthOfAPrompt) {
  const std::vector<int32_t> text = Ids(31, 392);
  const auto cold_pool = PoolOf(1024, {});
  Sequence cold = Open(*cold_pool, text);
  const std::vector<float> whole = Feed(*cold_pool, cold, 392);

  const auto pool = PoolOf(1024, kPrefixes);
  // Hits at 128 and at 256: one of them inside a page of 256 tokens, the other at its end.
  for (const int64_t hit : {128, 256}) {
    Sequence first = Open(*pool, {text.begin(), text.begin() + hit + 1});
    EXPECT_TRUE(EndsEqually(whole, hit + 1, Feed(*pool, first, 512)));
    for (int64_t length = hit + 1; length <= hit + 128; ++length) {
      Sequence second = Open(*pool, {text.begin(), text.begin() + length});
      ASSERT_EQ(second.cache.num_tokens(), hit) << length;
      ASSERT_TRUE(EndsEqually(whole, length, Feed(*pool, second, 512))) << length;
      if (length % 5 != 0) continue;
      // And decode steps behind it.
      second.tokens.insert(second.tokens.end(), text.begin() + length, text.begin() + length + 6);
      ASSERT_TRUE(EndsEqually(whole, length + 6, Feed(*pool, second, 1))) << length;
    }
    if (hit == 128) pool->prefixes()->Clear();
  }
  pool->CheckConservation();
}

TEST_P(PrefixTest, AHitGivesTheBitsOfAColdRunWhileOthersAreEvicted) {
  const std::vector<int32_t> text = Ids(32, 300);
  const auto cold_pool = PoolOf(1024, {});
  Sequence cold = Open(*cold_pool, text);
  const std::vector<float> whole = Feed(*cold_pool, cold, 512);
  const auto pool = PoolOf(768, {.num_snapshots = 2});
  int64_t num_hits = 0;
  for (uint64_t round = 0; round < 6; ++round) {
    Sequence other = Open(*pool, Ids(100 + round, 250));
    (void)Feed(*pool, other, 128);
    other = Sequence();
    for (const char* salt : {"", "", "other"}) {
      Sequence again = Open(*pool, text, salt);
      num_hits += again.cache.num_tokens() > 0 ? 1 : 0;
      ASSERT_TRUE(EndsEqually(whole, 300, Feed(*pool, again, 100)));
    }
  }
  EXPECT_GE(num_hits, 6);
  EXPECT_GT(pool->prefixes()->counts().evicted_blocks, 0u);
}

// Several turns through the engine, each prompt the whole talk so far: hits end behind replies too.
TEST_P(PrefixTest, ATalkGetsTheTokensAndBitsOfColdRuns) {
  const auto pool = PoolOf(2048, kPrefixes);
  engine::Engine warm(&local_->forward(), pool.get(), {.chunk_tokens = 100}, local_->exec());
  std::vector<int32_t> talk = Ids(33, 90);
  int64_t before = -1;
  for (uint64_t turn = 0; turn < 4; ++turn) {
    const auto cold_pool = PoolOf(2048, {});
    engine::Engine cold(&local_->forward(), cold_pool.get(), {.chunk_tokens = 512}, local_->exec());
    std::vector<Sequence> ended;
    for (engine::Engine* one : {&warm, &cold}) {
      engine::SamplingParams sampling;
      sampling.max_tokens = 70;
      sampling.ignores_end_token = true;
      sampling.wants_logits_digests = true;
      auto admitted = one->Admit("r", talk, sampling);
      ASSERT_TRUE(admitted.ok()) << admitted.status();
      ended.push_back(*std::move(admitted));
      Sequence* const sequence = &ended.back();
      while (!sequence->is_finished()) ASSERT_TRUE(one->Step({&sequence, 1}).ok());
    }
    EXPECT_EQ(ended[0].tokens, ended[1].tokens) << turn;
    EXPECT_EQ(ended[0].logits_crc32c, ended[1].logits_crc32c) << turn;
    EXPECT_EQ(ended[1].num_reused_tokens, 0);
    EXPECT_GE(ended[0].num_reused_tokens, before) << turn;
    before = ended[0].num_reused_tokens;
    talk = ended[0].tokens;
    const std::vector<int32_t> question = Ids(40 + turn, 35);
    talk.insert(talk.end(), question.begin(), question.end());
  }
  EXPECT_GE(before, 256);
}

// N tenants with a secret each, at the same time: none gets another one's pages.
TEST_P(PrefixTest, TenantsNeverShare) {
  const auto pool = PoolOf(2048, kPrefixes);
  const std::vector<int32_t> question = Ids(34, 200);
  std::vector<Sequence> tenants;
  for (int32_t tenant = 0; tenant < 3; ++tenant) {
    tenants.push_back(Open(*pool, question, absl::StrCat("tenant ", tenant)));
    EXPECT_EQ(tenants.back().cache.num_tokens(), 0) << tenant;
    (void)Feed(*pool, tenants.back(), 512);
  }
  for (size_t a = 0; a < tenants.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      for (const int32_t page : tenants[a].cache.pages(kernels::kCsaKv)) {
        const auto others = tenants[b].cache.pages(kernels::kCsaKv);
        EXPECT_EQ(std::ranges::find(others, page), others.end());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    ArithmeticsAndPages, PrefixTest,
    testing::Combine(testing::Values(Arithmetic::kMath, Arithmetic::kReference),
                     testing::Values(128, 256), testing::Values("cpu", "cuda:0")),
    [](const auto& choice) {
      return absl::StrCat(std::get<0>(choice.param) == Arithmetic::kMath ? "math" : "reference",
                          "Pages", std::get<1>(choice.param),
                          std::get<2>(choice.param) == "cpu" ? "" : "OnAGpu");
    });

}  // namespace
}  // namespace isthmus::fidelity
