// SPDX-License-Identifier: Apache-2.0
// Token ids: by hand on a small tokenizer, and against Hugging Face's on the golden vectors.
#include "services/text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "services/text/testing_files.h"
#include "services/text/testing_tokenizer.h"

namespace isthmus::text {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::unique_ptr<Tokenizer> Small(const std::vector<std::string>& added = {}) {
  auto tokenizer = Tokenizer::FromJson(
      SmallTokenizer({{"h", "e"}, {"l", "l"}, {"he", "ll"}, {"Ġ", "he"}}, added).dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

TEST(TokenizerTest, MergesByRank) {
  // Bytes are their own ids; 256 he, 257 ll, 258 hell, 259 Ġhe.
  EXPECT_THAT(*Small()->Encode("hello"), ElementsAre(258, 'o'));
  EXPECT_THAT(*Small()->Encode(" hello"), ElementsAre(' ', 258, 'o'));
  EXPECT_THAT(*Small()->Encode(" he1234"), ElementsAre(259, '1', '2', '3', '4'));
  EXPECT_THAT(*Small()->Encode("é"), ElementsAre(0xC3, 0xA9));
  EXPECT_THAT(*Small()->Encode(""), ElementsAre());
}

TEST(TokenizerTest, CutsTheLongestAddedTokenAtTheLeftmostPlace) {
  const auto tokenizer = Small({"<a>", "<a><b>", "b><c>", "｜"});
  // 260 <a>, 261 <a><b>, 262 b><c>, 263 ｜
  EXPECT_THAT(*tokenizer->Encode("<a><b><c>"), ElementsAre(261, '<', 'c', '>'));
  EXPECT_THAT(*tokenizer->Encode("<a>b><c>"), ElementsAre(260, 262));
  EXPECT_THAT(*tokenizer->Encode("he<a>he｜"), ElementsAre(256, 260, 256, 263));
  EXPECT_TRUE(tokenizer->IsSpecial(260));
  EXPECT_FALSE(tokenizer->IsSpecial('<'));
  EXPECT_FALSE(tokenizer->IsSpecial(-1));
  EXPECT_FALSE(tokenizer->IsSpecial(264));
}

TEST(TokenizerTest, CutsNormalizedTokensInASecondPass) {
  json file = SmallTokenizer({}, {"ab", "bcd"});
  file["added_tokens"][0]["normalized"] = true;
  // "abcd": the leftmost token is ab, but bcd is cut in the first pass.
  EXPECT_THAT(*(*Tokenizer::FromJson(file.dump()))->Encode("abcd"), ElementsAre('a', 257));
  EXPECT_THAT(*Small({"ab", "bcd"})->Encode("abcd"), ElementsAre(260, 'c', 'd'));
}

TEST(TokenizerTest, DecodesBytes) {
  const auto tokenizer = Small({"<｜x｜>"});
  EXPECT_EQ(tokenizer->vocab_size(), 261);
  EXPECT_EQ(tokenizer->TokenBytes(259), " he");
  EXPECT_EQ(tokenizer->TokenBytes(260), "<｜x｜>");
  EXPECT_EQ(tokenizer->TokenBytes(261), "");
  EXPECT_EQ(tokenizer->TokenBytes(-1), "");
  EXPECT_EQ(tokenizer->TokenBytes(0), absl::string_view("\0", 1));
  EXPECT_EQ(tokenizer->Decode(std::vector<int32_t>{0xC3, 0xA9, 260, 9999, 259}), "é<｜x｜> he");
  EXPECT_EQ(tokenizer->IdOf("Ġhe"), 259);
  EXPECT_EQ(tokenizer->IdOf("<｜x｜>"), 260);
  EXPECT_EQ(tokenizer->IdOf("nothing"), std::nullopt);
}

TEST(TokenizerTest, RefusesTextThatIsNotUtf8) {
  const auto status = Small()->Encode("abc\xE2\x82").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "text: byte 0xe2 at offset 3 of 5 is not valid UTF-8");
}

// Compares all vectors of `list`: [{"t": text, "ids": [...]}, ...].
void ExpectVectors(const Tokenizer& tokenizer, const json& list, size_t count) {
  ASSERT_EQ(list.size(), count);
  size_t differing = 0;
  for (const json& item : list) {
    const auto text = item.at("t").get<std::string>();
    const auto wanted = item.at("ids").get<std::vector<int32_t>>();
    const auto ids = tokenizer.Encode(text);
    ASSERT_TRUE(ids.ok()) << ids.status();
    if (*ids != wanted && ++differing <= 5) {
      ADD_FAILURE() << json(text).dump() << "\n is     " << json(*ids).dump() << "\n wanted "
                    << json(wanted).dump();
    }
    EXPECT_EQ(tokenizer.Decode(*ids), text);
  }
  EXPECT_EQ(differing, 0u);
}

TEST(TokenizerTest, EqualsHuggingFaceOnTheBundledModel) {
  const auto file = TinyTokenizerJson();
  const auto vectors = BundledFile("tokenizer/tiny-recall.json", "tokenizer/tiny-recall.json");
  if (!file.has_value() || !vectors.has_value()) {
    if (IsCi()) FAIL() << "tiny-recall is neither bundled nor in ISTHMUS_GOLDEN_DIR";
    GTEST_SKIP() << "ISTHMUS_GOLDEN_DIR is not set";
  }
  const auto tokenizer = Tokenizer::FromJson(*file);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->vocab_size(), 1920);
  EXPECT_EQ((*tokenizer)->IdOf("</think>"), 6);
  ExpectVectors(**tokenizer, json::parse(*vectors), 720);
}

TEST(TokenizerTest, EqualsHuggingFaceOnTheRealModel) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing in a test writes the environment.
  const char* const dir = std::getenv("ISTHMUS_TOKENIZER_DIR");
  if (dir == nullptr) GTEST_SKIP() << "ISTHMUS_TOKENIZER_DIR is not set";
  const auto vectors = GoldenFile("tokenizer/vectors.json");
  if (!vectors.has_value()) {
    if (IsCi()) FAIL() << "ISTHMUS_GOLDEN_DIR is not set or lacks tokenizer/vectors.json";
    GTEST_SKIP() << "ISTHMUS_GOLDEN_DIR is not set";
  }
  const auto start = std::chrono::steady_clock::now();
  const auto tokenizer = Tokenizer::Load(std::string(dir) + "/tokenizer.json");
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  RecordProperty("load_ms", static_cast<int>(seconds.count() * 1000));
  EXPECT_EQ((*tokenizer)->vocab_size(), 129280);
  EXPECT_EQ((*tokenizer)->IdOf("<｜User｜>"), 128803);
  EXPECT_FALSE((*tokenizer)->IsSpecial(128803));
  EXPECT_TRUE((*tokenizer)->IsSpecial(0));
  ExpectVectors(**tokenizer, json::parse(*vectors), 1410);
}

}  // namespace
}  // namespace isthmus::text
