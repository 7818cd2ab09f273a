// SPDX-License-Identifier: Apache-2.0
#include "tests/tidy/source_tree.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace isthmus::tidy {
namespace {

namespace fs = std::filesystem;

bool IsIdentifierChar(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Folders that hold no hand-written file.
bool IsOutside(const std::string& name) {
  return absl::StartsWith(name, "build") || (name[0] == '.' && name != ".ci");
}

bool HasText(const std::string& path) {
  if (absl::EndsWith(path, ".safetensors") || absl::StrContains(path, "/fuzz_seeds/")) return false;
  return !(absl::StartsWith(path, "tests/golden/") && absl::EndsWith(path, ".json"));
}

SourceFile ReadFile(const fs::path& full, std::string path) {
  SourceFile file;
  file.executable = (fs::status(full).permissions() & fs::perms::owner_exec) != fs::perms::none;
  if (HasText(path)) {
    std::ifstream stream(full, std::ios::binary);
    for (std::string line; std::getline(stream, line);) file.lines.push_back(std::move(line));
  }
  file.path = std::move(path);
  return file;
}

// Where the blanking of comments and literals stands between two lines.
struct LexState {
  bool in_block_comment = false;
  std::string raw_end;  // ")delimiter\"" while inside a raw string, else empty.
};

// Blanks a quoted literal that opens at `i`; returns the position after it.
size_t BlankQuoted(const std::string& line, size_t i, std::string* out) {
  const char quote = line[i];
  size_t j = i + 1;
  while (j < line.size() && line[j] != quote) j += line[j] == '\\' ? 2 : 1;
  const size_t end = std::min(j, line.size());
  for (size_t k = i + 1; k < end; ++k) (*out)[k] = ' ';
  return end + 1;
}

// Blanks a raw string that opens at `i` (the R), which may run past the line.
size_t BlankRaw(const std::string& line, size_t i, LexState* state, std::string* out) {
  const size_t open = line.find('(', i);
  if (open == std::string::npos) return line.size();
  state->raw_end = ")" + line.substr(i + 2, open - i - 2) + "\"";
  const size_t close = line.find(state->raw_end, open);
  const size_t end = close == std::string::npos ? line.size() : close + state->raw_end.size();
  if (close != std::string::npos) state->raw_end.clear();
  for (size_t k = i; k < end; ++k) (*out)[k] = ' ';
  return end;
}

std::string BlankLine(const std::string& line, LexState* state) {
  std::string out = line;
  size_t i = 0;
  if (!state->raw_end.empty()) {
    const size_t close = line.find(state->raw_end);
    if (close == std::string::npos) return std::string(line.size(), ' ');
    i = close + state->raw_end.size();
    std::fill(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(i), ' ');
    state->raw_end.clear();
  }
  while (i < line.size()) {
    if (state->in_block_comment) {
      const size_t close = line.find("*/", i);
      const size_t end = close == std::string::npos ? line.size() : close + 2;
      for (size_t k = i; k < end; ++k) out[k] = ' ';
      state->in_block_comment = close == std::string::npos;
      i = end;
    } else if (line.compare(i, 2, "//") == 0) {
      for (size_t k = i; k < line.size(); ++k) out[k] = ' ';
      return out;
    } else if (line.compare(i, 2, "/*") == 0) {
      state->in_block_comment = true;
    } else if (line.compare(i, 2, "R\"") == 0 && (i == 0 || !IsIdentifierChar(line[i - 1]))) {
      i = BlankRaw(line, i, state, &out);
    } else if (line[i] == '"' || (line[i] == '\'' && (i == 0 || !IsIdentifierChar(line[i - 1])))) {
      i = BlankQuoted(line, i, &out);  // A quote after a digit separates thousands.
    } else {
      ++i;
    }
  }
  return out;
}

}  // namespace

SourceTree::SourceTree(std::vector<SourceFile> files) : files_(std::move(files)) {
  std::sort(files_.begin(), files_.end(),
            [](const SourceFile& a, const SourceFile& b) { return a.path < b.path; });
}

const SourceFile* SourceTree::Find(absl::string_view path) const {
  for (const SourceFile& file : files_) {
    if (file.path == path) return &file;
  }
  return nullptr;
}

SourceTree ReadSourceTree(const std::string& root) {
  std::vector<SourceFile> files;
  fs::recursive_directory_iterator it(root);
  for (; it != fs::recursive_directory_iterator(); ++it) {
    const std::string name = it->path().filename().string();
    if (it->is_directory()) {
      if (IsOutside(name)) it.disable_recursion_pending();
    } else if (it->is_regular_file()) {
      files.push_back(ReadFile(it->path(), fs::relative(it->path(), root).generic_string()));
    }
  }
  return SourceTree(std::move(files));
}

absl::string_view FolderOf(absl::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == absl::string_view::npos ? absl::string_view() : path.substr(0, slash);
}

absl::string_view BaseNameOf(absl::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == absl::string_view::npos ? path : path.substr(slash + 1);
}

bool IsHeader(absl::string_view path) {
  return absl::EndsWith(path, ".h") || absl::EndsWith(path, ".cuh");
}

bool IsCpp(absl::string_view path) {
  return IsHeader(path) || absl::EndsWith(path, ".cc") || absl::EndsWith(path, ".cu");
}

bool IsCMake(absl::string_view path) {
  return BaseNameOf(path) == "CMakeLists.txt" || absl::EndsWith(path, ".cmake");
}

bool IsSource(const SourceFile& file) {
  const bool script =
      !file.lines.empty() && absl::StartsWith(file.lines[0], "#!") && file.executable;
  for (const absl::string_view ending :
       {".proto", ".sh", ".py", ".yaml", ".yml", ".tpl", ".service.in"}) {
    if (absl::EndsWith(file.path, ending)) return true;
  }
  return IsCpp(file.path) || IsCMake(file.path) || script;
}

bool IsTestCode(absl::string_view path) {
  return absl::StartsWith(path, "tests/") || absl::StartsWith(BaseNameOf(path), "testing_") ||
         absl::StrContains(path, "/testing/") || absl::EndsWith(path, "_test.cc") ||
         absl::EndsWith(path, "_test.cu") || absl::EndsWith(path, "_fuzz.cc") ||
         absl::EndsWith(path, "_bench.cc");
}

absl::string_view IncludedPath(absl::string_view line) {
  if (!absl::ConsumePrefix(&line, "#include \"")) return "";
  return line.substr(0, line.find('"'));
}

std::set<std::string> TestFiles(const SourceTree& tree) {
  std::set<std::string> files;
  for (const SourceFile& file : tree.files()) {
    bool is_test = IsTestCode(file.path);
    for (const std::string& line : file.lines) {
      if (is_test || !IsHeader(file.path)) break;
      const absl::string_view path = IncludedPath(line);
      is_test = absl::StrContains(path, "/testing/") ||
                absl::StartsWith(line, "#include <gtest/") || absl::StartsWith(path, "gtest/") ||
                absl::StartsWith(path, "gmock/");
    }
    if (is_test) files.insert(file.path);
  }
  return files;
}

std::vector<std::string> CodeOnly(const SourceFile& file) {
  std::vector<std::string> code;
  code.reserve(file.lines.size());
  LexState state;
  for (const std::string& line : file.lines) code.push_back(BlankLine(line, &state));
  return code;
}

size_t FindWord(absl::string_view line, absl::string_view name, size_t from) {
  for (size_t at = line.find(name, from); at != absl::string_view::npos;
       at = line.find(name, at + 1)) {
    const size_t end = at + name.size();
    const bool starts = at == 0 || !IsIdentifierChar(line[at - 1]);
    if (starts && (end == line.size() || !IsIdentifierChar(line[end]))) return at;
  }
  return absl::string_view::npos;
}

bool HasCall(absl::string_view line, absl::string_view name) {
  for (size_t at = FindWord(line, name); at != absl::string_view::npos;
       at = FindWord(line, name, at + 1)) {
    size_t next = at + name.size();
    while (next < line.size() && line[next] == ' ') ++next;
    if (next < line.size() && line[next] == '(') return true;
  }
  return false;
}

}  // namespace isthmus::tidy
