// SPDX-License-Identifier: Apache-2.0
#include "services/base/byte_size.h"

#include "gtest/gtest.h"

namespace isthmus {
namespace {

TEST(ByteSizeTest, ReadsNumbersWithAndWithoutUnits) {
  EXPECT_EQ(*ParseByteSize("0"), 0);
  EXPECT_EQ(*ParseByteSize("1048576"), 1048576);
  EXPECT_EQ(*ParseByteSize("7B"), 7);
  EXPECT_EQ(*ParseByteSize("96GiB"), int64_t{96} << 30);
  EXPECT_EQ(*ParseByteSize("80GB"), 80'000'000'000);
  EXPECT_EQ(*ParseByteSize("8388607TiB"), int64_t{8388607} << 40);
}

TEST(ByteSizeTest, RefusesWhatIsNoSizeWithTheText) {
  for (const char* text : {"", "GiB", "-1", "1.5GiB", "96 GiB", "96gib", "96G",
                           "9223372036854775808", "8388608TiB", "0x10", "1e9"}) {
    const absl::Status status = ParseByteSize(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find(text), absl::string_view::npos);
  }
}

TEST(ByteSizeTest, WritesThemForPeople) {
  EXPECT_EQ(FormatByteSize(0), "0 B");
  EXPECT_EQ(FormatByteSize(1023), "1023 B");
  EXPECT_EQ(FormatByteSize(1536), "1.50 KiB");
  EXPECT_EQ(FormatByteSize(int64_t{96} << 30), "96.00 GiB");
  EXPECT_EQ(FormatByteSize(int64_t{2048} << 40), "2048.00 TiB");
}

}  // namespace
}  // namespace isthmus
