// SPDX-License-Identifier: Apache-2.0
#include "services/model/scripted_forward.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "kernels/core/state_rows.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::model {
namespace {

using kernels::SequenceKv;
using testing::HasSubstr;

ScriptedOptions SmallOptions() {
  ScriptedOptions options;
  options.seed = 7;
  options.vocab_size = 64;
  options.max_positions = 2048;
  options.page_tokens = 128;
  return options;
}

std::vector<int32_t> Prompt(int64_t size, int32_t first = 5) {
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < size; ++i) {
    prompt.push_back(static_cast<int32_t>((first + i * 7) % 64));
  }
  return prompt;
}

// A forward pass with a pool for its layout; sequences are stepped by hand.
class Script {
 public:
  explicit Script(const ScriptedOptions& options = SmallOptions(), int32_t num_sequences = 4)
      : forward(*ScriptedForward::Create(options, clock)),
        pool(*kv::CachePool::Create(forward->layout(), 16384, num_sequences)) {}

  // One step of one sequence: the token behind `tokens`; earlier ones are added to `accepted`.
  absl::StatusOr<int32_t> Step(kv::SequenceCache& cache, std::span<const int32_t> tokens,
                               int64_t limit = 0, std::vector<int32_t>* accepted = nullptr) {
    const auto rows = static_cast<int64_t>(tokens.size());
    if (const auto status = cache.Reserve(cache.num_tokens() + rows + limit); !status.ok()) {
      return status;
    }
    const SequenceKv view = cache.View(0, rows);
    const int64_t logit_row = rows - 1;
    std::vector<float> logits(static_cast<size_t>(forward->vocab_size()));
    std::vector<std::vector<int32_t>> lists(1);
    ForwardBatch batch = {.tokens = tokens,
                          .sequences = {&view, 1},
                          .logit_rows = {&logit_row, 1},
                          .logits = kernels::F32Matrix(logits.data(), 1, forward->vocab_size())};
    if (limit > 0) {
      batch.accepted = lists;
      batch.accepted_limits = {&limit, 1};
    }
    if (const auto status = forward->Run(batch, {}); !status.ok()) return status;
    const auto gained = static_cast<int64_t>(lists[0].size());
    if (const auto status = cache.SetNumTokens(cache.num_tokens() + rows + gained); !status.ok()) {
      return status;
    }
    if (accepted != nullptr) accepted->insert(accepted->end(), lists[0].begin(), lists[0].end());
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }

  // The reply of at least `count` tokens, in chunks of `chunk` prompt tokens.
  std::vector<int32_t> Reply(const std::vector<int32_t>& prompt, size_t count, size_t chunk,
                             int64_t limit) {
    kv::SequenceCache cache = *pool->Open();
    std::vector<int32_t> reply;
    for (size_t start = 0; start < prompt.size(); start += chunk) {
      const size_t size = std::min(chunk, prompt.size() - start);
      const auto token = Step(cache, std::span(prompt).subspan(start, size));
      EXPECT_TRUE(token.ok()) << token.status();
      if (start + size == prompt.size()) reply.push_back(*token);
    }
    while (reply.size() < count) {
      const int32_t last = reply.back();
      const auto token = Step(cache, {&last, 1}, limit, &reply);
      EXPECT_TRUE(token.ok()) << token.status();
      if (!token.ok()) break;
      reply.push_back(*token);
    }
    return reply;
  }

  SimulatedClock clock;
  std::unique_ptr<ScriptedForward> forward;
  std::unique_ptr<kv::CachePool> pool;
};

TEST(ScriptedForwardTest, RepliesAsPredictedWhateverTheChunksAndTokensPerStep) {
  ScriptedOptions options = SmallOptions();
  options.max_tokens_per_step = 4;
  Script script(options);
  for (const int64_t size : {1, 3, 4, 127, 128, 129, 300}) {
    const std::vector<int32_t> prompt = Prompt(size);
    const std::vector<int32_t> expected = ScriptedReply(options, prompt, 150);
    ASSERT_EQ(expected.size(), 150u);
    for (const size_t chunk : {1u, 5u, 128u, 1000u}) {
      for (const int64_t limit : {0, 1, 3}) {
        std::vector<int32_t> reply = script.Reply(prompt, 150, chunk, limit);
        ASSERT_GE(reply.size(), 150u);
        reply.resize(150);
        EXPECT_EQ(reply, expected)
            << size << " tokens in chunks of " << chunk << ", up to " << limit << " accepted";
      }
    }
  }
}

TEST(ScriptedForwardTest, TokensOfAStepAreOneToTheMaximum) {
  ScriptedOptions options = SmallOptions();
  options.max_tokens_per_step = 4;
  Script script(options);
  kv::SequenceCache cache = *script.pool->Open();
  int32_t last = *script.Step(cache, Prompt(9));
  std::map<size_t, int> counts;
  for (int i = 0; i < 100; ++i) {
    std::vector<int32_t> accepted;
    last = *script.Step(cache, {&last, 1}, 3, &accepted);
    ++counts[accepted.size() + 1];
  }
  EXPECT_EQ(counts.size(), 4u);
  for (const auto& [tokens, count] : counts) EXPECT_GT(count, 10) << tokens;
}

TEST(ScriptedForwardTest, TheNextTokenDependsOnTheWholePrefixAndTheSeed) {
  const std::vector<int32_t> prompt = Prompt(40);
  std::vector<int32_t> other = prompt;
  other[0] ^= 1;
  ScriptedOptions reseeded = SmallOptions();
  reseeded.seed = 8;
  const std::vector<int32_t> reply = ScriptedReply(SmallOptions(), prompt, 20);
  EXPECT_NE(reply, ScriptedReply(SmallOptions(), other, 20));
  EXPECT_NE(reply, ScriptedReply(reseeded, prompt, 20));
  EXPECT_NE(ScriptedFingerprint(SmallOptions()), ScriptedFingerprint(reseeded));
}

TEST(ScriptedForwardTest, EndsByChanceOrAtTheLimitOfPositions) {
  ScriptedOptions options = SmallOptions();
  const auto ends = [&options](int32_t token) { return token == options.end_token_id; };
  const std::vector<int32_t> endless = ScriptedReply(options, Prompt(48), 5000);
  EXPECT_EQ(endless.size(), 2000u);
  EXPECT_EQ(std::ranges::count_if(endless, ends), 0);
  options.end_probability = 0.1;
  size_t total = 0;
  for (int32_t first = 0; first < 64; ++first) {
    const std::vector<int32_t> reply = ScriptedReply(options, Prompt(20, first), 5000);
    EXPECT_TRUE(ends(reply.back()));
    EXPECT_EQ(std::ranges::count_if(reply, ends), 1);
    total += reply.size();
  }
  EXPECT_GT(total, 64u * 6);
  EXPECT_LT(total, 64u * 15);
}

// Cached by one sequence and decoded by another one, as after a transfer.
TEST(ScriptedForwardTest, PagesAndStateCarryTheSequence) {
  Script writer;
  Script reader;
  const std::vector<int32_t> prompt = Prompt(333);
  kv::SequenceCache from = *writer.pool->Open();
  int32_t last = *writer.Step(from, prompt);
  kv::SequenceCache to = *reader.pool->Open();
  ASSERT_TRUE(to.Reserve(340).ok());
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    const auto kind = static_cast<kernels::CacheKindIndex>(k);
    for (size_t page = 0; page < from.pages(kind).size(); ++page) {
      std::memcpy(reader.pool->pages(kind).address(to.pages(kind)[page]),
                  writer.pool->pages(kind).address(from.pages(kind)[page]),
                  static_cast<size_t>(writer.pool->pages(kind).page_bytes()));
    }
  }
  std::memcpy(reader.pool->slots().address(to.slot()), writer.pool->slots().address(from.slot()),
              static_cast<size_t>(writer.pool->slots().page_bytes()));
  ASSERT_TRUE(to.SetNumTokens(333).ok());
  std::vector<int32_t> reply = {last};
  while (reply.size() < 5) {
    last = reply.back();
    const auto token = reader.Step(to, {&last, 1});
    ASSERT_TRUE(token.ok()) << token.status();
    reply.push_back(*token);
  }
  EXPECT_EQ(reply, ScriptedReply(SmallOptions(), prompt, 5));
}

TEST(ScriptedForwardTest, FindsAnyFlippedByteOfAShortSequence) {
  Script script;
  kv::SequenceCache cache = *script.pool->Open();
  int32_t last = *script.Step(cache, Prompt(256));
  int found = 0;
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    const auto kind = static_cast<kernels::CacheKindIndex>(k);
    kv::PagePool& pages = script.pool->pages(kind);
    const std::vector<int32_t> held(cache.pages(kind).begin(), cache.pages(kind).begin() + 2);
    for (const int32_t page : held) {
      for (int64_t at = 0; at < pages.page_bytes(); at += 97) {
        pages.address(page)[at] ^= std::byte{16};
        const absl::Status status = script.Step(cache, {&last, 1}).status();
        EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << kind << " byte " << at;
        EXPECT_THAT(std::string(status.message()), HasSubstr("expected"));
        EXPECT_THAT(std::string(status.message()), HasSubstr("at position"));
        pages.address(page)[at] ^= std::byte{16};
        ++found;
      }
    }
  }
  EXPECT_GT(found, 100);
  EXPECT_TRUE(script.Step(cache, {&last, 1}).ok());  // Nothing had advanced.
}

TEST(ScriptedForwardTest, FindsAStateOfAnotherSequenceOrAge) {
  Script script;
  kv::SequenceCache a = *script.pool->Open();
  kv::SequenceCache b = *script.pool->Open();
  int32_t last = *script.Step(a, Prompt(200));
  ASSERT_TRUE(script.Step(b, Prompt(200, 6)).ok());
  kv::PagePool& slots = script.pool->slots();
  const auto bytes = static_cast<size_t>(slots.page_bytes());
  const std::vector<std::byte> own(slots.address(a.slot()), slots.address(a.slot()) + bytes);
  std::memcpy(slots.address(a.slot()), slots.address(b.slot()), bytes);
  EXPECT_EQ(script.Step(a, {&last, 1}).status().code(), absl::StatusCode::kDataLoss);
  std::memset(slots.address(a.slot()), 0, bytes);
  EXPECT_EQ(script.Step(a, {&last, 1}).status().code(), absl::StatusCode::kDataLoss);
  std::memcpy(slots.address(a.slot()), own.data(), bytes);
  last = *script.Step(a, {&last, 1});
  std::memcpy(slots.address(a.slot()), own.data(), bytes);  // One step too old.
  const absl::Status status = script.Step(a, {&last, 1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("number of tokens in state"));
}

// Whoever moves a sequence by the rows that a model reads has moved all of it; a row too few shows.
TEST(ScriptedForwardTest, ReadsTheRowsThatAModelReadsAndNoOthers) {
  Script script;
  const kernels::KvLayout& layout = script.forward->layout();
  for (const int64_t size : {1, 3, 4, 5, 127, 128, 129, 255, 256, 301}) {
    kv::SequenceCache cache = *script.pool->Open();
    int32_t last = *script.Step(cache, Prompt(size));
    std::byte* const state = script.pool->slots().address(cache.slot());
    const std::vector<std::byte> whole(state, state + layout.state_slot_bytes);
    std::fill_n(state, layout.state_slot_bytes, std::byte{0xcd});
    std::vector<std::pair<int64_t, int64_t>> rows;  // Offset and bytes.
    for (int k = kernels::kNumPagedKinds; k < kernels::kNumCacheKinds; ++k) {
      const auto kind = static_cast<kernels::CacheKindIndex>(k);
      const kernels::EntryPlane plane = layout.Plane(kind, layout.kinds[kind].layers[0]);
      const int64_t oldest = kernels::OldestStateRow(layout, kind, size);
      for (int64_t position = oldest; position < size; ++position) {
        rows.emplace_back(plane.data_offset + position % plane.entries * plane.data_bytes,
                          plane.data_bytes);
      }
    }
    const auto restore = [&](size_t row) {
      std::copy_n(whole.begin() + rows[row].first, rows[row].second, state + rows[row].first);
    };
    for (size_t row = 0; row < rows.size(); ++row) restore(row);
    for (size_t row = 0; row < rows.size(); ++row) {
      state[rows[row].first + 8] ^= std::byte{1};
      EXPECT_FALSE(script.Step(cache, {&last, 1}).ok()) << size << " tokens, row " << row;
      restore(row);
    }
    EXPECT_TRUE(script.Step(cache, {&last, 1}).ok()) << size;
  }
}

TEST(ScriptedForwardTest, AStepTakesItsTime) {
  ScriptedOptions options = SmallOptions();
  options.step_time = absl::Milliseconds(10);
  options.prefill_token_time = absl::Milliseconds(1);
  Script script(options);
  const absl::Time start = script.clock.Now();
  kv::SequenceCache cache = *script.pool->Open();
  int32_t last = *script.Step(cache, Prompt(21));
  EXPECT_EQ(script.clock.Now() - start, absl::Milliseconds(30));
  ASSERT_TRUE(script.Step(cache, {&last, 1}).ok());
  EXPECT_EQ(script.clock.Now() - start, absl::Milliseconds(40));
}

TEST(ScriptedForwardTest, RefusesBadOptionsByName) {
  SimulatedClock clock;
  const auto refusal = [&clock](void (*spoil)(ScriptedOptions&)) {
    ScriptedOptions options;
    spoil(options);
    return std::string(ScriptedForward::Create(options, clock).status().message());
  };
  EXPECT_THAT(refusal([](ScriptedOptions& o) { o.vocab_size = 3; }), HasSubstr("vocab_size: is 3"));
  EXPECT_THAT(refusal([](ScriptedOptions& o) { o.end_token_id = 512; }),
              HasSubstr("end_token_id: is 512"));
  EXPECT_THAT(refusal([](ScriptedOptions& o) { o.max_tokens_per_step = 5; }),
              HasSubstr("max_tokens_per_step: is 5"));
  EXPECT_THAT(refusal([](ScriptedOptions& o) { o.end_probability = 1.5; }),
              HasSubstr("end_probability: is 1.5"));
  EXPECT_THAT(refusal([](ScriptedOptions& o) { o.max_positions = 1; }),
              HasSubstr("max_positions: is 1"));
  EXPECT_THAT(refusal([](ScriptedOptions& o) { o.page_tokens = 100; }), HasSubstr("100"));
}

}  // namespace
}  // namespace isthmus::model
