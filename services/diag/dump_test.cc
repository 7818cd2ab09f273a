// SPDX-License-Identifier: Apache-2.0
// What dump refuses. What it writes is held against golden files in tests/fidelity.
#include "services/diag/dump.h"

#include <gtest/gtest.h>

#include <fstream>

#include "services/diag/input_streams.h"
#include "services/model/safetensors_writer.h"

namespace isthmus::diag {
namespace {

std::string TokenFile(const std::string& text) {
  const std::string path = testing::TempDir() + "isthmus-dump-test-tokens";
  std::ofstream(path) << text;
  return path;
}

TEST(DumpTest, ReadsIdsSeparatedByAnyWhiteSpace) {
  EXPECT_EQ(*ReadTokenFile(TokenFile("1 2\n 30\t4\n")), (std::vector<int32_t>{1, 2, 30, 4}));
  EXPECT_TRUE(ReadTokenFile(TokenFile(""))->empty());
}

TEST(DumpTest, NamesTheTokenThatIsNoId) {
  for (const char* text : {"1 x", "1 -2", "1 2.5", "1 99999999999"}) {
    const auto tokens = ReadTokenFile(TokenFile(text));
    ASSERT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(tokens.status().message().find("token 1"), absl::string_view::npos);
  }
  EXPECT_EQ(ReadTokenFile("/nonexistent").status().code(), absl::StatusCode::kNotFound);
}

TEST(DumpTest, KnowsItsSets) {
  EXPECT_EQ(*ParseDumpSet("stages"), DumpSet::kStages);
  EXPECT_FALSE(ParseDumpSet("everything").ok());
}

class InputStreamsTest : public testing::Test {
 protected:
  // layer0.streams [3, 4, 2] f32.
  void SetUp() override {
    path_ = testing::TempDir() + "isthmus-input-streams-test.safetensors";
    std::vector<float> values(24);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
    const std::vector<std::byte> copy(bytes, bytes + 4 * values.size());
    const model::NamedTensor tensor = {"layer0.streams", "F32", {3, 4, 2}, copy};
    ASSERT_TRUE(model::WriteSafetensors(path_, {&tensor, 1}, {}).ok());
  }
  std::string path_;
};

TEST_F(InputStreamsTest, LayerNPlusOneStartsFromLayerN) {
  const auto streams = InputStreams::Load(path_, 2, 3, 8);
  ASSERT_TRUE(streams.ok()) << streams.status();
  EXPECT_EQ((*streams)->Rows(0, 1), nullptr);
  EXPECT_EQ((*streams)->Rows(1, 2)[0], 16.0f);
}

TEST_F(InputStreamsTest, NamesTheMissingLayerAndTheWrongShape) {
  const auto missing = InputStreams::Load(path_, 3, 3, 8);
  EXPECT_NE(missing.status().message().find("layer1.streams is missing"), absl::string_view::npos);
  const auto short_file = InputStreams::Load(path_, 2, 4, 8);
  EXPECT_NE(short_file.status().message().find("[3, 4, 2]"), absl::string_view::npos);
}

}  // namespace
}  // namespace isthmus::diag
