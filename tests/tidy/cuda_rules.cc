// SPDX-License-Identifier: Apache-2.0
// What keeps every kernel one source for nvcc and for the emulator.
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "tests/tidy/rules.h"

namespace isthmus::tidy {
namespace {

bool LiesInCore(absl::string_view path) { return absl::StartsWith(path, "kernels/core/"); }

}  // namespace

std::vector<Finding> CheckCuda(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    if (!IsCpp(file.path) || LiesInCore(file.path)) continue;
    const std::vector<std::string> code = CodeOnly(file);
    for (size_t i = 0; i < code.size(); ++i) {
      const int line = static_cast<int>(i) + 1;
      if (absl::StartsWith(file.lines[i], "#include <cuda")) {
        findings.push_back(
            {file.path, line, "kernels/core/launch.cuh brings CUDA or the emulator"});
      }
      if (absl::StrContains(code[i], "<<<")) {
        findings.push_back(
            {file.path, line, "Launch() of kernels/core/launch.cuh starts a kernel"});
      }
      if (FindWord(code[i], "asm") != absl::string_view::npos) {
        findings.push_back(
            {file.path, line, "PTX stands in a wrapper of kernels/core, its emulation beside it"});
      }
    }
  }
  return findings;
}

}  // namespace isthmus::tidy
