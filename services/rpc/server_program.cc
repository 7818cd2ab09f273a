// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/server_program.h"

#include <optional>

#include "services/base/log.h"
#include "services/base/stop_signal.h"
#include "services/rpc/server.h"

namespace isthmus::rpc {
namespace {

LogLevel LevelOf(const std::string& name) {
  for (const LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning}) {
    if (LogLevelName(level) == name) return level;
  }
  return LogLevel::kError;
}

}  // namespace

int RunServer(const ProgramSpec& spec, ConfigFields& fields, const std::string& log_level, int argc,
              const char* const* argv, absl::FunctionRef<absl::Status()> serve) {
  if (const std::optional<int> code = StartProgram(spec, fields, argc, argv)) return *code;
  SetUpLog(spec.name, LevelOf(log_level));
  BlockStopSignals();
  RouteGrpcLog();
  const absl::Status status = serve();
  if (status.ok()) return 0;
  LogError("cannot serve", {{"status", status.ToString()}});
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ? 2 : 1;
}

}  // namespace isthmus::rpc
