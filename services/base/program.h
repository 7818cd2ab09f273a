// SPDX-License-Identifier: Apache-2.0
// What every program of the project has: --version, --help, --print-config, --config FILE and
// --set key=value. Exit codes: 0 done, 2 bad command line or configuration, 1 anything else.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/config.h"

namespace CLI {  // NOLINT(readability-identifier-naming): the library's own name.
class App;
}

namespace isthmus {

// What one program can print besides, from its effective configuration.
struct PrintFlag {
  std::string flag;  // "--print-plan"
  std::string help;
  std::function<absl::StatusOr<std::string>()> print;  // The text for stdout, with its newline.
};

struct ProgramSpec {
  std::string name;     // "isthmus-router"
  std::string summary;  // One sentence for --help.
  std::vector<PrintFlag> prints = {};
};

// For a program that is set by its config file. Reads the command line into `fields`. Returns
// nothing when the program should run, or its exit code: after --version, --help, --print-config
// (the effective configuration, as JSON on stdout), --print-config-reference (a Markdown table) or
// --print-config-schema (a JSON Schema), after one of spec.prints, or after an error, which has
// been written to stderr.
std::optional<int> StartProgram(const ProgramSpec& spec, ConfigFields& fields, int argc,
                                const char* const* argv);

// For a tool with subcommands and options of its own: adds --version to `app`.
void AddVersionOption(CLI::App& app, const std::string& program);

// Parses; returns nothing when the program should run, or its exit code (0 after --help and
// --version, 2 after an error, which has been written to stderr).
std::optional<int> ParseCommandLine(CLI::App& app, int argc, const char* const* argv);

}  // namespace isthmus
