// SPDX-License-Identifier: Apache-2.0
// Runs the kept seeds of the fuzz targets once, and their promises on full-size files.
#include <gtest/gtest.h>

#include <filesystem>

#include "services/text/fuzz_targets.h"
#include "services/text/testing_files.h"

namespace isthmus::text {
namespace {

// Returns how many seeds ran.
int RunSeeds(const char* target, void (*run)(absl::string_view)) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(
           std::filesystem::path(ISTHMUS_SOURCE_DIR "/services/text/fuzz_seeds") / target)) {
    const auto seed = ReadFile(entry.path().string());
    EXPECT_TRUE(seed.has_value()) << entry.path();
    if (!seed.has_value()) continue;
    EXPECT_LE(seed->size(), kMaxFuzzBytes) << entry.path();
    run(*seed);
    ++count;
  }
  return count;
}

TEST(FuzzSeedsTest, HoldOnceMore) {
  EXPECT_GE(RunSeeds("tokenizer_fuzz", FuzzTokenizer), 5);
  EXPECT_GE(RunSeeds("chat_fuzz", FuzzChat), 8);
  EXPECT_GE(RunSeeds("reply_parser_fuzz", FuzzReplyParser), 8);
}

}  // namespace
}  // namespace isthmus::text
