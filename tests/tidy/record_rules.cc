// SPDX-License-Identifier: Apache-2.0
// Rules about documents and about lists that must be complete.
#include <cctype>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "tests/tidy/rules.h"

namespace isthmus::tidy {
namespace {

size_t MaxLinesOf(absl::string_view path) {
  if (path == "README.md") return 150;
  if (path == "ARCHITECTURE.md") return 300;
  if (BaseNameOf(path) == "README.md") return 60;
  return 0;
}

bool IsDecisionRecord(absl::string_view path) {
  return absl::StrContains(path, "decisions/") && absl::EndsWith(path, ".md");
}

// Whether any other file names `word`.
bool NamedElsewhere(const SourceTree& tree, absl::string_view word, absl::string_view own_path) {
  for (const SourceFile& file : tree.files()) {
    if (file.path == own_path) continue;
    for (const std::string& line : file.lines) {
      if (absl::StrContains(line, word)) return true;
    }
  }
  return false;
}

// "router/place.cc" and "router/" do; "KvHandoff", ".venv" and "kernels/<operation>/" do not.
bool LooksLikePath(absl::string_view text) {
  if (!absl::StrContains(text, "/") || text.find_first_of(" <>=$*:") != absl::string_view::npos) {
    return false;
  }
  return !absl::StartsWith(text, "build/") && !absl::StartsWith(text, "fuzz_seeds/") &&
         text != "testing/";
}

// The path itself, or a file below it.
bool HasPath(const SourceTree& tree, absl::string_view path) {
  absl::ConsumeSuffix(&path, "/");
  for (const SourceFile& file : tree.files()) {
    absl::string_view rest = file.path;
    if (absl::ConsumePrefix(&rest, path) && (rest.empty() || rest[0] == '/')) return true;
  }
  return false;
}

// The string literal that follows `field` in the lines from `from` on, within `reach` lines; false
// when there is none.
bool FieldLiteral(const std::vector<std::string>& lines, size_t from, absl::string_view field,
                  size_t reach, std::string* value) {
  for (size_t i = from; i < lines.size() && i < from + reach; ++i) {
    size_t at = lines[i].find(std::string(field));
    if (at == std::string::npos) continue;
    for (size_t j = i; j < lines.size() && j < i + 2; ++j, at = 0) {
      const size_t open = lines[j].find('"', at);
      if (open == std::string::npos) continue;
      *value = lines[j].substr(open + 1, lines[j].find('"', open + 1) - open - 1);
      return true;
    }
  }
  return false;
}

bool HasUnit(absl::string_view metric) {
  absl::ConsumeSuffix(&metric, "_total");
  for (const absl::string_view unit : {"_seconds", "_bytes", "_tokens", "_ratio", "_pages",
                                       "_slots", "_sequences", "_transfers", "_routers"}) {
    if (absl::EndsWith(metric, unit)) return true;
  }
  return false;
}

// A metric counts something (…_failures_total), ends in its base unit or says whether (…_is_live).
bool IsMetricName(absl::string_view name) {
  return absl::StartsWith(name, "isthmus_") &&
         (absl::EndsWith(name, "_total") || HasUnit(name) || absl::StrContains(name, "_num_") ||
          absl::StrContains(name, "_is_") || absl::EndsWith(name, "_info"));
}

void CheckMetric(const SourceFile& file, size_t i, std::vector<Finding>* findings) {
  const int line = static_cast<int>(i) + 1;
  std::string name;
  std::string help;
  if (!FieldLiteral(file.lines, i, ".name", 8, &name) || !IsMetricName(name)) {
    findings->push_back({file.path, line,
                         absl::StrCat("metric '", name,
                                      "' must read isthmus_<process>_<quantity>_<unit>[_total]")});
  }
  if (!FieldLiteral(file.lines, i, ".help", 8, &help) || help.size() < 10) {
    findings->push_back({file.path, line, absl::StrCat("metric '", name, "' has no help text")});
  }
}

void CheckPatch(const SourceTree& tree, const SourceFile& file, size_t i,
                std::vector<Finding>* findings) {
  const int line = static_cast<int>(i) + 1;
  std::string summary;
  std::string test;
  std::string decision;
  if (!FieldLiteral(file.lines, i, ".summary", 14, &summary) || summary.size() < 10) {
    findings->push_back({file.path, line, "a patch says in one sentence what it changes"});
  }
  if (!FieldLiteral(file.lines, i, ".test", 14, &test) || !NamedElsewhere(tree, test, file.path)) {
    findings->push_back({file.path, line, absl::StrCat("no file has the suite '", test, "'")});
  }
  if (!FieldLiteral(file.lines, i, ".decision", 14, &decision) || tree.Find(decision) == nullptr) {
    findings->push_back({file.path, line, absl::StrCat("no decision record '", decision, "'")});
  }
}

// The literals of one `visit("field", value, range, "help")` call that starts at line `i`.
size_t NumLiterals(const std::vector<std::string>& lines, size_t i) {
  size_t quotes = 0;
  for (size_t j = i; j < lines.size() && j < i + 8; ++j) {
    for (size_t k = 0; k < lines[j].size(); ++k) {
      quotes += lines[j][k] == '"' && (k == 0 || lines[j][k - 1] != '\\');
    }
    if (absl::StrContains(lines[j], ");")) break;
  }
  return quotes / 2;
}

}  // namespace

std::vector<Finding> CheckDocuments(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    const size_t max_lines = MaxLinesOf(file.path);
    if (max_lines > 0 && file.lines.size() > max_lines) {
      findings.push_back(
          {file.path, 0,
           absl::StrCat("has ", file.lines.size(), " lines; the limit is ", max_lines)});
    }
    if (IsDecisionRecord(file.path) && BaseNameOf(file.path) != "README.md" &&
        !NamedElsewhere(tree, BaseNameOf(file.path), file.path)) {
      findings.push_back({file.path, 0, "no file links this record"});
    }
  }
  return findings;
}

std::vector<Finding> CheckNamedPaths(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const absl::string_view document : {"README.md", "ARCHITECTURE.md"}) {
    const SourceFile* file = tree.Find(document);
    for (size_t i = 0; file != nullptr && i < file->lines.size(); ++i) {
      const std::vector<absl::string_view> parts = absl::StrSplit(file->lines[i], '`');
      for (size_t j = 1; j < parts.size(); j += 2) {  // Between two backticks.
        if (!LooksLikePath(parts[j]) || HasPath(tree, parts[j])) continue;
        findings.push_back({file->path, static_cast<int>(i) + 1,
                            absl::StrCat("names ", parts[j], ", which does not exist")});
      }
    }
  }
  return findings;
}

std::vector<Finding> CheckFuzzSeeds(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    absl::string_view stem = file.path;
    if (!absl::ConsumeSuffix(&stem, "_fuzz.cc")) continue;
    const std::string folder = absl::StrCat(FolderOf(stem), "/fuzz_seeds/", BaseNameOf(stem));
    if (!HasPath(tree, folder) && !HasPath(tree, folder + "_fuzz")) {
      findings.push_back({file.path, 0, absl::StrCat("has no seeds in ", folder, "/")});
    }
  }
  return findings;
}

std::vector<Finding> CheckRegistries(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    if (!IsCpp(file.path) || IsTestCode(file.path)) continue;
    const std::vector<std::string> code = CodeOnly(file);
    for (size_t i = 0; i < code.size(); ++i) {
      const absl::string_view line = code[i];
      if (absl::StrContains(line, "constexpr MetricSpec k")) CheckMetric(file, i, &findings);
      if (absl::StrContains(line, "constexpr Patch k")) CheckPatch(tree, file, i, &findings);
      if (absl::StrContains(line, " visit(\"") && NumLiterals(file.lines, i) < 2) {
        findings.push_back({file.path, static_cast<int>(i) + 1, "a config field has help text"});
      }
    }
  }
  return findings;
}

std::vector<Finding> CheckListsComplete(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    if (BaseNameOf(file.path) != "CMakeLists.txt" || file.path == "CMakeLists.txt") continue;
    const absl::string_view folder = FolderOf(file.path);
    const bool is_operation = absl::StartsWith(folder, "kernels/");
    const std::string list = is_operation ? "kernels/README.md" : "ARCHITECTURE.md";
    const absl::string_view name = is_operation ? BaseNameOf(folder) : folder;
    const SourceFile* document = tree.Find(list);
    bool named = false;
    if (document != nullptr) {
      for (const std::string& line : document->lines) {
        named = named || absl::StrContains(line, name);
      }
    }
    if (!named) findings.push_back({file.path, 0, absl::StrCat(list, " does not name ", name)});
  }
  return findings;
}

std::vector<Finding> CheckRunBits(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    const bool script = !file.lines.empty() && absl::StartsWith(file.lines[0], "#!");
    if (script && !file.executable) findings.push_back({file.path, 0, "has no run bit"});
  }
  return findings;
}

}  // namespace isthmus::tidy
