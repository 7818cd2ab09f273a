// SPDX-License-Identifier: Apache-2.0
// Where the tests of this folder find their files: bundled ones under tests/golden, the full set in
// the directory of ISTHMUS_GOLDEN_DIR.
#pragma once

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

namespace isthmus::text {

inline std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return std::nullopt;
  return std::string((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
}

// A file of the golden set; nothing when ISTHMUS_GOLDEN_DIR is not set or lacks it.
inline std::optional<std::string> GoldenFile(const std::string& path) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing in a test writes the environment.
  const char* const dir = std::getenv("ISTHMUS_GOLDEN_DIR");
  if (dir == nullptr) return std::nullopt;
  return ReadFile(std::string(dir) + "/" + path);
}

// A bundled file, or else the one of the golden set.
inline std::optional<std::string> BundledFile(const std::string& bundled,
                                              const std::string& in_golden_dir) {
  auto file = ReadFile(ISTHMUS_SOURCE_DIR "/tests/golden/" + bundled);
  return file.has_value() ? file : GoldenFile(in_golden_dir);
}

// tokenizer.json of the bundled model.
inline std::optional<std::string> TinyTokenizerJson() {
  return BundledFile("tiny-recall/tokenizer.json", "../models/tiny-recall/tokenizer.json");
}

// Whether this is a CI run, where a missing golden set is a failure and no reason to skip.
inline bool IsCi() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing in a test writes the environment.
  const char* const ci = std::getenv("CI");
  return ci != nullptr && std::string(ci) == "true";
}

}  // namespace isthmus::text
