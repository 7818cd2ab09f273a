// SPDX-License-Identifier: Apache-2.0
// A sequence's logits do not depend, bit by bit, on anything but its tokens: not on who shares its
// steps, how its prompt is cut, where its pages lie, which prefixes were known, whether it was
// preempted, moved to another engine as a prefill worker moves it, or saved and restored. All of
// that by chance at once; the seed is printed, and ISTHMUS_SEED chooses another one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"
#include "services/engine/engine.h"
#include "services/engine/preemption.h"
#include "services/engine/prefix_reuse.h"
#include "services/engine/sequence_image.h"
#include "services/kv/page_copy.h"
#include "services/kv/sequence_cache.h"
#include "tests/fidelity/models.h"

namespace isthmus::fidelity {
namespace {

using engine::Sequence;
using kernels::Arithmetic;

constexpr int64_t kVocabulary = 512;
constexpr int kRounds = 8;

uint64_t Seed() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing in a test writes the environment.
  const char* seed = std::getenv("ISTHMUS_SEED");
  return seed == nullptr ? 20240611 : std::strtoull(seed, nullptr, 10);
}

struct Prompt {
  std::vector<int32_t> tokens;
  engine::SamplingParams sampling;
};

// An engine with pools of its own over the forward pass of another one.
struct Worker {
  Worker(diag::LocalEngine& local, int64_t cache_tokens, const kv::PrefixOptions& prefixes,
         const engine::EngineOptions& options)
      : pool(*kv::CachePool::Create(local.forward().layout(), cache_tokens, 6,
                                    local.pool().device(), prefixes)),
        engine(&local.forward(), pool.get(), options, local.exec()) {}

  std::unique_ptr<kv::CachePool> pool;
  engine::Engine engine;
};

class EngineInvarianceTest : public testing::TestWithParam<std::tuple<Arithmetic, std::string>> {
 protected:
  void SetUp() override {
    const std::string& device = std::get<1>(GetParam());
    ISTHMUS_REQUIRE_PLACE(device);
    const uint64_t seed = Seed();
    std::cout << "seed " << seed << "\n";
    random_.seed(seed);
    auto local = OpenEngine({.checkpoint = BundledPath("tiny-random-3layer/nvfp4-cast"),
                             .arithmetic = std::get<0>(GetParam()),
                             .threads = 2,
                             .device = device,
                             .batch_invariant = true});
    ASSERT_TRUE(local.ok()) << local.status();
    local_ = *std::move(local);
  }

  int64_t Below(int64_t bound) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(bound));
  }

  // Some of them begin with what others begin with, or say it all.
  std::vector<Prompt> MakePrompts() {
    std::vector<Prompt> prompts;
    const std::vector<int32_t> system = SeededIds(random_(), 150, kVocabulary);
    for (int i = 0; i < 7; ++i) {
      Prompt prompt;
      const int64_t own = 1 + Below(i % 3 == 0 ? 290 : 130);
      prompt.tokens = SeededIds(random_(), own, kVocabulary);
      if (i % 2 == 0) {
        prompt.tokens.insert(prompt.tokens.begin(), system.begin(),
                             system.begin() + 100 + Below(50));
      }
      prompt.sampling.temperature = i % 3 == 1 ? 0.0f : 1.0f;
      prompt.sampling.seed = random_();
      prompt.sampling.max_tokens = 3 + Below(12);
      prompt.sampling.ignores_end_token = true;
      prompt.sampling.wants_logits_digests = true;
      if (i % 4 == 3) prompt.sampling.frequency_penalty = 0.5f;
      prompts.push_back(std::move(prompt));
    }
    prompts.push_back(prompts[0]);  // The same request again.
    return prompts;
  }

  // Alone, the prompt in one step, in fresh pages.
  Sequence Alone(const Prompt& prompt) {
    Worker worker(*local_, 1024, {}, {.chunk_tokens = 1024});
    Sequence sequence = *worker.engine.Admit("alone", prompt.tokens, prompt.sampling);
    Sequence* const one = &sequence;
    while (!sequence.is_finished()) EXPECT_TRUE(worker.engine.Step({&one, 1}).ok());
    sequence.cache = kv::SequenceCache();
    return sequence;
  }

  // Takes pages by chance, some for good, the others back in another order.
  void Shuffle(kv::CachePool& pool) {
    for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
      kv::PagePool& pages = pool.pages(static_cast<kernels::CacheKindIndex>(k));
      std::vector<int32_t> taken = *pages.Take(pages.num_free());
      std::shuffle(taken.begin(), taken.end(), random_);
      for (const int32_t page : taken) pages.Release(page);
    }
  }

  Worker MakeWorker() {
    kv::PrefixOptions prefixes;
    if (Below(3) > 0) prefixes.num_snapshots = static_cast<int32_t>(2 + Below(8));
    if (Below(2) == 0) prefixes.host_bytes = int64_t{64} << 20;
    engine::EngineOptions options;
    options.chunk_tokens = 1 + Below(Below(2) == 0 ? 20 : 200);
    options.max_batch_tokens = 1 + Below(400);
    // Room for all with little to spare, so that prefixes are evicted.
    Worker worker(*local_, 4096 + 512 * Below(3), prefixes, options);
    Shuffle(*worker.pool);
    return worker;
  }

  // As a transfer: what the other side has already is shared, the rest of the pages and the slot
  // are copied as they are.
  absl::StatusOr<Sequence> Move(const Sequence& from, Worker& source, Worker& target) {
    Sequence to;
    to.request_id = from.request_id;
    // What the transfer brings the state of; nothing behind it may be shared.
    to.tokens.assign(from.tokens.begin(), from.tokens.begin() + from.cache.num_tokens());
    to.num_prompt_tokens = from.num_prompt_tokens;
    to.sampling = from.sampling;
    to.num_draws = from.num_draws;
    to.logits_crc32c = from.logits_crc32c;
    const auto size = static_cast<int64_t>(from.tokens.size());
    kv::PrefixHit found = engine::FindPages(*target.pool, to);
    const int64_t held = found.num_tokens;
    ISTHMUS_RETURN_IF_ERROR(engine::OpenWithPages(*target.pool, size + 1, std::move(found), to));
    for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
      const auto kind = static_cast<kernels::CacheKindIndex>(k);
      const kernels::KvLayout& layout = source.pool->layout();
      const auto first = static_cast<size_t>(held / layout.geometry.page_tokens);
      const auto count = static_cast<size_t>(layout.PagesFor(kind, from.cache.num_tokens()));
      for (size_t page = first; page < count; ++page) {
        ISTHMUS_RETURN_IF_ERROR(kv::CopyBytes(
            source.pool->pages(kind), from.cache.pages(kind)[page], target.pool->pages(kind),
            to.cache.pages(kind)[page], source.pool->pages(kind).page_bytes()));
      }
    }
    ISTHMUS_RETURN_IF_ERROR(kv::CopyBytes(source.pool->slots(), from.cache.slot(),
                                          target.pool->slots(), to.cache.slot(),
                                          source.pool->slots().page_bytes()));
    to.tokens = from.tokens;
    ISTHMUS_RETURN_IF_ERROR(to.cache.SetNumTokens(from.cache.num_tokens()));
    engine::PublishPrefix(*target.pool, to);
    return to;
  }

  struct Running {
    size_t prompt = 0;
    size_t worker = 0;
    Sequence sequence;
  };

  // One of the things that must not show, or nothing.
  absl::Status Disturb(Running& running, std::vector<Worker>& workers) {
    Worker& here = workers[running.worker];
    Worker& there = workers[1 - running.worker];
    Sequence& sequence = running.sequence;
    switch (Below(12)) {
      case 0: {
        engine::Preempt(sequence);
        ++num_preempted_;
        return engine::Resume(here.engine, sequence);
      }
      case 1: {
        engine::ImageTerms terms;
        terms.salt = sequence.cache_salt;
        ISTHMUS_ASSIGN_OR_RETURN(const std::vector<std::byte> image,
                                 WriteSequenceImage(sequence, *here.pool, terms));
        ISTHMUS_ASSIGN_OR_RETURN(sequence, RestoreSequence(image, there.engine, terms));
        running.worker = 1 - running.worker;
        ++num_restored_;
        return absl::OkStatus();
      }
      case 2: {
        if (sequence.num_output_tokens() == 0) return absl::OkStatus();
        ISTHMUS_ASSIGN_OR_RETURN(sequence, Move(sequence, here, there));
        running.worker = 1 - running.worker;
        ++num_moved_;
        return absl::OkStatus();
      }
      default:
        return absl::OkStatus();
    }
  }

  void ExpectEqual(const Running& running, const std::vector<Sequence>& alone, int round) {
    const Sequence& want = alone[running.prompt];
    ASSERT_EQ(running.sequence.tokens, want.tokens)
        << "seed " << Seed() << " round " << round << " prompt " << running.prompt;
    ASSERT_EQ(running.sequence.logits_crc32c, want.logits_crc32c)
        << "seed " << Seed() << " round " << round << " prompt " << running.prompt;
  }

  void RunRound(const std::vector<Prompt>& prompts, const std::vector<Sequence>& alone, int round) {
    std::vector<Worker> workers;
    workers.push_back(MakeWorker());
    workers.push_back(MakeWorker());
    std::vector<size_t> waiting;
    for (size_t p = 0; p < prompts.size(); ++p) waiting.push_back(p);
    std::shuffle(waiting.begin(), waiting.end(), random_);
    std::vector<std::unique_ptr<Running>> all;
    while (!waiting.empty() || !all.empty()) {
      if (!waiting.empty() && all.size() < 5 && (all.empty() || Below(3) == 0)) {
        auto running = std::make_unique<Running>();
        running->prompt = waiting.back();
        running->worker = static_cast<size_t>(Below(2));
        waiting.pop_back();
        const Prompt& prompt = prompts[running->prompt];
        auto admitted = workers[running->worker].engine.Admit("r", prompt.tokens, prompt.sampling);
        ASSERT_TRUE(admitted.ok()) << admitted.status();
        running->sequence = *std::move(admitted);
        num_reused_ += running->sequence.num_reused_tokens;
        all.push_back(std::move(running));
      }
      for (const auto& running : all) {
        const absl::Status status = Disturb(*running, workers);
        ASSERT_TRUE(status.ok()) << "seed " << Seed() << ": " << status;
      }
      for (size_t w = 0; w < workers.size(); ++w) {
        std::vector<Sequence*> batch;
        for (const auto& running : all) {
          if (running->worker == w && Below(4) > 0) batch.push_back(&running->sequence);
        }
        if (batch.empty()) continue;
        const absl::Status status = workers[w].engine.Step(batch);
        ASSERT_TRUE(status.ok()) << "seed " << Seed() << ": " << status;
      }
      for (const auto& running : all) {
        if (running->sequence.is_finished()) ExpectEqual(*running, alone, round);
        if (HasFatalFailure()) return;
      }
      std::erase_if(all, [](const auto& running) { return running->sequence.is_finished(); });
    }
    for (const Worker& worker : workers) worker.pool->CheckConservation();
  }

  std::mt19937_64 random_;
  std::unique_ptr<diag::LocalEngine> local_;
  int64_t num_reused_ = 0;
  int num_preempted_ = 0;
  int num_restored_ = 0;
  int num_moved_ = 0;
};

TEST_P(EngineInvarianceTest, ASequenceDependsOnItsTokensAlone) {
  const std::vector<Prompt> prompts = MakePrompts();
  std::vector<Sequence> alone;
  for (const Prompt& prompt : prompts) alone.push_back(Alone(prompt));
  for (int round = 0; round < kRounds; ++round) {
    RunRound(prompts, alone, round);
    if (HasFatalFailure()) return;
  }
  std::cout << num_reused_ << " tokens reused, " << num_preempted_ << " preempted, "
            << num_restored_ << " restored, " << num_moved_ << " moved\n";
  EXPECT_GT(num_reused_, 0);
  EXPECT_GT(num_preempted_, 0);
  EXPECT_GT(num_restored_, 0);
  EXPECT_GT(num_moved_, 0);
}

INSTANTIATE_TEST_SUITE_P(BothArithmetics, EngineInvarianceTest,
                         testing::Combine(testing::Values(Arithmetic::kMath,
                                                          Arithmetic::kReference),
                                          testing::Values("cpu", "cuda:0")),
                         [](const auto& choice) {
                           const bool is_math = std::get<0>(choice.param) == Arithmetic::kMath;
                           return absl::StrCat(is_math ? "math" : "reference",
                                               std::get<1>(choice.param) == "cpu" ? "" : "OnAGpu");
                         });

}  // namespace
}  // namespace isthmus::fidelity
