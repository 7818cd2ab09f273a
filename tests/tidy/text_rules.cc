// SPDX-License-Identifier: Apache-2.0
// Rules about the text of files: lengths, heads, words that do not belong in a tree.
#include <cctype>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/tidy/rules.h"

namespace isthmus::tidy {
namespace {

constexpr size_t kMaxFileLines = 500;
constexpr size_t kMaxColumns = 100;

// Characters of UTF-8 text: bytes that do not continue one.
size_t Columns(absl::string_view line) {
  size_t columns = 0;
  for (const char c : line) columns += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return columns;
}

bool IsComment(absl::string_view line) {
  return absl::StartsWith(line, "//") || absl::StartsWith(line, "/*") ||
         absl::StartsWith(line, "#");
}

// "TODO(#12)": the word at `at` is followed by an issue's number.
bool NamesAnIssue(absl::string_view line, size_t word_end) {
  const absl::string_view rest = line.substr(word_end);
  return absl::StartsWith(rest, "(#") && rest.size() > 2 &&
         std::isdigit(static_cast<unsigned char>(rest[2]));
}

// Built from halves, so that this file does not hold what it forbids.
std::vector<std::string> UnfinishedWords() {
  return {absl::StrCat("TO", "DO"), absl::StrCat("FIX", "ME"), absl::StrCat("XX", "X")};
}

std::vector<std::string> MachinePaths() {
  return {absl::StrCat("/wo", "rk/"),  absl::StrCat("/fa", "rm/"),
          absl::StrCat("/tmp/", "w/"), absl::StrCat("/tmp/", "bash_jobs"),
          absl::StrCat("/ho", "me/"),  absl::StrCat("/ro", "ot/")};
}

}  // namespace

std::string ToString(const Finding& finding) {
  return absl::StrCat(finding.path, ":", finding.line, ": ", finding.message);
}

std::vector<Finding> CheckLengths(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    if (!IsSource(file)) continue;
    if (file.lines.size() >= kMaxFileLines) {
      findings.push_back(
          {file.path, 0,
           absl::StrCat("has ", file.lines.size(), " lines; the limit is ", kMaxFileLines - 1)});
    }
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const size_t columns = Columns(file.lines[i]);
      if (columns <= kMaxColumns) continue;
      findings.push_back({file.path, static_cast<int>(i) + 1,
                          absl::StrCat("has ", columns, " columns; the limit is ", kMaxColumns)});
    }
  }
  return findings;
}

std::vector<Finding> CheckFileHeads(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    if (!IsSource(file)) continue;
    size_t first = 0;
    if (!file.lines.empty() && absl::StartsWith(file.lines[0], "#!")) first = 1;
    if (file.lines.size() <= first ||
        !absl::StrContains(file.lines[first], "SPDX-License-Identifier: Apache-2.0")) {
      findings.push_back({file.path, static_cast<int>(first) + 1, "lacks the SPDX line"});
      continue;
    }
    if (!IsHeader(file.path)) continue;
    size_t line = first + 1;
    while (line < file.lines.size() && IsComment(file.lines[line]) &&
           !absl::StartsWith(file.lines[line], "#")) {
      ++line;
    }
    if (line == first + 1) {
      findings.push_back({file.path, static_cast<int>(line) + 1,
                          "a header opens with a comment that says what it is"});
    }
    bool once = absl::EndsWith(file.path, "-inl.h");  // Included once per SIMD target.
    for (const std::string& text : file.lines) once = once || text == "#pragma once";
    if (!once) findings.push_back({file.path, 0, "lacks #pragma once"});
  }
  return findings;
}

std::vector<Finding> CheckUnfinishedWords(const SourceTree& tree) {
  std::vector<Finding> findings;
  const std::vector<std::string> words = UnfinishedWords();
  for (const SourceFile& file : tree.files()) {
    for (size_t i = 0; i < file.lines.size(); ++i) {
      for (const std::string& word : words) {
        const size_t at = FindWord(file.lines[i], word);
        if (at == absl::string_view::npos) continue;
        if (NamesAnIssue(file.lines[i], at + word.size())) continue;
        findings.push_back(
            {file.path, static_cast<int>(i) + 1,
             absl::StrCat(word, " without an issue's number, as in ", word, "(#12)")});
      }
    }
  }
  return findings;
}

std::vector<Finding> CheckNoMachinePaths(const SourceTree& tree) {
  std::vector<Finding> findings;
  const std::vector<std::string> paths = MachinePaths();
  for (const SourceFile& file : tree.files()) {
    for (size_t i = 0; i < file.lines.size(); ++i) {
      for (const std::string& path : paths) {
        // "tests/network/" is no such path: what counts starts at a slash that starts a path.
        const size_t at = file.lines[i].find(path);
        if (at == std::string::npos) continue;
        const char before = at == 0 ? ' ' : file.lines[i][at - 1];
        if (std::isalnum(static_cast<unsigned char>(before)) || before == '.' || before == '}') {
          continue;
        }
        findings.push_back({file.path, static_cast<int>(i) + 1,
                            absl::StrCat("names ", path, ", a path of one machine")});
      }
    }
  }
  return findings;
}

}  // namespace isthmus::tidy
