// SPDX-License-Identifier: Apache-2.0
#include "services/base/byte_size.h"

#include <algorithm>
#include <array>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace isthmus {
namespace {

struct Unit {
  absl::string_view name;
  int64_t bytes;
};
constexpr std::array<Unit, 10> kUnits = {{{"", 1},
                                          {"B", 1},
                                          {"kB", 1000},
                                          {"MB", 1000'000},
                                          {"GB", 1000'000'000},
                                          {"TB", 1000'000'000'000},
                                          {"KiB", int64_t{1} << 10},
                                          {"MiB", int64_t{1} << 20},
                                          {"GiB", int64_t{1} << 30},
                                          {"TiB", int64_t{1} << 40}}};

}  // namespace

absl::StatusOr<int64_t> ParseByteSize(absl::string_view text) {
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const absl::string_view suffix = text.substr(digits);
  int64_t count = 0;
  const bool is_number = digits > 0 && absl::SimpleAtoi(text.substr(0, digits), &count);
  for (const Unit& unit : kUnits) {
    if (!is_number || unit.name != suffix) continue;
    int64_t bytes = 0;
    if (!__builtin_mul_overflow(count, unit.bytes, &bytes)) return bytes;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "is \"", text, "\", want bytes below 2^63, as in 1048576, 512MiB, 96GiB or 80GB"));
}

std::string FormatByteSize(int64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  size_t unit = 6;
  while (unit + 1 < kUnits.size() && bytes >= kUnits[unit + 1].bytes) ++unit;
  return absl::StrFormat("%.2f %s",
                         static_cast<double>(bytes) / static_cast<double>(kUnits[unit].bytes),
                         kUnits[unit].name);
}

}  // namespace isthmus
