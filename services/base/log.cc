// SPDX-License-Identifier: Apache-2.0
#include "services/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "services/base/mutex.h"

namespace isthmus {
namespace {

constexpr absl::string_view kLevelNames[] = {"debug", "info", "warning", "error"};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

struct LogState {
  LogState() : logger("isthmus", std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
    logger.set_pattern("%v");  // The whole line is ours; spdlog owns the stream and its lock.
    logger.set_level(spdlog::level::info);
    logger.flush_on(spdlog::level::debug);
  }

  Mutex mutex;
  std::string process = "isthmus";  // Guarded by mutex.
  spdlog::logger logger;
};

// Never destroyed: threads may log until the very end.
LogState& State() {
  static LogState* state = new LogState;
  return *state;
}

std::string JsonString(absl::string_view text) {
  return nlohmann::json(std::string(text))
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string JsonValue(const LogValue& value) {
  return std::visit(
      [](const auto& v) -> std::string {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, std::string>) {
          return JsonString(v);
        } else {
          return nlohmann::json(v).dump();  // A NaN or infinity becomes null.
        }
      },
      value.value);
}

}  // namespace

absl::string_view LogLevelName(LogLevel level) { return kLevelNames[static_cast<int>(level)]; }

std::string FormatLogRecord(absl::Time time, LogLevel level, absl::string_view process,
                            absl::string_view message, std::initializer_list<LogField> fields) {
  std::string line = "{\"ts\":\"";
  line += absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone());
  line += "\",\"level\":\"";
  line.append(LogLevelName(level).data(), LogLevelName(level).size());
  line += "\",\"process\":" + JsonString(process) + ",\"msg\":" + JsonString(message);
  for (const LogField& field : fields) {
    line += "," + JsonString(field.key) + ":" + JsonValue(field.value);
  }
  line += "}";
  return line;
}

void SetUpLog(absl::string_view process, LogLevel level) {
  LogState& state = State();
  MutexLock lock(state.mutex);
  state.process = std::string(process);
  state.logger.set_level(ToSpdlog(level));
}

void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields) {
  LogState& state = State();
  if (!state.logger.should_log(ToSpdlog(level))) return;
  std::string process;
  {
    // No MutexLock: whether a line is logged must not change the order of a simulation.
    const std::unique_lock<Mutex> lock(state.mutex);
    process = state.process;
  }
  // The string_view overload takes the line as it is; braces in it are not format marks.
  state.logger.log(ToSpdlog(level), spdlog::string_view_t(FormatLogRecord(
                                        absl::Now(), level, process, message, fields)));
}

}  // namespace isthmus
