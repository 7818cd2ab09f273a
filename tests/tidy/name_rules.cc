// SPDX-License-Identifier: Apache-2.0
// Rules about names and calls.
#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "tests/tidy/rules.h"

namespace isthmus::tidy {
namespace {

// Each hides the noun or verb that belongs in its place. "process" is banned as a verb only, that
// is as the first word.
constexpr std::array<absl::string_view, 17> kBannedWords = {
    "manager", "handler", "helper", "helpers", "util", "utils", "common", "misc",   "info",
    "data",    "core",    "do",     "new",     "old",  "v2",    "stuff",  "utility"};

bool IsBanned(absl::string_view word) {
  return std::find(kBannedWords.begin(), kBannedWords.end(), word) != kBannedWords.end();
}

// "PagePoolV2" -> page, pool, v2; "page_pool-inl.h" -> page, pool, inl.
std::vector<std::string> WordsOfName(absl::string_view name) {
  std::vector<std::string> words;
  std::string word;
  for (size_t i = 0; i < name.size(); ++i) {
    const char c = name[i];
    const bool upper = std::isupper(static_cast<unsigned char>(c)) != 0;
    const bool separates = c == '_' || c == '-' || c == '.';
    if ((upper || separates) && !word.empty()) {
      words.push_back(word);
      word.clear();
    }
    if (!separates) word += absl::ascii_tolower(static_cast<unsigned char>(c));
  }
  if (!word.empty()) words.push_back(word);
  return words;
}

// The banned word of a name, or "".
std::string BannedWordOf(absl::string_view name) {
  const std::vector<std::string> words = WordsOfName(name);
  for (const std::string& word : words) {
    if (IsBanned(word)) return word;
  }
  return words.size() > 1 && words.front() == "process" ? "process" : "";
}

// The name a line defines after one of the keywords that open a type, or "".
std::string TypeDefinedBy(absl::string_view code) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(absl::StripAsciiWhitespace(code), ' ', absl::SkipEmpty());
  size_t i = 0;
  if (words.size() > 2 && words[0] == "enum" && (words[1] == "class" || words[1] == "struct")) {
    i = 1;
  }
  if (i + 1 >= words.size()) return "";
  constexpr std::array<absl::string_view, 7> kOpeners = {"class", "struct",  "enum",   "using",
                                                         "union", "concept", "message"};
  if (std::find(kOpeners.begin(), kOpeners.end(), words[i]) == kOpeners.end()) return "";
  absl::string_view name = words[i + 1];
  const size_t end = name.find_first_of(":;{<(");
  if (end != absl::string_view::npos) name = name.substr(0, end);
  return std::string(name);
}

void CheckPathNames(const SourceFile& file, std::vector<Finding>* findings) {
  const std::vector<absl::string_view> parts = absl::StrSplit(file.path, '/');
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i == 1 && parts[0] == "kernels" && parts[1] == "core") continue;
    const std::string word = BannedWordOf(parts[i]);
    if (word.empty()) continue;
    findings->push_back(
        {file.path, 0,
         absl::StrCat("the name '", parts[i], "' says '", word, "'; name the thing")});
  }
}

enum class Where : uint8_t { kEverywhere, kProduct, kAboveCore, kKernels };

struct BannedCall {
  absl::string_view name;
  absl::string_view instead;
  Where where = Where::kProduct;
};

constexpr BannedCall kBannedCalls[] = {
    {"getenv", "the config file and services/base/config.h"},
    {"secure_getenv", "the config file and services/base/config.h"},
    {"setenv", "an argument of the library, or its config call"},
    {"cudaDeviceSynchronize", "the step's one synchronisation point", Where::kAboveCore},
    {"cudaMalloc", "memory allocated at start by the worker", Where::kAboveCore},
    {"cudaMallocAsync", "memory allocated at start by the worker", Where::kAboveCore},
    {"cudaMallocHost", "memory allocated at start by the worker", Where::kAboveCore},
    {"sleep_for", "Clock::Sleep"},
    {"sleep_until", "Clock::Sleep"},
    {"usleep", "Clock::Sleep"},
    {"nanosleep", "Clock::Sleep"},
    {"printf", "the log, or std::cout in a program's own output"},
    {"fprintf", "the log"},
    {"vprintf", "the log"},
    {"assert", "ISTHMUS_DCHECK", Where::kEverywhere},
    {"rand", "a generator with a seed", Where::kEverywhere},
    {"srand", "a generator with a seed", Where::kEverywhere},
    {"exp", "kernels/core/math.h", Where::kKernels},
    {"expf", "kernels/core/math.h", Where::kKernels},
    {"log", "kernels/core/math.h", Where::kKernels},
    {"logf", "kernels/core/math.h", Where::kKernels},
    {"log1p", "kernels/core/math.h", Where::kKernels},
    {"log1pf", "kernels/core/math.h", Where::kKernels},
    {"sin", "kernels/core/math.h", Where::kKernels},
    {"sinf", "kernels/core/math.h", Where::kKernels},
    {"cos", "kernels/core/math.h", Where::kKernels},
    {"cosf", "kernels/core/math.h", Where::kKernels},
    {"tanh", "kernels/core/math.h", Where::kKernels},
    {"__expf", "kernels/core/math-inl.h", Where::kKernels},
    {"__logf", "kernels/core/math-inl.h", Where::kKernels},
    {"__sinf", "kernels/core/math-inl.h", Where::kKernels},
    {"__cosf", "kernels/core/math-inl.h", Where::kKernels},
    {"__powf", "kernels/core/math-inl.h", Where::kKernels},
};

bool Applies(const BannedCall& call, absl::string_view path, bool is_test) {
  switch (call.where) {
    case Where::kEverywhere:
      return true;
    case Where::kProduct:
      return !is_test;
    case Where::kAboveCore:  // kernels/core is where a device is asked.
      return !is_test && !absl::StartsWith(path, "kernels/core/");
    case Where::kKernels:  // A definition says in f64 what is meant, with whatever is exact enough.
      return absl::StartsWith(path, "kernels/") && !is_test &&
             !absl::EndsWith(path, "_definition.cc");
  }
  return true;
}

// Whether the line calls the function itself, not a member or another namespace's of that name.
bool CallsFunction(absl::string_view code, absl::string_view name) {
  if (!HasCall(code, name)) return false;
  const size_t at = FindWord(code, name);
  const absl::string_view before = code.substr(0, at);
  if (absl::EndsWith(before, ".") || absl::EndsWith(before, "->")) return false;
  return !absl::EndsWith(before, "::") || absl::EndsWith(before, "std::") ||
         absl::EndsWith(before, "std::this_thread::") || absl::EndsWith(before, " ::");
}

}  // namespace

std::vector<Finding> CheckNames(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    if (absl::StartsWith(file.path, "tests/golden/")) continue;
    if (IsSource(file)) CheckPathNames(file, &findings);
    if (!IsCpp(file.path) && !absl::EndsWith(file.path, ".proto")) continue;
    const std::vector<std::string> code = CodeOnly(file);
    for (size_t i = 0; i < code.size(); ++i) {
      const std::string name = TypeDefinedBy(code[i]);
      const std::string word = BannedWordOf(name);
      if (word.empty()) continue;
      findings.push_back({file.path, static_cast<int>(i) + 1,
                          absl::StrCat("the type ", name, " says '", word, "'; name the thing")});
    }
  }
  return findings;
}

std::vector<Finding> CheckBannedCalls(const SourceTree& tree) {
  std::vector<Finding> findings;
  const std::set<std::string> tests = TestFiles(tree);
  for (const SourceFile& file : tree.files()) {
    if (!IsCpp(file.path)) continue;
    const bool is_test = tests.contains(file.path);
    const std::vector<std::string> code = CodeOnly(file);
    for (size_t i = 0; i < code.size(); ++i) {
      for (const BannedCall& call : kBannedCalls) {
        if (!Applies(call, file.path, is_test) || !CallsFunction(code[i], call.name)) continue;
        findings.push_back(
            {file.path, static_cast<int>(i) + 1, absl::StrCat(call.name, ": use ", call.instead)});
      }
    }
  }
  return findings;
}

std::vector<Finding> CheckSkips(const SourceTree& tree) {
  std::vector<Finding> findings;
  for (const SourceFile& file : tree.files()) {
    if (!IsCpp(file.path)) continue;
    const std::vector<std::string> code = CodeOnly(file);
    for (size_t i = 0; i < code.size(); ++i) {
      const int line = static_cast<int>(i) + 1;
      const bool next_streams = i + 1 < code.size() && absl::StrContains(code[i + 1], "<<");
      if (HasCall(code[i], "GTEST_SKIP") && !absl::StrContains(code[i], "<<") && !next_streams) {
        findings.push_back({file.path, line, "a skip says why: GTEST_SKIP() << \"reason\""});
      }
      if (absl::StrContains(code[i], "DISABLED_")) {
        findings.push_back({file.path, line, "a test is never disabled by name"});
      }
    }
  }
  return findings;
}

}  // namespace isthmus::tidy
