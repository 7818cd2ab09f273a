// SPDX-License-Identifier: Apache-2.0
#include "services/base/program.h"

#include <CLI/CLI.hpp>
#include <deque>
#include <iostream>
#include <vector>

#include "services/base/processor.h"
#include "services/base/version.h"

namespace isthmus {
namespace {

constexpr int kExitBadInput = 2;

// Applies the file first and then the assignments in their order, so that the last one wins.
absl::Status ReadConfig(const std::string& path, const std::vector<std::string>& assignments,
                        ConfigFields& fields) {
  if (!path.empty()) {
    const absl::Status status = fields.LoadFile(path);
    if (!status.ok()) return status;
  }
  for (const std::string& assignment : assignments) {
    const absl::Status status = fields.Set(assignment);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

int Print(const std::string& program, const PrintFlag& flag) {
  const absl::StatusOr<std::string> text = flag.print();
  if (text.ok()) {
    std::cout << *text;
    return 0;
  }
  std::cerr << program << ": " << text.status().message() << "\n";
  return absl::IsInvalidArgument(text.status()) || absl::IsNotFound(text.status()) ? kExitBadInput
                                                                                   : 1;
}

}  // namespace

void AddVersionOption(CLI::App& app, const std::string& program) {
  LinkProcessorCheck();
  app.set_version_flag("--version", VersionLine(program),
                       "Print the version, the commit and the protocol version");
}

std::optional<int> ParseCommandLine(CLI::App& app, int argc, const char* const* argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error, std::cout, std::cerr) == 0 ? 0 : kExitBadInput;
  }
  return std::nullopt;
}

std::optional<int> StartProgram(const ProgramSpec& spec, ConfigFields& fields, int argc,
                                const char* const* argv) {
  CLI::App app(spec.summary, spec.name);
  AddVersionOption(app, spec.name);
  std::string path;
  std::vector<std::string> assignments;
  bool wants_config = false;
  bool wants_reference = false;
  bool wants_schema = false;
  app.add_option("--config", path, "JSON file with the fields below");
  // One value per --set, so that a value never swallows what follows it.
  app.add_option("--set", assignments, "key=value; after the file, may be repeated")
      ->expected(1)
      ->take_all();
  app.add_flag("--print-config", wants_config, "Print the effective configuration and exit");
  app.add_flag("--print-config-reference", wants_reference,
               "Print all fields as a Markdown table and exit");
  app.add_flag("--print-config-schema", wants_schema,
               "Print a JSON Schema of the config file and exit");
  std::deque<bool> wants(spec.prints.size(), false);
  for (size_t i = 0; i < wants.size(); ++i) {
    app.add_flag(spec.prints[i].flag, wants[i], spec.prints[i].help);
  }
  app.footer("Fields of the configuration:\n" + fields.HelpText());

  if (const std::optional<int> code = ParseCommandLine(app, argc, argv)) return code;
  if (wants_reference) {
    std::cout << fields.ToMarkdown();
    return 0;
  }
  if (wants_schema) {
    std::cout << fields.ToJsonSchema();
    return 0;
  }
  const absl::Status status = ReadConfig(path, assignments, fields);
  if (!status.ok()) {
    std::cerr << spec.name << ": " << status.message() << "\n";
    return kExitBadInput;
  }
  if (wants_config) {
    std::cout << fields.ToJson();
    return 0;
  }
  for (size_t i = 0; i < wants.size(); ++i) {
    if (wants[i]) return Print(spec.name, spec.prints[i]);
  }
  return std::nullopt;
}

}  // namespace isthmus
