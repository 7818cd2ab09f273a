// SPDX-License-Identifier: Apache-2.0
// Every setting that would change ids is refused by name.
#include "services/text/tokenizer_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "services/text/testing_tokenizer.h"
#include "services/text/tokenizer.h"

namespace isthmus::text {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// The error of a small tokenizer after `change`.
absl::Status ErrorAfter(const std::function<void(json&)>& change) {
  json file = SmallTokenizer({{"h", "e"}}, {"<x>"});
  change(file);
  return Tokenizer::FromJson(file.dump()).status();
}

struct Refusal {
  std::function<void(json&)> change;
  absl::StatusCode code;
  const char* names;
};

constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

void ExpectRefusals(const std::vector<Refusal>& refusals) {
  for (const Refusal& refusal : refusals) {
    const absl::Status status = ErrorAfter(refusal.change);
    EXPECT_EQ(status.code(), refusal.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(refusal.names));
  }
}

TEST(TokenizerFileTest, AcceptsTheSmallTokenizer) {
  EXPECT_TRUE(ErrorAfter([](json&) {}).ok()) << ErrorAfter([](json&) {});
}

TEST(TokenizerFileTest, RefusesSettingsAroundTheModel) {
  const json byte_level = SmallTokenizer()["decoder"];
  ExpectRefusals({
      {[](json& f) { f["version"] = "2.0"; }, kUnimplemented, "root.version = \"2.0\""},
      {[](json& f) { f["truncation"] = json::object(); }, kUnimplemented, "root.truncation"},
      {[](json& f) { f["padding"] = 1; }, kUnimplemented, "root.padding"},
      {[](json& f) { f["extra"] = 1; }, kUnimplemented, "root.extra"},
      {[](json& f) {
         f["normalizer"] = {{"type", "NFC"}};
       },
       kUnimplemented, "normalizer"},
      {[](json& f) {
         f["post_processor"] = {{"type", "TemplateProcessing"}};
       },
       kUnimplemented, "post_processor.type"},
      {[](json& f) { f["decoder"] = nullptr; }, kInvalid, "decoder must be an object"},
      {[](json& f) { f["decoder"]["type"] = "WordPiece"; }, kUnimplemented, "decoder.type"},
      {[](json& f) { f.erase("model"); }, kInvalid, "root.model is missing"},
  });
}

TEST(TokenizerFileTest, RefusesPreTokenizersItDoesNotHave) {
  static constexpr const char* kStages = "pretokenizers";
  const auto stage = [](json& f, int i) -> json& { return f["pre_tokenizer"][kStages][i]; };
  ExpectRefusals({
      {[](json& f) { f["pre_tokenizer"] = nullptr; }, kInvalid, "pre_tokenizer must be an object"},
      {[](json& f) { f["pre_tokenizer"]["type"] = "Metaspace"; }, kUnimplemented,
       "pre_tokenizer.type = \"Metaspace\""},
      {[](json& f) { f["pre_tokenizer"][kStages] = json::array(); }, kInvalid, "ByteLevel"},
      {[&](json& f) { stage(f, 0)["behavior"] = "Removed"; }, kUnimplemented,
       "pretokenizers[0].behavior = \"Removed\""},
      {[&](json& f) { stage(f, 1)["invert"] = true; }, kUnimplemented, "[1].invert"},
      {[&](json& f) {
         stage(f, 0)["pattern"] = {{"String", "a"}};
       },
       kUnimplemented, "pattern.String"},
      {[&](json& f) { stage(f, 0)["pattern"]["Regex"] = "(?i:a)"; }, kUnimplemented, "(?i"},
      {[&](json& f) { stage(f, 0)["type"] = "Digits"; }, kUnimplemented, "\"Digits\""},
      {[&](json& f) { stage(f, 2)["use_regex"] = true; }, kUnimplemented, "[2].use_regex"},
      {[&](json& f) { stage(f, 2)["add_prefix_space"] = true; }, kUnimplemented,
       "[2].add_prefix_space"},
      {[&](json& f) { f["pre_tokenizer"][kStages].erase(2); }, kUnimplemented, "(last stage)"},
  });
}

TEST(TokenizerFileTest, RefusesAddedTokensItCannotCut) {
  const auto token = [](json& f) -> json& { return f["added_tokens"][0]; };
  ExpectRefusals({
      {[&](json& f) { token(f)["single_word"] = true; }, kUnimplemented, "[0].single_word"},
      {[&](json& f) { token(f)["lstrip"] = true; }, kUnimplemented, "[0].lstrip"},
      {[&](json& f) { token(f)["rstrip"] = true; }, kUnimplemented, "[0].rstrip"},
      {[&](json& f) { token(f)["content"] = ""; }, kInvalid, "[0].content is empty"},
      {[&](json& f) { token(f)["id"] = -1; }, kInvalid, "added_tokens[0].id"},
      {[&](json& f) { token(f)["id"] = 5000000000; }, kInvalid, "5000000000"},
      {[&](json& f) { token(f)["id"] = 258; }, kInvalid, "only 258 tokens"},
      {[&](json& f) { token(f)["id"] = 12; }, kInvalid, "both have id 12"},
      {[&](json& f) { token(f)["content"] = "he"; }, kInvalid, "has ids 256 and 257"},
      {[&](json& f) { f["added_tokens"] = 3; }, kInvalid, "added_tokens must be an array"},
  });
}

TEST(TokenizerFileTest, RefusesModelsItCannotRun) {
  const auto model = [](json& f) -> json& { return f["model"]; };
  ExpectRefusals({
      {[&](json& f) { model(f)["type"] = "Unigram"; }, kUnimplemented, "model.type"},
      {[&](json& f) { model(f)["dropout"] = 0.1; }, kUnimplemented, "model.dropout"},
      {[&](json& f) { model(f)["unk_token"] = "?"; }, kUnimplemented, "model.unk_token"},
      {[&](json& f) { model(f)["byte_fallback"] = true; }, kUnimplemented, "model.byte_fallback"},
      {[&](json& f) { model(f)["ignore_merges"] = true; }, kUnimplemented, "model.ignore_merges"},
      {[&](json& f) { model(f)["end_of_word_suffix"] = "_"; }, kUnimplemented, "end_of_word"},
      {[&](json& f) { model(f)["merges"][0] = "a b c"; }, kInvalid, "merges[0]"},
      {[&](json& f) {
         model(f)["merges"][0] = {"x", "q"};
       },
       kInvalid, "needs 'xq'"},
      {[&](json& f) { model(f)["merges"].push_back("h e"); }, kInvalid, "repeats merge 0"},
      {[&](json& f) { model(f)["vocab"]["h"] = "1"; }, kInvalid, "(token 'h')"},
      {[&](json& f) {
         model(f)["vocab"].erase("A");
         model(f)["vocab"]["xx"] = 65;
       },
       kInvalid, "byte 0x41 ('A') has no token"},
  });
}

TEST(TokenizerFileTest, SaysWhereTheJsonBreaks) {
  const auto status = Tokenizer::FromJson("{\"version\": ").status();
  EXPECT_EQ(status.code(), kInvalid);
  EXPECT_THAT(std::string(status.message()), HasSubstr("byte 13"));
  EXPECT_FALSE(Tokenizer::FromJson(std::string(5000, '[')).ok());
  EXPECT_EQ(Tokenizer::Load("/nonexistent/tokenizer.json").status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace isthmus::text
