// SPDX-License-Identifier: Apache-2.0
// The bits of every intermediate do not depend on how the work is cut: into chunks, into prefill
// and decode, into batches, over threads, over SIMD targets; nor on who used a state slot before.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/testing/simd_targets.h"
#include "services/base/status_macros.h"
#include "services/kv/sequence_cache.h"
#include "tests/fidelity/models.h"

namespace isthmus::fidelity {
namespace {

using kernels::Arithmetic;

constexpr int64_t kVocabulary = 512;
// Past two windows, two ratio-128 entries and 64 ratio-4 entries, and no multiple of anything.
constexpr int64_t kTokens = 263;

EngineChoice ThreeLayers(Arithmetic arithmetic) {
  return {.checkpoint = BundledPath("tiny-random-3layer/nvfp4-cast"), .arithmetic = arithmetic};
}

std::string ArithmeticName(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kMath ? "math" : "reference";
}

// `part` must be the last bytes of the same tensor in `whole`, for every tensor of `part`.
testing::AssertionResult EndsEqually(const diag::Dump& whole, const diag::Dump& part) {
  if (part.find("logits") == part.end()) return testing::AssertionFailure() << "no logits";
  for (const auto& [name, tensor] : part) {
    if (name == "input_ids") continue;
    const auto it = whole.find(name);
    if (it == whole.end()) return testing::AssertionFailure() << name << " is only in one dump";
    const std::vector<std::byte>& all = it->second.bytes;
    const std::vector<std::byte>& last = tensor.bytes;
    if (last.size() > all.size() || !std::equal(last.rbegin(), last.rend(), all.rbegin())) {
      return testing::AssertionFailure() << name << " differs";
    }
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult Equal(const diag::Dump& a, const diag::Dump& b) {
  if (a.size() != b.size()) return testing::AssertionFailure() << "other tensors";
  for (const auto& [name, tensor] : a) {
    const auto it = b.find(name);
    if (it == b.end() || it->second.bytes != tensor.bytes) {
      return testing::AssertionFailure() << name << " differs";
    }
  }
  return testing::AssertionSuccess();
}

class CutTest : public testing::TestWithParam<Arithmetic> {
 protected:
  // Every intermediate of kTokens tokens in one step.
  const diag::Dump& Whole() {
    static diag::Dump dumps[2];
    diag::Dump& dump = dumps[GetParam() == Arithmetic::kMath ? 0 : 1];
    if (dump.empty()) {
      auto made = DumpOf(ThreeLayers(GetParam()), ids_, {});
      EXPECT_TRUE(made.ok()) << made.status();
      if (made.ok()) dump = *std::move(made);
    }
    return dump;
  }

  const std::vector<int32_t> ids_ = SeededIds(11, kTokens, kVocabulary);
};

TEST_P(CutTest, ChunksGiveTheBitsOfOneStep) {
  for (const int64_t chunk : {1, 3, 4, 5, 127, 128, 129}) {
    const auto dump = DumpOf(ThreeLayers(GetParam()), ids_, {.chunk_tokens = chunk});
    ASSERT_TRUE(dump.ok()) << dump.status();
    EXPECT_TRUE(Equal(Whole(), *dump)) << "chunk " << chunk;
  }
}

// Every remainder modulo 4, and both sides of the ratio-128 entries and of the window's turn.
TEST_P(CutTest, DecodeGivesTheBitsOfPrefill) {
  for (const int64_t prefill :
       {1, 2, 3, 4, 5, 6, 7, 126, 127, 128, 129, 130, 131, 254, 255, 256, 257, 258, 259}) {
    // No more decode steps than reach past the next entries of both ratios.
    const int64_t total = std::min(kTokens, prefill + 9);
    const std::vector<int32_t> ids(ids_.begin(), ids_.begin() + total);
    const auto whole = DumpOf(ThreeLayers(GetParam()), ids, {});
    const auto dump = DumpOf(ThreeLayers(GetParam()), ids, {.decode_tokens = total - prefill});
    ASSERT_TRUE(whole.ok()) << whole.status();
    ASSERT_TRUE(dump.ok()) << dump.status();
    EXPECT_TRUE(EndsEqually(*whole, *dump)) << "prefill " << prefill;
  }
}

TEST_P(CutTest, TwoThreadsGiveTheBitsOfOne) {
  EngineChoice two = ThreeLayers(GetParam());
  two.threads = 2;
  const auto dump = DumpOf(two, ids_, {});
  ASSERT_TRUE(dump.ok()) << dump.status();
  EXPECT_TRUE(Equal(Whole(), *dump));
}

INSTANTIATE_TEST_SUITE_P(BothArithmetics, CutTest,
                         testing::Values(Arithmetic::kMath, Arithmetic::kReference),
                         [](const auto& choice) { return ArithmeticName(choice.param); });

// ---- SIMD targets

class FidelityTargetTest : public kernels::testing::SimdTargetTest {};

TEST_P(FidelityTargetTest, GivesTheBitsOfTheBestTarget) {
  const std::vector<int32_t> ids = SeededIds(12, 140, kVocabulary);
  for (const Arithmetic arithmetic : {Arithmetic::kMath, Arithmetic::kReference}) {
    kernels::testing::ForceTarget(GetParam());
    const auto forced = DumpOf(ThreeLayers(arithmetic), ids, {.decode_tokens = 3});
    kernels::testing::ForceTarget(0);
    const auto best = DumpOf(ThreeLayers(arithmetic), ids, {.decode_tokens = 3});
    ASSERT_TRUE(forced.ok()) << forced.status();
    ASSERT_TRUE(best.ok()) << best.status();
    EXPECT_TRUE(Equal(*forced, *best)) << ArithmeticName(arithmetic);
  }
}

ISTHMUS_INSTANTIATE_SIMD_TARGETS(FidelityTargetTest);

// ---- Batches and slots, at Forward

// One sequence and how far it is.
struct Member {
  std::vector<int32_t> ids;
  kv::SequenceCache cache;
};

absl::StatusOr<Member> Open(diag::LocalEngine& local, std::vector<int32_t> ids) {
  Member member;
  member.ids = std::move(ids);
  ISTHMUS_ASSIGN_OR_RETURN(member.cache, local.pool().Open());
  ISTHMUS_RETURN_IF_ERROR(member.cache.Reserve(static_cast<int64_t>(member.ids.size())));
  return member;
}

// Feeds the next `sizes[i]` tokens of every member in one pass; the logits of all rows, by member.
absl::StatusOr<std::vector<std::vector<float>>> Feed(diag::LocalEngine& local,
                                                     const std::vector<Member*>& members,
                                                     const std::vector<int64_t>& sizes) {
  std::vector<int32_t> tokens;
  std::vector<kernels::SequenceKv> views;
  for (size_t i = 0; i < members.size(); ++i) {
    const auto start = members[i]->ids.begin() + members[i]->cache.num_tokens();
    views.push_back(members[i]->cache.View(static_cast<int64_t>(tokens.size()), sizes[i]));
    tokens.insert(tokens.end(), start, start + sizes[i]);
  }
  const auto rows = static_cast<int64_t>(tokens.size());
  const int64_t vocabulary = local.forward().vocab_size();
  std::vector<int64_t> logit_rows;
  for (int64_t row = 0; row < rows; ++row) logit_rows.push_back(row);
  std::vector<float> logits(static_cast<size_t>(rows * vocabulary));
  ISTHMUS_RETURN_IF_ERROR(
      local.forward().Run({.tokens = tokens,
                           .sequences = views,
                           .logit_rows = logit_rows,
                           .logits = kernels::F32Matrix(logits.data(), rows, vocabulary)},
                          local.exec()));
  std::vector<std::vector<float>> out;
  auto at = logits.begin();
  for (size_t i = 0; i < members.size(); ++i) {
    ISTHMUS_RETURN_IF_ERROR(
        members[i]->cache.SetNumTokens(members[i]->cache.num_tokens() + sizes[i]));
    out.emplace_back(at, at + sizes[i] * vocabulary);
    at += sizes[i] * vocabulary;
  }
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class BatchTest : public testing::TestWithParam<Arithmetic> {};

// Eight sequences in mixed states: some in the middle of a prompt, some decoding one token.
TEST_P(BatchTest, AloneGivesTheBitsOfABatchOfEight) {
  const auto local = OpenEngine(ThreeLayers(GetParam()));
  ASSERT_TRUE(local.ok()) << local.status();
  const std::vector<int64_t> first = {130, 1, 3, 64, 127, 5, 128, 31};
  const std::vector<int64_t> second = {1, 129, 1, 64, 1, 4, 1, 2};
  const auto ids_of = [&](size_t i) {
    return SeededIds(100 + i, first[i] + second[i], kVocabulary);
  };
  std::vector<std::vector<std::vector<float>>> alone;
  for (size_t i = 0; i < first.size(); ++i) {
    auto member = Open(**local, ids_of(i));
    ASSERT_TRUE(member.ok()) << member.status();
    auto a = Feed(**local, {&*member}, {first[i]});
    auto b = Feed(**local, {&*member}, {second[i]});
    ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
    alone.push_back({(*a)[0], (*b)[0]});
  }
  std::vector<Member> members;
  for (size_t i = 0; i < first.size(); ++i) {
    auto member = Open(**local, ids_of(i));
    ASSERT_TRUE(member.ok()) << member.status();
    members.push_back(*std::move(member));
  }
  std::vector<Member*> all;
  for (Member& member : members) all.push_back(&member);
  const auto a = Feed(**local, all, first);
  const auto b = Feed(**local, all, second);
  ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(SameBits(alone[i][0], (*a)[i])) << "first tokens of sequence " << i;
    EXPECT_TRUE(SameBits(alone[i][1], (*b)[i])) << "later tokens of sequence " << i;
  }
  (*local)->pool().CheckConservation();
}

TEST_P(BatchTest, AReusedSlotGivesTheBitsOfAFreshOne) {
  const std::vector<int32_t> ids = SeededIds(21, 141, kVocabulary);
  const auto fresh = OpenEngine(ThreeLayers(GetParam()));
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  auto first = Open(**fresh, ids);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto want = Feed(**fresh, {&*first}, {141});
  ASSERT_TRUE(want.ok()) << want.status();

  const auto used = OpenEngine(ThreeLayers(GetParam()));
  ASSERT_TRUE(used.ok()) << used.status();
  int32_t slot = -1;
  {
    auto before = Open(**used, SeededIds(22, kTokens, kVocabulary));
    ASSERT_TRUE(before.ok()) << before.status();
    ASSERT_TRUE(Feed(**used, {&*before}, {kTokens}).ok());
    slot = before->cache.slot();
  }
  auto second = Open(**used, ids);
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_EQ(second->cache.slot(), slot) << "the slot was not reused, so nothing is tested";
  const auto got = Feed(**used, {&*second}, {141});
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(SameBits((*want)[0], (*got)[0]));

  // The same object after Reset.
  second->cache.Reset();
  ASSERT_TRUE(second->cache.Reserve(141).ok());
  const auto again = Feed(**used, {&*second}, {141});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(SameBits((*want)[0], (*again)[0]));
}

INSTANTIATE_TEST_SUITE_P(BothArithmetics, BatchTest,
                         testing::Values(Arithmetic::kMath, Arithmetic::kReference),
                         [](const auto& choice) { return ArithmeticName(choice.param); });

}  // namespace
}  // namespace isthmus::fidelity
