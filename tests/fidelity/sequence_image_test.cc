// SPDX-License-Identifier: Apache-2.0
// A sequence that was saved goes on elsewhere as if nothing had happened: the same logits bit by
// bit and the same tokens, whatever its length was, in other pages, in another engine or process.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "services/base/status_macros.h"
#include "services/engine/image_file.h"
#include "services/engine/sequence_image.h"
#include "tests/fidelity/models.h"

namespace isthmus::fidelity {
namespace {

using engine::Sequence;
using kernels::Arithmetic;

constexpr int64_t kVocabulary = 512;

engine::ImageTerms TermsOf(diag::LocalEngine& local) {
  engine::ImageTerms terms;
  terms.weight_fingerprint = local.weights().fingerprint();
  return terms;
}

absl::StatusOr<Sequence> Admit(diag::LocalEngine& local, std::vector<int32_t> prompt,
                               int64_t max_tokens) {
  engine::SamplingParams sampling;
  sampling.temperature = 1.0f;
  sampling.top_p = 0.9f;
  sampling.seed = 9;
  sampling.max_tokens = max_tokens;
  sampling.ignores_end_token = true;
  sampling.wants_logits_digests = true;
  return local.engine().Admit("saved", std::move(prompt), sampling);
}

absl::Status Step(diag::LocalEngine& local, Sequence& sequence) {
  Sequence* const one = &sequence;
  return local.engine().Step({&one, 1});
}

// Takes pages and slots so that the next ones come in another order, and not from the start.
void ShufflePages(kv::CachePool& pool) {
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    kv::PagePool& pages = pool.pages(static_cast<kernels::CacheKindIndex>(k));
    const auto taken = pages.Take(std::min(pages.num_free(), 5 + k));
    ASSERT_TRUE(taken.ok()) << taken.status();
    for (size_t i = 0; i < taken->size(); i += 2) pages.Release((*taken)[i]);
  }
  ASSERT_TRUE(pool.slots().Take(2).ok());
}

template <typename T>
bool StartsWith(const std::vector<T>& whole, const std::vector<T>& start) {
  return start.size() <= whole.size() && std::equal(start.begin(), start.end(), whole.begin());
}

class SavedSequenceTest : public testing::TestWithParam<std::tuple<Arithmetic, std::string>> {
 protected:
  void SetUp() override {
    const std::string& device = std::get<1>(GetParam());
    ISTHMUS_REQUIRE_PLACE(device);
    const EngineChoice choice = {.checkpoint = BundledPath("tiny-random-3layer/nvfp4-cast"),
                                 .arithmetic = std::get<0>(GetParam()),
                                 .device = device,
                                 .batch_invariant = true};
    auto from = OpenEngine(choice);
    auto to = OpenEngine(choice);
    ASSERT_TRUE(from.ok() && to.ok()) << from.status() << to.status();
    from_ = *std::move(from);
    to_ = *std::move(to);
    ShufflePages(to_->pool());
  }

  // What `sequence` is after `steps` more steps in the other engine.
  absl::StatusOr<Sequence> ContinueElsewhere(const Sequence& sequence, int steps) {
    ISTHMUS_ASSIGN_OR_RETURN(const std::vector<std::byte> image,
                             WriteSequenceImage(sequence, from_->pool(), TermsOf(*from_)));
    ISTHMUS_ASSIGN_OR_RETURN(Sequence restored,
                             RestoreSequence(image, to_->engine(), TermsOf(*to_)));
    ISTHMUS_ASSIGN_OR_RETURN(const std::vector<std::byte> again,
                             WriteSequenceImage(restored, to_->pool(), TermsOf(*to_)));
    if (again != image) return absl::InternalError("the image of the restored sequence differs");
    for (int step = 0; step < steps && !restored.is_finished(); ++step) {
      ISTHMUS_RETURN_IF_ERROR(Step(*to_, restored));
    }
    return restored;
  }

  std::unique_ptr<diag::LocalEngine> from_;
  std::unique_ptr<diag::LocalEngine> to_;
};

// Lengths 3 to 270: every residue modulo 4 and modulo 128, twice and more.
TEST_P(SavedSequenceTest, GoesOnEqualAtEveryResidue) {
  auto whole = Admit(*from_, SeededIds(5, 3, kVocabulary), 268);
  ASSERT_TRUE(whole.ok()) << whole.status();
  std::vector<Sequence> continued;
  while (!whole->is_finished()) {
    auto sequence = ContinueElsewhere(*whole, 2);
    ASSERT_TRUE(sequence.ok()) << whole->tokens.size() << " tokens: " << sequence.status();
    sequence->cache = kv::SequenceCache();  // Gives its pages back.
    continued.push_back(*std::move(sequence));
    const absl::Status status = Step(*from_, *whole);
    ASSERT_TRUE(status.ok()) << status;
  }
  ASSERT_EQ(continued.size(), 268u);
  for (const Sequence& sequence : continued) {
    EXPECT_TRUE(StartsWith(whole->tokens, sequence.tokens)) << sequence.tokens.size() << " tokens";
    EXPECT_TRUE(StartsWith(whole->logits_crc32c, sequence.logits_crc32c))
        << sequence.tokens.size() << " tokens";
  }
}

// Between chunks of a prompt, of no multiple of anything.
TEST_P(SavedSequenceTest, GoesOnEqualInsideAPrompt) {
  const std::vector<int32_t> prompt = SeededIds(6, 333, kVocabulary);
  auto whole = Admit(*from_, prompt, 3);
  ASSERT_TRUE(whole.ok()) << whole.status();
  while (!whole->is_finished()) ASSERT_TRUE(Step(*from_, *whole).ok());
  for (const int64_t cached : {1, 4, 127, 128, 129, 255, 256, 258, 331, 332}) {
    const std::vector<int32_t> start(prompt.begin(), prompt.begin() + cached);
    auto part = Admit(*from_, start, 3);
    ASSERT_TRUE(part.ok()) << part.status();
    ASSERT_TRUE(Step(*from_, *part).ok());
    // As the longer prompt's sequence stands between two of its steps.
    part->tokens = prompt;
    part->num_prompt_tokens = 333;
    part->num_draws = 0;
    part->logits_crc32c.clear();
    const auto sequence = ContinueElsewhere(*part, 1000);
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    EXPECT_EQ(sequence->tokens, whole->tokens) << cached;
    EXPECT_EQ(sequence->logits_crc32c, whole->logits_crc32c) << cached;
  }
}

INSTANTIATE_TEST_SUITE_P(BothArithmetics, SavedSequenceTest,
                         testing::Combine(testing::Values(Arithmetic::kMath,
                                                          Arithmetic::kReference),
                                          testing::Values("cpu", "cuda:0")),
                         [](const auto& choice) {
                           const bool is_math = std::get<0>(choice.param) == Arithmetic::kMath;
                           return absl::StrCat(is_math ? "math" : "reference",
                                               std::get<1>(choice.param) == "cpu" ? "" : "OnAGpu");
                         });

TEST(SavedSequenceRefusalTest, NamesArithmeticAndCheckpoint) {
  const auto open = [](const char* checkpoint, Arithmetic arithmetic) {
    return *OpenEngine({.checkpoint = BundledPath(checkpoint), .arithmetic = arithmetic});
  };
  const auto from = open("tiny-random-3layer/nvfp4-cast", Arithmetic::kMath);
  auto sequence = Admit(*from, SeededIds(7, 20, kVocabulary), 2);
  ASSERT_TRUE(sequence.ok() && Step(*from, *sequence).ok());
  const auto image = WriteSequenceImage(*sequence, from->pool(), TermsOf(*from));
  ASSERT_TRUE(image.ok()) << image.status();
  const auto refusal = [&](const std::unique_ptr<diag::LocalEngine>& to) {
    return std::string(RestoreSequence(*image, to->engine(), TermsOf(*to)).status().message());
  };
  EXPECT_NE(refusal(open("tiny-random-3layer/nvfp4-cast", Arithmetic::kReference))
                .find("the cache layout is"),
            std::string::npos);
  EXPECT_NE(refusal(open("tiny-random-3layer/mxfp4", Arithmetic::kMath)).find("the checkpoint is"),
            std::string::npos);
}

// ---- Another process

absl::StatusOr<std::unique_ptr<diag::LocalEngine>> OpenBundled() {
  return OpenEngine(
      {.checkpoint = BundledPath("tiny-recall"), .arithmetic = Arithmetic::kReference});
}

std::string ReportOf(const Sequence& sequence) {
  return absl::StrCat(absl::StrJoin(sequence.tokens, " "), "; ",
                      absl::StrJoin(sequence.logits_crc32c, " "));
}

// What the process that gets the file does with it.
absl::StatusOr<std::string> ContinueFile(const std::string& path) {
  ISTHMUS_ASSIGN_OR_RETURN(const auto local, OpenBundled());
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<std::byte> image,
                           engine::LoadImageFile(path, local->pool().layout(), TermsOf(*local)));
  ISTHMUS_ASSIGN_OR_RETURN(Sequence sequence,
                           RestoreSequence(image, local->engine(), TermsOf(*local)));
  while (!sequence.is_finished()) ISTHMUS_RETURN_IF_ERROR(Step(*local, sequence));
  return ReportOf(sequence);
}

TEST(SavedFileTest, GoesOnEqualInAnotherProcess) {
  const std::string path = absl::StrCat(testing::TempDir(), "isthmus-saved-", ::getpid());
  int go[2] = {-1, -1};
  int report[2] = {-1, -1};
  ASSERT_EQ(pipe(go) + pipe(report), 0);
  const pid_t child = fork();  // Before there is an engine, of which it would inherit a copy.
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(go[1]);
    char word = 0;
    if (read(go[0], &word, 1) != 1) _exit(2);
    const auto text = ContinueFile(path + ".moved");
    const std::string line = text.ok() ? *text : text.status().ToString();
    _exit(write(report[1], line.data(), line.size()) == static_cast<ssize_t>(line.size()) ? 0 : 3);
  }
  close(go[0]);
  close(report[1]);
  const auto local = OpenBundled();
  ASSERT_TRUE(local.ok()) << local.status();
  auto sequence = Admit(**local, SeededIds(8, 700, 1920), 12);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  while (sequence->num_output_tokens() < 5) ASSERT_TRUE(Step(**local, *sequence).ok());
  const auto image = WriteSequenceImage(*sequence, (*local)->pool(), TermsOf(**local));
  ASSERT_TRUE(image.ok() && engine::SaveImageFile(path, *image).ok());
  ASSERT_EQ(std::rename(path.c_str(), (path + ".moved").c_str()), 0);
  ASSERT_EQ(write(go[1], "g", 1), 1);
  while (!sequence->is_finished()) ASSERT_TRUE(Step(**local, *sequence).ok());
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(report[0], buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  EXPECT_EQ(text, ReportOf(*sequence));
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  unlink((path + ".moved").c_str());
}

}  // namespace
}  // namespace isthmus::fidelity
