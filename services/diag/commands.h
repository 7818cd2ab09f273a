// SPDX-License-Identifier: Apache-2.0
// The subcommands of isthmus-diag. Each adds itself to the app; when it was chosen it runs while
// the command line is parsed and leaves its result in `status`: InvalidArgument and NotFound (bad
// input) end the program with 2, any other error with 1.
#pragma once

#include "absl/status/status.h"

namespace CLI {  // NOLINT(readability-identifier-naming): the library's own name.
class App;
}

namespace isthmus::diag {

void AddDumpCommand(CLI::App& app, absl::Status& status);
void AddGenerateCommand(CLI::App& app, absl::Status& status);
void AddRecallCommand(CLI::App& app, absl::Status& status);
void AddBenchCommand(CLI::App& app, absl::Status& status);
// Those of bench that measure decode steps of an engine in this process.
void AddDecodeBenchCommands(CLI::App* bench, absl::Status& status);
// Those of bench that need a GPU.
void AddDeviceBenchCommands(CLI::App* bench, absl::Status& status);
void AddPatchesCommand(CLI::App& app);

}  // namespace isthmus::diag
