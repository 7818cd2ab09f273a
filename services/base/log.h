// SPDX-License-Identifier: Apache-2.0
// The log: one JSON object per line on stderr, in the order of its calls.
//
//   {"ts":"2026-01-31T12:00:00.123Z","level":"info","process":"router","msg":"...","key":value}
//
// Whoever logs about a request gives `request_id`. Prompt and reply text never go in: they belong
// to the client. Before SetUpLog the process name is "isthmus" and the level is info.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <variant>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace isthmus {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };

// A value as JSON will show it. The constructors keep `{"port", 80}` and `{"name", "x"}` short.
struct LogValue {
  LogValue(bool v) : value(v) {}                                  // NOLINT(google-explicit-*)
  LogValue(int v) : value(int64_t{v}) {}                          // NOLINT
  LogValue(int64_t v) : value(v) {}                               // NOLINT
  LogValue(uint32_t v) : value(uint64_t{v}) {}                    // NOLINT
  LogValue(uint64_t v) : value(v) {}                              // NOLINT
  LogValue(double v) : value(v) {}                                // NOLINT
  LogValue(const char* v) : value(std::string(v)) {}              // NOLINT
  LogValue(const std::string& v) : value(v) {}                    // NOLINT
  LogValue(absl::string_view v) : value(std::string(v)) {}        // NOLINT
  LogValue(absl::Duration v) : value(absl::FormatDuration(v)) {}  // NOLINT

  std::variant<bool, int64_t, uint64_t, double, std::string> value;
};

struct LogField {
  absl::string_view key;
  LogValue value;
};

// Names the process in every record and sets the lowest level that is written. Called by main.
void SetUpLog(absl::string_view process, LogLevel level);

// "debug", "info", "warning" or "error".
absl::string_view LogLevelName(LogLevel level);

void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields = {});

inline void LogInfo(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kInfo, message, fields);
}
inline void LogWarning(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kWarning, message, fields);
}
inline void LogError(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kError, message, fields);
}

// One record without its line end. Bytes that are not UTF-8 become U+FFFD, so that a line is
// always valid JSON.
std::string FormatLogRecord(absl::Time time, LogLevel level, absl::string_view process,
                            absl::string_view message, std::initializer_list<LogField> fields);

}  // namespace isthmus
