// SPDX-License-Identifier: Apache-2.0
// Detection of the encoder's generation from source text.
#include "services/text/encoder_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace isthmus::text {
namespace {

using ::testing::HasSubstr;

constexpr absl::string_view k0731 = R"(import json
# REASONING_EFFORT_MAX = "a comment"
REASONING_EFFORT_PROMPTS: Dict[str, str] = {
    "low": "",
    'high': (
        "Think \"hard\".\n"  # a comment
        "Always.\n\n"
    ),
    "max": ("Harder — \u2014 it's\\n"),
}
DEFAULT_REASONING_EFFORT = "low"
)";

TEST(EncoderProfileTest, Reads0731) {
  const auto profile = ParseEncoderSource(k0731);
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->generation, EncoderGeneration::k0731);
  EXPECT_EQ(profile->high_effort_prefix, "Think \"hard\".\nAlways.\n\n");
  EXPECT_EQ(profile->max_effort_prefix, "Harder — — it's\\n");
}

TEST(EncoderProfileTest, ReadsApril) {
  const auto profile = ParseEncoderSource(
      "X = 1\nREASONING_EFFORT_MAX = (\n    \"a\\n\"\n    'b'\n)\nVALID = {\"x\": 1}\n");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->generation, EncoderGeneration::kApril);
  EXPECT_EQ(profile->max_effort_prefix, "a\nb");
  EXPECT_EQ(profile->high_effort_prefix, std::nullopt);
}

TEST(EncoderProfileTest, RefusesWhatItCannotRead) {
  for (const absl::string_view source :
       {"", "x = 1\n", "  REASONING_EFFORT_MAX = \"indented\"\n", "REASONING_EFFORT_MAX = TEXT\n",
        "REASONING_EFFORT_MAX = f\"a\"\n", "REASONING_EFFORT_MAX = (\"a\"\n",
        "REASONING_EFFORT_MAX", "REASONING_EFFORT_MAX = \"open\n",
        "REASONING_EFFORT_MAX = \"\"\"a\"\"\"\n", "REASONING_EFFORT_MAX = \"\\q\"\n",
        "REASONING_EFFORT_MAX = \"a\" + X\n", "REASONING_EFFORT_MAX = (\"a\") + X\n",
        "REASONING_EFFORT_MAX = \n\"a\"\n", "REASONING_EFFORT_MAX = \"\\ud800\"\n",
        "REASONING_EFFORT_PROMPTS = {\"low\": \"\", \"high\": \"x\"}\n",
        "REASONING_EFFORT_PROMPTS = {\"low\": \"x\", \"high\": \"x\", \"max\": \"y\"}\n",
        "REASONING_EFFORT_PROMPTS = {\"low\" \"\"}\n", "REASONING_EFFORT_MAX = \"\xFF\"\n"}) {
    const auto profile = ParseEncoderSource(source);
    ASSERT_FALSE(profile.ok()) << source;
    EXPECT_THAT(std::string(profile.status().message()), HasSubstr("encoder file"));
  }
}

TEST(EncoderProfileTest, LooksIntoTheCheckpoint) {
  namespace fs = std::filesystem;
  const fs::path dir = fs::path(::testing::TempDir()) / "encoder_profile_test";
  fs::remove_all(dir);
  fs::create_directories(dir / "encoding");
  EXPECT_EQ(LoadEncoderProfile(dir)->generation, EncoderGeneration::kApril);
  EXPECT_EQ(LoadEncoderProfile(dir)->max_effort_prefix, std::nullopt);
  std::ofstream(dir / "encoding_dsv4.py") << k0731;
  EXPECT_EQ(LoadEncoderProfile(dir)->generation, EncoderGeneration::k0731);
  std::ofstream(dir / "encoding" / "encoding_dsv4.py") << "x = 1\n";
  EXPECT_THAT(std::string(LoadEncoderProfile(dir).status().message()),
              HasSubstr("encoding/encoding_dsv4.py"));
  fs::remove_all(dir);
}

}  // namespace
}  // namespace isthmus::text
