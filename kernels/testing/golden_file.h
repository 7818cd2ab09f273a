// SPDX-License-Identifier: Apache-2.0
// Arrays of golden files for tests: a small reader of safetensors files that exist to be compared
// with. The loader of real checkpoints is another one, with every check that untrusted files need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus::kernels::testing {

struct GoldenArray {
  std::string dtype;           // As in the file: F32, BF16, F8_E4M3, F8_E8M0, U8, I8, I32, I64.
  std::vector<int64_t> shape;  // Empty for a scalar.
  std::vector<std::byte> bytes;

  int64_t size() const;  // Number of elements.

  // The elements as f32 (from F32, F16, BF16, F8_E4M3, F8_E8M0, U8, I8, I32) or as integers (from
  // I32, I64, U8, I8). Check-fails on another dtype: a test that asks for it is wrong.
  std::vector<float> F32() const;
  std::vector<int64_t> Ints() const;
  // The stored bytes, for packed fp4 and for codes.
  const uint8_t* u8() const { return reinterpret_cast<const uint8_t*>(bytes.data()); }
};

class GoldenFile {
 public:
  static absl::StatusOr<GoldenFile> Read(const std::string& path);

  bool Has(absl::string_view name) const;
  // Check-fails, naming the array, when it is absent.
  const GoldenArray& at(absl::string_view name) const;
  std::vector<std::string> names() const;
  // The `dims` or `params` array of unit/ files.
  std::vector<int64_t> dims(absl::string_view name = "dims") const { return at(name).Ints(); }

 private:
  std::map<std::string, GoldenArray, std::less<>> arrays_;
};

// The directory named by ISTHMUS_GOLDEN_DIR, or "" when it is not set.
std::string GoldenDir();
// True when the environment says that golden data must be there (CI=true).
bool GoldenRequired();

}  // namespace isthmus::kernels::testing

// Reads ISTHMUS_GOLDEN_DIR/`relative` into a new variable `file`. Without the directory the test is
// skipped, or fails where golden data is required.
#define ISTHMUS_READ_GOLDEN(file, relative)                                               \
  if (::isthmus::kernels::testing::GoldenDir().empty()) {                                 \
    if (::isthmus::kernels::testing::GoldenRequired()) FAIL() << "no ISTHMUS_GOLDEN_DIR"; \
    GTEST_SKIP() << "ISTHMUS_GOLDEN_DIR is not set";                                      \
  }                                                                                       \
  auto file##_or = ::isthmus::kernels::testing::GoldenFile::Read(                         \
      ::isthmus::kernels::testing::GoldenDir() + "/" + (relative));                       \
  ASSERT_TRUE(file##_or.ok()) << file##_or.status();                                      \
  /* NOLINTNEXTLINE(bugprone-macro-parentheses): `file` is declared here. */              \
  const ::isthmus::kernels::testing::GoldenFile& file = *file##_or
