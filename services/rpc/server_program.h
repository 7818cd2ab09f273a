// SPDX-License-Identifier: Apache-2.0
// What the mains of all server processes have in common: command line, log, signals, exit code.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "services/base/config.h"
#include "services/base/program.h"

namespace isthmus::rpc {

// The whole of main. Reads the command line into `fields`, then runs `serve`, with stop signals
// blocked for stop_signal.h. `log_level` is one of the fields: a level by name. Returns the exit
// code: 2 when `serve` says InvalidArgument or NotFound, which a supervisor need not try again.
int RunServer(const ProgramSpec& spec, ConfigFields& fields, const std::string& log_level, int argc,
              const char* const* argv, absl::FunctionRef<absl::Status()> serve);

}  // namespace isthmus::rpc
