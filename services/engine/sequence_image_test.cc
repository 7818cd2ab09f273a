// SPDX-License-Identifier: Apache-2.0
#include "services/engine/sequence_image.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/crc32c.h"
#include "services/engine/image_file.h"
#include "services/engine/image_request.h"
#include "services/model/scripted_forward.h"

namespace isthmus::engine {
namespace {

using testing::HasSubstr;

model::ScriptedOptions SmallScript() {
  model::ScriptedOptions options;
  options.vocab_size = 64;
  options.max_positions = 1200;
  options.page_tokens = 128;
  options.max_tokens_per_step = 3;
  return options;
}

ImageTerms Terms() {
  ImageTerms terms;
  terms.weight_fingerprint = 0xfeed;
  terms.salt = "tenant a";
  return terms;
}

// An engine over the script; `taken` pages and slots are held by nobody's sequence, so that pages
// come in another order.
class Scripted {
 public:
  explicit Scripted(int taken = 0, const model::ScriptedOptions& options = SmallScript(),
                    int device = kv::kHostMemory)
      : forward_(*model::ScriptedForward::Create(options, clock_)),
        pool_(*kv::CachePool::Create(forward_->layout(), 4096, 8, device)),
        engine_(forward_.get(), pool_.get(), {.chunk_tokens = 100, .eos_token_id = 1}, {}) {
    for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
      kv::PagePool& pages = pool_->pages(static_cast<kernels::CacheKindIndex>(k));
      std::vector<int32_t> held = *pages.Take(2 * taken + k * taken);
      for (size_t i = 0; i < held.size(); ++i) {
        std::memset(pages.address(held[i]), 0x3c, static_cast<size_t>(pages.page_bytes()));
        if (i % 2 == 0) pages.Release(held[i]);
      }
    }
    const std::vector<int32_t> slots = *pool_->slots().Take(taken);
  }

  Sequence Admit(int64_t prompt) {
    SamplingParams sampling;
    sampling.max_tokens = 60;
    sampling.temperature = 0.75f;
    sampling.top_k = 7;
    sampling.seed = 0x8000000000000005u;
    sampling.wants_logits_digests = true;
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < prompt; ++i) tokens.push_back(static_cast<int32_t>(2 + i * 7 % 61));
    return *engine_.Admit(absl::StrCat("r", prompt), std::move(tokens), sampling);
  }
  // A sequence of `prompt` tokens that has had `steps` steps and has an output token.
  Sequence Start(int64_t prompt, int steps) {
    Sequence sequence = Admit(prompt);
    for (int step = 0; step < steps || sequence.num_output_tokens() == 0; ++step) Step(sequence);
    return sequence;
  }
  void Step(Sequence& sequence) {
    Sequence* const one = &sequence;
    const absl::Status status = engine_.Step({&one, 1});
    ASSERT_TRUE(status.ok()) << status;
  }
  std::vector<std::byte> Image(const Sequence& sequence, const ImageTerms& terms = Terms()) {
    return *WriteSequenceImage(sequence, *pool_, terms);
  }
  absl::StatusOr<Sequence> Restore(std::span<const std::byte> image,
                                   const ImageTerms& terms = Terms()) {
    return RestoreSequence(image, engine_, terms);
  }
  absl::Status Refusal(std::span<const std::byte> image, const ImageTerms& terms = Terms()) {
    const int32_t before = pool_->slots().num_free();
    const absl::Status status = Restore(image, terms).status();
    EXPECT_EQ(pool_->slots().num_free(), before);
    return status;
  }

  kv::CachePool& pool() { return *pool_; }
  const kernels::KvLayout& layout() { return pool_->layout(); }

 private:
  SimulatedClock clock_;
  std::unique_ptr<model::ScriptedForward> forward_;
  std::unique_ptr<kv::CachePool> pool_;
  Engine engine_;
};

void ExpectEqual(const Sequence& a, const Sequence& b) {
  EXPECT_EQ(a.request_id, b.request_id);
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.num_prompt_tokens, b.num_prompt_tokens);
  EXPECT_EQ(a.num_draws, b.num_draws);
  EXPECT_EQ(a.logits_crc32c, b.logits_crc32c);
  EXPECT_EQ(a.finish, b.finish);
  EXPECT_EQ(a.cache.num_tokens(), b.cache.num_tokens());
  EXPECT_EQ(a.sampling.temperature, b.sampling.temperature);
  EXPECT_EQ(a.sampling.top_p, b.sampling.top_p);
  EXPECT_EQ(a.sampling.top_k, b.sampling.top_k);
  EXPECT_EQ(a.sampling.seed, b.sampling.seed);
  EXPECT_EQ(a.sampling.max_tokens, b.sampling.max_tokens);
  EXPECT_EQ(a.sampling.wants_logits_digests, b.sampling.wants_logits_digests);
}

TEST(SequenceImageTest, EveryFieldOfARequestComesBack) {
  Sequence sequence;
  sequence.request_id = std::string("a\0b", 3);
  sequence.num_prompt_tokens = 11;
  sequence.num_draws = ~uint64_t{0};
  sequence.finish = FinishReason::kLength;
  sequence.logprobs = {{.chosen = {3, -0.5f}, .rank = 2, .top = {{9, -0.25f}, {3, -0.5f}}}, {}};
  sequence.prompt_logprobs = {{.chosen = {4, -1.5f}, .rank = 1, .top = {}}};
  sequence.further_first = {{.id = 8, .logits_crc32c = 77, .logprobs = sequence.logprobs[0]}};
  sequence.sampling = {.temperature = 0.5f,
                       .top_p = 0.25f,
                       .top_k = -3,
                       .min_p = 0.125f,
                       .seed = 1,
                       .further_seeds = {2, 3},
                       .repetition_penalty = 1.5f,
                       .frequency_penalty = -0.5f,
                       .presence_penalty = 0.75f,
                       .logit_bias = {{.id = 5, .bias = -2.5f}},
                       .banned_token_ids = {6, 7},
                       .max_tokens = 8,
                       .min_tokens = 4,
                       .stop_token_ids = {9},
                       .ignores_end_token = true,
                       .top_logprobs = 0,
                       .top_prompt_logprobs = std::nullopt,
                       .wants_logits_digests = true};
  std::vector<std::byte> bytes;
  AppendRequest(sequence, bytes);
  Sequence read;
  ASSERT_TRUE(ReadRequest(bytes, read));
  std::vector<std::byte> again;
  AppendRequest(read, again);
  EXPECT_EQ(again, bytes);
  EXPECT_EQ(read.request_id, sequence.request_id);
  EXPECT_EQ(read.logprobs, sequence.logprobs);
  EXPECT_EQ(read.prompt_logprobs, sequence.prompt_logprobs);
  EXPECT_EQ(read.further_first[0].logprobs, sequence.logprobs[0]);
  EXPECT_EQ(read.sampling.top_k, -3);
  EXPECT_EQ(read.sampling.further_seeds, sequence.sampling.further_seeds);
  EXPECT_EQ(read.sampling.logit_bias[0].bias, -2.5f);
  EXPECT_EQ(read.sampling.min_tokens, 4);
  EXPECT_EQ(read.sampling.top_logprobs, 0);
  EXPECT_FALSE(read.sampling.top_prompt_logprobs.has_value());
  for (size_t size = 0; size < bytes.size(); ++size) {
    Sequence cut;
    EXPECT_FALSE(ReadRequest(std::span(bytes).first(size), cut)) << size;
  }
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(ReadRequest(bytes, read));
}

// The script reads no byte but those that a model reads, and finds every one that is wrong.
TEST(SequenceImageTest, AnotherEngineContinuesAtEveryResidue) {
  Scripted from;
  Scripted to(/*taken=*/3);
  for (int64_t prompt = 1; prompt <= 260; ++prompt) {
    Sequence sequence = from.Start(prompt, 1);
    const std::vector<std::byte> image = from.Image(sequence);
    absl::StatusOr<Sequence> restored = to.Restore(image);
    ASSERT_TRUE(restored.ok()) << restored.status();
    ExpectEqual(*restored, sequence);
    EXPECT_EQ(to.Image(*restored), image) << prompt << " tokens";
    while (!sequence.is_finished()) from.Step(sequence);
    while (!restored->is_finished()) to.Step(*restored);
    ExpectEqual(*restored, sequence);
  }
  to.pool().CheckConservation();
}

// Before its first step, in the middle of a prompt, and when it has ended.
TEST(SequenceImageTest, ContinuesFromAnyPhase) {
  Scripted from;
  Scripted to(/*taken=*/2);
  Sequence sequence = from.Admit(350);
  int phases = 0;
  for (;; ++phases) {
    absl::StatusOr<Sequence> restored = to.Restore(from.Image(sequence));
    ASSERT_TRUE(restored.ok()) << restored.status();
    ExpectEqual(*restored, sequence);
    if (sequence.is_finished()) break;
    to.Step(*restored);
    from.Step(sequence);
    ExpectEqual(*restored, sequence);
  }
  EXPECT_GT(phases, 20);
}

TEST(SequenceImageTest, AnImageIsSmallerThanItsPages) {
  Scripted engine;
  const Sequence sequence = engine.Start(1, 1);
  // Two tokens: no entry of any paged kind, and two rows of each state.
  const int64_t slot = engine.layout().state_slot_bytes;
  EXPECT_LT(static_cast<int64_t>(engine.Image(sequence).size()), slot / 2);
}

TEST(SequenceImageTest, RefusesEveryFlippedByte) {
  Scripted engine;
  std::vector<std::byte> image = engine.Image(engine.Start(9, 1));
  for (size_t at = 0; at < image.size(); ++at) {
    const auto flip = std::byte{static_cast<unsigned char>(1 << at % 8)};
    image[at] ^= flip;
    const absl::Status status = ParseSequenceImage(image, engine.layout(), Terms()).status();
    EXPECT_FALSE(status.ok()) << "byte " << at;
    EXPECT_THAT(std::string(status.message()), HasSubstr("sequence image: ")) << at;
    image[at] ^= flip;
  }
  EXPECT_TRUE(engine.Restore(image).ok());
}

TEST(SequenceImageTest, NamesTheSectionThatIsDamaged) {
  Scripted engine;
  const std::vector<std::byte> image = engine.Image(engine.Start(300, 1));
  size_t at = kImageHeaderBytes;
  for (const char* name : {"request", "tokens", "digests", "csa_kv", "hca_kv", "index_key",
                           "window", "csa_state", "index_state", "hca_state"}) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, image.data() + at + 8, sizeof(bytes));
    ASSERT_GT(bytes, 0u) << name;
    std::vector<std::byte> damaged = image;
    damaged[at + 16 + bytes / 2] ^= std::byte{0x40};
    const absl::Status status = engine.Refusal(damaged);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("section ", name, ": ")));
    at += 16 + bytes;
  }
  EXPECT_EQ(at + 4, image.size());
}

TEST(SequenceImageTest, RefusesWhatIsCutOrLonger) {
  Scripted engine;
  std::vector<std::byte> image = engine.Image(engine.Start(9, 1));
  for (size_t size = 0; size < image.size(); ++size) {
    const absl::Status status =
        ParseSequenceImage(std::span(image).first(size), engine.layout(), Terms()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << size;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("is ", size, ", must be ")));
  }
  image.push_back(std::byte{0});
  EXPECT_EQ(engine.Refusal(image).code(), absl::StatusCode::kDataLoss);
}

TEST(SequenceImageTest, RefusesForeignImagesWithBothValues) {
  Scripted engine;
  const std::vector<std::byte> image = engine.Image(engine.Start(9, 1));
  ImageTerms other = Terms();
  other.weight_fingerprint = 0xbeef;
  absl::Status status = engine.Refusal(image, other);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the checkpoint is 000000000000feed, ours 000000000000beef"));
  other = Terms();
  other.salt = "tenant b";
  status = engine.Refusal(image, other);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the hash of the salt is "));

  model::ScriptedOptions larger_pages = SmallScript();
  larger_pages.page_tokens = 256;
  Scripted differs(0, larger_pages);
  status = differs.Refusal(image);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      std::string(status.message()),
      HasSubstr(absl::StrFormat("the cache layout is %016x, ours %016x",
                                engine.layout().fingerprint, differs.layout().fingerprint)));

  std::vector<std::byte> stale = image;
  stale[8] = std::byte{77};
  status = engine.Refusal(stale);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the version is 000000000000004d, ours"));
}

// Writes a number of the header and the sum behind it.
void Forge(std::vector<std::byte>& image, size_t at, uint64_t value) {
  std::memcpy(image.data() + at, &value, sizeof(value));
  const uint32_t sum = Crc32c(image.data(), kImageHeaderBytes - 4);
  std::memcpy(image.data() + kImageHeaderBytes - 4, &sum, sizeof(sum));
}

TEST(SequenceImageTest, RefusesAbsurdCountsWithoutAllocating) {
  Scripted engine;
  const std::vector<std::byte> image = engine.Image(engine.Start(9, 1));
  constexpr size_t kImageBytes = 48;
  constexpr size_t kNumTokens = 56;
  constexpr size_t kNumCachedTokens = 64;
  for (const uint64_t count :
       {~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 40, uint64_t{1201}, uint64_t{1199}}) {
    for (const size_t at : {kImageBytes, kNumTokens, kNumCachedTokens}) {
      std::vector<std::byte> forged = image;
      Forge(forged, at, count);
      EXPECT_FALSE(engine.Refusal(forged).ok()) << at << ": " << count;
    }
  }
  // All counts agree with each other, and with a bound that nobody gave.
  ImageTerms bounded = Terms();
  bounded.max_tokens = 8;
  EXPECT_THAT(std::string(engine.Refusal(image, bounded).message()),
              HasSubstr("the number of tokens is 10, limit 8"));
}

TEST(SequenceImageTest, RefusesTokensThatNoEngineAdmits) {
  Scripted engine;
  Sequence sequence = engine.Start(9, 1);
  const std::vector<int32_t> tokens = sequence.tokens;
  for (const size_t at : {size_t{0}, tokens.size() - 1}) {
    sequence.tokens = tokens;
    sequence.tokens[at] = 64;
    const absl::Status status = engine.Refusal(engine.Image(sequence));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("has id 64, the vocabulary has 64"));
  }
  sequence.tokens = tokens;
  sequence.sampling.top_p = 2.0f;
  EXPECT_THAT(std::string(engine.Refusal(engine.Image(sequence)).message()), HasSubstr("top_p"));
  sequence.sampling.top_p = 1.0f;
  sequence.num_prompt_tokens = 11;
  EXPECT_FALSE(engine.Refusal(engine.Image(sequence)).ok());
  sequence.num_prompt_tokens = 0;
  EXPECT_FALSE(engine.Refusal(engine.Image(sequence)).ok());
}

TEST(SequenceImageTest, NoRoomIsNoFault) {
  Scripted engine;
  const Sequence sequence = engine.Start(9, 1);
  const std::vector<std::byte> image = engine.Image(sequence);
  const std::vector<int32_t> slots = *engine.pool().slots().Take(7);
  EXPECT_EQ(engine.Restore(image).status().code(), absl::StatusCode::kResourceExhausted);
  engine.pool().slots().Release(slots[0]);
  EXPECT_TRUE(engine.Restore(image).ok());
}

// ---- Files

class ImageFileTest : public testing::Test {
 protected:
  ImageFileTest() : path_(absl::StrCat(testing::TempDir(), "isthmus-image-", ::getpid())) {}
  ~ImageFileTest() override {
    unlink(path_.c_str());
    unlink((path_ + ".part").c_str());
  }
  absl::Status Refusal(const ImageTerms& terms = Terms()) {
    return LoadImageFile(path_, engine_.layout(), terms).status();
  }

  const std::string path_;
  Scripted engine_;
};

TEST_F(ImageFileTest, AFileHasTheBytesAndNothingBesideIt) {
  const std::vector<std::byte> image = engine_.Image(engine_.Start(200, 3));
  ASSERT_TRUE(SaveImageFile(path_, engine_.Image(engine_.Start(20, 3))).ok());
  ASSERT_TRUE(SaveImageFile(path_, image).ok());  // In place of another one.
  EXPECT_EQ(*LoadImageFile(path_, engine_.layout(), Terms()), image);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".part"));
}

TEST_F(ImageFileTest, AFailedSaveLeavesTheFileThatWasThere) {
  const std::vector<std::byte> image = engine_.Image(engine_.Start(20, 1));
  ASSERT_TRUE(SaveImageFile(path_, image).ok());
  ASSERT_EQ(mkdir((path_ + ".part").c_str(), 0700), 0);
  EXPECT_FALSE(SaveImageFile(path_, engine_.Image(engine_.Start(30, 1))).ok());
  rmdir((path_ + ".part").c_str());
  EXPECT_EQ(*LoadImageFile(path_, engine_.layout(), Terms()), image);
  const absl::Status status = SaveImageFile("/nowhere/at/all", image);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nowhere/at/all"));
}

TEST_F(ImageFileTest, RefusesByTheHeaderWithThePath) {
  EXPECT_EQ(Refusal().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(SaveImageFile(path_, engine_.Image(engine_.Start(20, 1))).ok());
  ImageTerms other = Terms();
  other.weight_fingerprint = 1;
  const absl::Status foreign = Refusal(other);
  EXPECT_EQ(foreign.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(foreign.message()), HasSubstr(path_ + ": sequence image: the check"));
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path_));
  ASSERT_EQ(truncate(path_.c_str(), size - 1), 0);
  EXPECT_EQ(Refusal().code(), absl::StatusCode::kDataLoss);
  // A file of holes, larger than any memory: its size is refused before it is read.
  ASSERT_EQ(truncate(path_.c_str(), int64_t{1} << 42), 0);
  EXPECT_EQ(Refusal().code(), absl::StatusCode::kDataLoss);
  ASSERT_EQ(truncate(path_.c_str(), 10), 0);
  EXPECT_EQ(Refusal().code(), absl::StatusCode::kDataLoss);
}

TEST_F(ImageFileTest, RefusesWhatIsNoFile) {
  EXPECT_FALSE(LoadImageFile("/tmp", engine_.layout(), Terms()).ok());
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);  // Nobody writes: reading would wait for ever.
  EXPECT_EQ(Refusal().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace isthmus::engine
