// SPDX-License-Identifier: Apache-2.0
// isthmus-diag: one tool, one subcommand per question. Each subcommand declares its options and
// its run function in a file of its own.
#include <iostream>

#include "CLI/CLI.hpp"
#include "services/base/processor.h"
#include "services/base/program.h"
#include "services/diag/commands.h"

// NOLINTNEXTLINE(bugprone-exception-escape): an unforeseen exception ends the program.
int main(int argc, char** argv) {
  CLI::App app("isthmus-diag: look into the model, offline or through a cluster");
  isthmus::AddVersionOption(app, "isthmus-diag");
  app.require_subcommand(1);
  absl::Status status;
  isthmus::diag::AddDumpCommand(app, status);
  isthmus::diag::AddGenerateCommand(app, status);
  isthmus::diag::AddRecallCommand(app, status);
  isthmus::diag::AddBenchCommand(app, status);
  isthmus::diag::AddPatchesCommand(app);
  if (const std::optional<int> code = isthmus::ParseCommandLine(app, argc, argv)) return *code;
  if (status.ok()) return 0;
  std::cerr << "isthmus-diag: " << status.message() << "\n";
  return status.code() == absl::StatusCode::kInvalidArgument ||
                 status.code() == absl::StatusCode::kNotFound
             ? 2
             : 1;
}
