// SPDX-License-Identifier: Apache-2.0
// The project's files as the rules see them: paths and lines, read once.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace isthmus::tidy {

struct SourceFile {
  std::string path;                // Relative to the root, with '/'.
  std::vector<std::string> lines;  // Without line ends.
  bool executable = false;
};

// Every file that belongs to the project, sorted by path. Build trees, hidden folders other than
// .ci, weights and golden dumps are left out; golden JSON is listed with its path and no lines.
class SourceTree {
 public:
  SourceTree() = default;
  explicit SourceTree(std::vector<SourceFile> files);

  const std::vector<SourceFile>& files() const { return files_; }
  // Null when the tree has no such file.
  const SourceFile* Find(absl::string_view path) const;

 private:
  std::vector<SourceFile> files_;
};

SourceTree ReadSourceTree(const std::string& root);

// "services/kv/page_pool.cc" -> "services/kv"; "" for a file at the root.
absl::string_view FolderOf(absl::string_view path);
// "services/kv/page_pool.cc" -> "page_pool.cc".
absl::string_view BaseNameOf(absl::string_view path);
bool IsCpp(absl::string_view path);     // .h .cc .cu .cuh
bool IsHeader(absl::string_view path);  // .h .cuh
bool IsCMake(absl::string_view path);   // CMakeLists.txt, *.cmake
// C++, proto, CMake and scripts: what people write by hand and machines run.
bool IsSource(const SourceFile& file);
// Tests, fuzz targets, benchmarks and their tools, by name: code that no product links.
bool IsTestCode(absl::string_view path);
// Those, and headers that tests share: they include GoogleTest or a header of a testing folder.
std::set<std::string> TestFiles(const SourceTree& tree);
// The path of `#include "path"`, or "".
absl::string_view IncludedPath(absl::string_view line);

// The file's lines with comments and the contents of string and character literals blanked out, so
// that a rule about code does not fire on prose. Columns are kept.
std::vector<std::string> CodeOnly(const SourceFile& file);

// Whether `line` contains `name` as a whole identifier from `from` on; the position, or npos.
size_t FindWord(absl::string_view line, absl::string_view name, size_t from = 0);
// As FindWord, and an opening parenthesis follows.
bool HasCall(absl::string_view line, absl::string_view name);

}  // namespace isthmus::tidy
