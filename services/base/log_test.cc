// SPDX-License-Identifier: Apache-2.0
#include "services/base/log.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace isthmus {
namespace {

TEST(LogTest, ARecordIsOneJsonObjectInFixedOrder) {
  const absl::Time time = absl::FromUnixMillis(1769860800123);  // 2026-01-31 12:00:00.123 UTC
  EXPECT_EQ(FormatLogRecord(time, LogLevel::kInfo, "router", "listening",
                            {{"request_id", "r-1"}, {"port", 80}, {"share", 0.5}, {"tls", false}}),
            R"({"ts":"2026-01-31T12:00:00.123Z","level":"info","process":"router",)"
            R"("msg":"listening","request_id":"r-1","port":80,"share":0.5,"tls":false})");
}

TEST(LogTest, HostileTextStaysInsideItsString) {
  const std::string text = "a\"b\\c\n{}\x01\xff\xc3";
  const std::string line =
      FormatLogRecord(absl::UnixEpoch(), LogLevel::kError, "p", text, {{text, text}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const nlohmann::json parsed = nlohmann::json::parse(line);
  EXPECT_EQ(parsed["msg"], "a\"b\\c\n{}\x01\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(parsed["level"], "error");
}

}  // namespace
}  // namespace isthmus
