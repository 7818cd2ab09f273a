// SPDX-License-Identifier: Apache-2.0
#include "services/base/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace isthmus {
namespace {

using testing::HasSubstr;

struct SampleConfig {
  int32_t chunk_tokens = 512;
  int32_t page_tokens = 256;
  int32_t index_topk = 0;
  double fraction = 0.5;
  bool is_warm = false;
  std::string arithmetic = "reference";
  absl::Duration timeout = absl::Seconds(2);
  std::vector<std::string> peers;
  std::map<std::string, bool> patches;

  template <typename Visitor>
  void VisitFields(Visitor& visit) {
    visit("chunk_tokens", chunk_tokens, Range<int32_t>{1, 4096}, "Prompt tokens in one step.");
    visit("page_tokens", page_tokens, MultipleOf<int32_t>{128, 1024}, "Tokens per page.");
    visit("model.index_topk", index_topk, Range<int32_t>{0, 4096}, "Entries; 0: the model's.");
    visit("fraction", fraction, Range<double>{0.0, 1.0}, "Share of a | b.");
    visit("is_warm", is_warm, AnyValue{}, "Whether to warm up.");
    visit("arithmetic", arithmetic, OneOf{{"math", "reference"}}, "Which arithmetic.");
    visit("timeout", timeout, Range<absl::Duration>{absl::Milliseconds(10), absl::Minutes(1)},
          "Patience.");
    visit("peers", peers, AnyValue{}, "Addresses.");
    visit("patches", patches, AnyValue{}, "Patch switches.");
  }
};

struct Loaded {
  SampleConfig config;
  ConfigFields fields = ConfigFields::Of(config);
};

TEST(ConfigTest, LoadsEveryTypeAndNestedNames) {
  Loaded loaded;
  ASSERT_TRUE(loaded.fields
                  .LoadJson(R"({"chunk_tokens": 5, "page_tokens": 384, "model": {"index_topk": 64},
                "fraction": 0.25, "is_warm": true, "arithmetic": "math", "timeout": "250ms",
                "peers": ["a:1", "b:2"], "patches": {"rms_norm.row_per_warp": false}})",
                            "file")
                  .ok());
  EXPECT_EQ(loaded.config.chunk_tokens, 5);
  EXPECT_EQ(loaded.config.page_tokens, 384);
  EXPECT_EQ(loaded.config.index_topk, 64);
  EXPECT_EQ(loaded.config.fraction, 0.25);
  EXPECT_TRUE(loaded.config.is_warm);
  EXPECT_EQ(loaded.config.arithmetic, "math");
  EXPECT_EQ(loaded.config.timeout, absl::Milliseconds(250));
  EXPECT_THAT(loaded.config.peers, testing::ElementsAre("a:1", "b:2"));
  EXPECT_EQ(loaded.config.patches.at("rms_norm.row_per_warp"), false);
}

TEST(ConfigTest, NamesTheUnknownKeyAndTheNearestKnownOnes) {
  Loaded loaded;
  const absl::Status status = loaded.fields.LoadJson(R"({"chunk_token": 5})", "router.json");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("router.json: unknown key \"chunk_token\"; the nearest are chunk_tokens"));
  EXPECT_THAT(std::string(loaded.fields.LoadJson(R"({"model": {"topk": 5}})", "f").message()),
              HasSubstr("unknown key \"model.topk\""));
  EXPECT_THAT(std::string(loaded.fields.Set("timeot=2s").message()),
              HasSubstr("the nearest are timeout"));
}

TEST(ConfigTest, RefusesValuesOutsideTheirConstraintWithBothSides) {
  Loaded loaded;
  EXPECT_EQ(loaded.fields.Set("chunk_tokens=0").message(),
            "--set chunk_tokens: is 0, want 1 to 4096");
  EXPECT_EQ(loaded.fields.Set("page_tokens=200").message(),
            "--set page_tokens: is 200, want a multiple of 128, at most 1024");
  EXPECT_EQ(loaded.fields.Set("arithmetic=exact").message(),
            "--set arithmetic: is \"exact\", want one of math, reference");
  EXPECT_EQ(loaded.fields.Set("timeout=1ms").message(),
            "--set timeout: is \"1ms\", want \"10ms\" to \"1m\"");
  EXPECT_EQ(loaded.config.chunk_tokens, 512);  // A refused value changes nothing.
}

TEST(ConfigTest, RefusesValuesOfAnotherType) {
  Loaded loaded;
  EXPECT_FALSE(loaded.fields.LoadJson(R"({"chunk_tokens": "5"})", "f").ok());
  EXPECT_FALSE(loaded.fields.LoadJson(R"({"chunk_tokens": 5.5})", "f").ok());
  EXPECT_FALSE(loaded.fields.LoadJson(R"({"chunk_tokens": 99999999999})", "f").ok());
  EXPECT_FALSE(loaded.fields.LoadJson(R"({"timeout": 2})", "f").ok());
  EXPECT_FALSE(loaded.fields.LoadJson(R"({"is_warm": 1})", "f").ok());
  EXPECT_FALSE(loaded.fields.LoadJson(R"({"model": 1})", "f").ok());
  EXPECT_FALSE(loaded.fields.LoadJson(R"([1])", "f").ok());
  EXPECT_FALSE(loaded.fields.LoadJson(R"({"chunk_tokens": 5,})", "f").ok());
  EXPECT_THAT(
      std::string(loaded.fields.LoadJson(R"({"fraction": 0.1, "fraction": 0.2})", "f").message()),
      HasSubstr("\"fraction\" appears twice"));
}

TEST(ConfigTest, AssignmentsReachListsTextAndSwitches) {
  Loaded loaded;
  ASSERT_TRUE(loaded.fields.Set("peers=a:1,b:2").ok());
  ASSERT_TRUE(loaded.fields.Set("patches.attention.split_kv=true").ok());
  ASSERT_TRUE(loaded.fields.Set("model.index_topk=4").ok());
  EXPECT_THAT(loaded.config.peers, testing::ElementsAre("a:1", "b:2"));
  EXPECT_EQ(loaded.config.patches.at("attention.split_kv"), true);
  EXPECT_EQ(loaded.config.index_topk, 4);
  EXPECT_FALSE(loaded.fields.Set("peers").ok());
}

TEST(ConfigTest, PrintsWhatItReads) {
  Loaded first;
  ASSERT_TRUE(first.fields.Set("timeout=1500ms").ok());
  ASSERT_TRUE(first.fields.Set("model.index_topk=4").ok());
  ASSERT_TRUE(first.fields.Set("patches.a.b=true").ok());
  Loaded second;
  ASSERT_TRUE(second.fields.LoadJson(first.fields.ToJson(), "printed").ok());
  EXPECT_EQ(second.fields.ToJson(), first.fields.ToJson());
  EXPECT_EQ(second.config.timeout, absl::Milliseconds(1500));
}

TEST(ConfigTest, TheReferenceListsEveryFieldAndEscapesBars) {
  Loaded loaded;
  const std::string text = loaded.fields.ToMarkdown();
  for (const ConfigField& field : loaded.fields.fields()) {
    EXPECT_THAT(text, HasSubstr("| `" + field.name + "` |"));
  }
  EXPECT_THAT(text, HasSubstr("Share of a \\| b."));
}

TEST(ConfigTest, TheSchemaKnowsNamesTypesAndRanges) {
  Loaded loaded;
  const auto schema = nlohmann::json::parse(loaded.fields.ToJsonSchema());
  EXPECT_EQ(schema["additionalProperties"], false);
  const auto& fields = schema["properties"];
  EXPECT_EQ(fields["chunk_tokens"]["type"], "integer");
  EXPECT_EQ(fields["chunk_tokens"]["minimum"], 1);
  EXPECT_EQ(fields["chunk_tokens"]["maximum"], 4096);
  EXPECT_EQ(fields["chunk_tokens"]["default"], 512);
  EXPECT_EQ(fields["page_tokens"]["multipleOf"], 128);
  EXPECT_EQ(fields["model"]["additionalProperties"], false);
  EXPECT_EQ(fields["model"]["properties"]["index_topk"]["type"], "integer");
  EXPECT_EQ(fields["fraction"]["type"], "number");
  EXPECT_EQ(fields["is_warm"]["type"], "boolean");
  EXPECT_EQ(fields["arithmetic"]["enum"], nlohmann::json({"math", "reference"}));
  EXPECT_EQ(fields["timeout"]["type"], "string");
  EXPECT_EQ(fields["peers"]["items"]["type"], "string");
  EXPECT_EQ(fields["patches"]["additionalProperties"]["type"], "boolean");
  // Every field is there, and nothing else.
  EXPECT_EQ(fields.size() - 1 + fields["model"]["properties"].size(),
            loaded.fields.fields().size());
}

TEST(ConfigTest, AMissingFileIsNamed) {
  Loaded loaded;
  const absl::Status status = loaded.fields.LoadFile("/nonexistent/router.json");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nonexistent/router.json"));
}

}  // namespace
}  // namespace isthmus
