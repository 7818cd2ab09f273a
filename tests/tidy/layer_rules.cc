// SPDX-License-Identifier: Apache-2.0
// The arrows of ARCHITECTURE.md, "Folders", as data, and the rules that follow from them.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "tests/tidy/rules.h"

namespace isthmus::tidy {
namespace {

constexpr absl::string_view kAllBelow = "*";

// One row of the table. A folder deeper in the tree comes before the one around it.
struct Unit {
  absl::string_view folder;
  int layer;
  std::vector<absl::string_view> may_use;  // Folders, each with all below it; or kAllBelow.
};

const std::vector<Unit>& Units() {
  static const std::vector<Unit> units = {
      {"proto", 0, {}},
      {"services/base", 0, {}},
      {"kernels/core", 10, {"services/base"}},
      {"services/text", 10, {"services/base"}},
      {"services/rpc", 10, {"services/base", "proto"}},
      {"kernels/testing", 15, {"services/base", "kernels/core"}},
      {"kernels/fused", 25, {"services/base", "kernels"}},
      {"kernels", 26, {"services/base", "kernels"}},
      {"services/kv", 20, {"services/base", "kernels/core"}},
      {"kvtransfer", 20, {"services/base", "proto", "kernels/core"}},
      {"services/model/testing", 35, {"services/base", "kernels", "services/model"}},
      {"services/model", 30, {"services/base", "kernels"}},
      {"services/engine", 40, {"services/base", "kernels", "services/kv", "services/model"}},
      {"services/worker", 50, {kAllBelow}},
      {"router", 50, {"services/base", "proto", "services/text", "services/rpc"}},
      {"services/prefill", 60, {kAllBelow}},
      {"services/decode", 60, {kAllBelow}},
      {"services/ctl", 70, {"services/base", "proto", "services/text", "services/rpc"}},
      {"services/diag", 65, {kAllBelow}},
      {"tests/tools", 65, {kAllBelow}},
      {"tests", 70, {kAllBelow}},
  };
  return units;
}

bool LiesIn(absl::string_view path, absl::string_view folder) {
  return path == folder || (absl::StartsWith(path, folder) && path[folder.size()] == '/');
}

// The unit a path belongs to: an operation is a unit of its own, as is a folder of tests.
struct Home {
  const Unit* row = nullptr;
  std::string name;
  int layer = -1;
};

Home HomeOf(absl::string_view path) {
  for (const Unit& unit : Units()) {
    if (!LiesIn(path, unit.folder)) continue;
    Home home = {&unit, std::string(unit.folder), unit.layer};
    if (unit.folder == "kernels" || unit.folder == "kernels/fused" || unit.folder == "tests") {
      const size_t start = unit.folder.size() + 1;
      const size_t end = path.find('/', start);
      if (end != absl::string_view::npos) {
        home.name = std::string(path.substr(0, end));
        if (unit.folder == "kernels") home.layer = 20;  // kernels/<operation>
      }
    }
    return home;
  }
  return {};
}

// Why `from` may not include `to`, or "" when it may.
std::string Objection(bool is_test, const Home& from, const Home& to) {
  if (from.name == to.name) return "";
  if (BaseNameOf(to.name) == "testing") {  // Inputs of tests, beside what they test.
    return is_test ? "" : absl::StrCat(to.name, " is for tests only");
  }
  if (to.layer >= from.layer) {
    return absl::StrCat(from.name, " (layer ", from.layer, ") may not include ", to.name,
                        " (layer ", to.layer, ")");
  }
  // A test may look at any lower layer; the product only at those its row names.
  if (is_test || from.row->may_use == std::vector<absl::string_view>{kAllBelow}) return "";
  for (const absl::string_view folder : from.row->may_use) {
    if (LiesIn(to.name, folder)) return "";
  }
  return absl::StrCat("the row of ", from.name, " in ARCHITECTURE.md does not name ", to.name);
}

// One isthmus_library or isthmus_program call: its layer and the first source named.
struct CMakeTarget {
  std::string name;
  int line = 0;
  bool is_program = false;
  int layer = -1;
  std::string first_source;
};

// A program may stand above the library of its folder, as isthmus-diag does, and a test's tool
// above another's.
bool NamesLayer(const CMakeTarget& target, const Home& home) {
  const bool may_be_above = target.is_program || home.row->folder == "tests";
  return may_be_above ? target.layer >= home.layer : target.layer == home.layer;
}

std::vector<std::string> Words(absl::string_view line) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : line) {
    if (c == '#') break;
    if (c == ' ' || c == '(' || c == ')' || c == '\t') {
      if (!word.empty()) words.push_back(word);
      word.clear();
    } else {
      word += c;
    }
  }
  if (!word.empty()) words.push_back(word);
  return words;
}

std::vector<CMakeTarget> TargetsOf(const SourceFile& file) {
  std::vector<CMakeTarget> targets;
  bool inside = false;
  std::string previous;
  for (size_t i = 0; i < file.lines.size(); ++i) {
    const absl::string_view line = file.lines[i];
    if (absl::StartsWith(line, "isthmus_library(") || absl::StartsWith(line, "isthmus_program(") ||
        absl::StartsWith(absl::StripLeadingAsciiWhitespace(line), "isthmus_library(")) {
      targets.push_back({});
      targets.back().line = static_cast<int>(i) + 1;
      targets.back().is_program = absl::StrContains(line, "isthmus_program(");
      inside = true;
      previous.clear();
    }
    if (!inside) continue;
    for (const std::string& word : Words(line)) {
      CMakeTarget& target = targets.back();
      if (previous == "isthmus_library" || previous == "isthmus_program") target.name = word;
      if (previous == "LAYER") target.layer = std::atoi(word.c_str());
      if (previous == "SRCS" && target.first_source.empty()) target.first_source = word;
      previous = word;
    }
    if (absl::StrContains(line, ")")) inside = false;
  }
  return targets;
}

bool NamesWord(const SourceFile& file, absl::string_view word) {
  return std::any_of(file.lines.begin(), file.lines.end(),
                     [&](const std::string& line) { return absl::StrContains(line, word); });
}

}  // namespace

std::vector<Finding> CheckIncludeArrows(const SourceTree& tree) {
  std::vector<Finding> findings;
  const std::set<std::string> tests = TestFiles(tree);
  for (const SourceFile& file : tree.files()) {
    if (!IsCpp(file.path)) continue;
    const bool is_test = tests.contains(file.path);
    const Home from = HomeOf(file.path);
    if (from.row == nullptr) {
      findings.push_back({file.path, 0, "lies in no folder of ARCHITECTURE.md"});
      continue;
    }
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const std::string path(IncludedPath(file.lines[i]));
      const Home to = HomeOf(path);
      if (to.row == nullptr) continue;  // A library's header.
      std::string objection = Objection(is_test, from, to);
      if (!is_test && tests.contains(path)) objection = absl::StrCat(path, " is for tests only");
      if (!objection.empty()) {
        findings.push_back({file.path, static_cast<int>(i) + 1, objection});
      }
    }
  }
  return findings;
}

std::vector<Finding> CheckCMakeLayers(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    if (BaseNameOf(file.path) != "CMakeLists.txt") continue;
    for (const CMakeTarget& target : TargetsOf(file)) {
      const std::string source = absl::StrCat(FolderOf(file.path), "/", target.first_source);
      const Home home = HomeOf(source);
      if (home.row == nullptr || NamesLayer(target, home)) continue;
      findings.push_back({file.path, target.line,
                          absl::StrCat(target.name, " names layer ", target.layer, ", but ",
                                       home.name, " is layer ", home.layer)});
    }
  }
  return findings;
}

std::vector<Finding> CheckNoOrphanSources(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    if (!absl::EndsWith(file.path, ".cc") && !absl::EndsWith(file.path, ".cu")) continue;
    bool named = false;
    for (absl::string_view folder = FolderOf(file.path); !named; folder = FolderOf(folder)) {
      const SourceFile* list =
          tree.Find(absl::StrCat(folder, folder.empty() ? "" : "/", "CMakeLists.txt"));
      const absl::string_view relative =
          absl::string_view(file.path).substr(folder.empty() ? 0 : folder.size() + 1);
      named = list != nullptr && NamesWord(*list, relative);
      if (folder.empty()) break;
    }
    if (!named) findings.push_back({file.path, 0, "is in no CMakeLists.txt, so nobody builds it"});
  }
  return findings;
}

}  // namespace isthmus::tidy
