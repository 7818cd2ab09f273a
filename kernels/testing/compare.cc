// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/compare.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/core/formats.h"

namespace isthmus::kernels::testing {
namespace {

constexpr uint32_t kGuardBits = 0xdeadbeefu;

bool SameSpecial(float a, float b) { return (std::isnan(a) && std::isnan(b)) || a == b; }

// Steps on the bf16 grid as one ordered line, so that neighbours differ by one across zero too.
int32_t Bf16Step(float x) {
  const int32_t bits = Bf16Bits(x);
  return (bits & 0x8000) != 0 ? -(bits & 0x7fff) : bits;
}

::testing::AssertionResult SameSize(size_t got, size_t expected) {
  if (got == expected) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << got << " values, expected " << expected;
}

}  // namespace

double RelativeL2(std::span<const float> got, std::span<const float> exact) {
  double difference = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < exact.size(); ++i) {
    if (SameSpecial(got[i], exact[i])) {
      if (std::isfinite(exact[i])) norm += double{exact[i]} * exact[i];
      continue;
    }
    const double d = double{got[i]} - exact[i];
    difference += d * d;
    norm += double{exact[i]} * exact[i];
  }
  if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
  return norm > 0.0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

std::string WorstPlace(std::span<const float> got, std::span<const float> exact) {
  size_t worst = 0;
  double largest = -1.0;
  for (size_t i = 0; i < exact.size(); ++i) {
    if (SameSpecial(got[i], exact[i])) continue;
    double d = std::fabs(double{got[i]} - exact[i]);
    if (std::isnan(d)) d = std::numeric_limits<double>::infinity();
    if (d > largest) {
      largest = d;
      worst = i;
    }
  }
  if (largest < 0.0) return "no difference";
  return absl::StrCat("worst at ", worst, ": got ", got[worst], ", exact ", exact[worst]);
}

::testing::AssertionResult SameNonFinite(std::span<const float> got, std::span<const float> exact) {
  if (auto same = SameSize(got.size(), exact.size()); !same) return same;
  for (size_t i = 0; i < exact.size(); ++i) {
    const bool both_finite = std::isfinite(got[i]) && std::isfinite(exact[i]);
    if (!both_finite && !SameSpecial(got[i], exact[i])) {
      return ::testing::AssertionFailure()
             << "at " << i << ": got " << got[i] << ", exact " << exact[i];
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult WithinBound(std::span<const float> got, std::span<const float> naive,
                                       std::span<const float> exact, const NumericBound& bound) {
  if (auto same = SameNonFinite(got, exact); !same) return same;
  const double error = RelativeL2(got, exact);
  const double naive_error = RelativeL2(naive, exact);
  const double budget = bound.factor * naive_error + bound.floor;
  const std::string text =
      absl::StrCat("error ", error, ", naive ", naive_error, ", bound ", budget, " (",
                   100.0 * error / budget, " % used), ", WorstPlace(got, exact));
  if (error <= budget) return ::testing::AssertionSuccess() << text;
  return ::testing::AssertionFailure() << text;
}

::testing::AssertionResult WithinRelativeL2(std::span<const float> got,
                                            std::span<const float> exact, double tolerance) {
  if (auto same = SameNonFinite(got, exact); !same) return same;
  const double error = RelativeL2(got, exact);
  if (error <= tolerance) return ::testing::AssertionSuccess() << "error " << error;
  return ::testing::AssertionFailure()
         << "error " << error << ", tolerance " << tolerance << ", " << WorstPlace(got, exact);
}

::testing::AssertionResult SameBits(std::span<const float> got, std::span<const float> expected) {
  if (auto same = SameSize(got.size(), expected.size()); !same) return same;
  if (got.empty() || std::memcmp(got.data(), expected.data(), got.size_bytes()) == 0) {
    return ::testing::AssertionSuccess();
  }
  size_t count = 0;
  size_t first = 0;
  for (size_t i = got.size(); i-- > 0;) {
    if (std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(expected[i])) continue;
    ++count;
    first = i;
  }
  return ::testing::AssertionFailure()
         << count << " of " << got.size() << " values differ, first at " << first << ": got "
         << absl::StrCat(got[first], " (", absl::Hex(std::bit_cast<uint32_t>(got[first])), ")")
         << ", expected "
         << absl::StrCat(expected[first], " (", absl::Hex(std::bit_cast<uint32_t>(expected[first])),
                         ")");
}

::testing::AssertionResult Bf16FlipsWithin(std::span<const float> got, std::span<const float> naive,
                                           std::span<const float> exact, double factor,
                                           double floor) {
  if (auto same = SameNonFinite(got, exact); !same) return same;
  int64_t flips = 0;
  int64_t naive_flips = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    if (!std::isfinite(exact[i])) continue;
    const int32_t steps = std::abs(Bf16Step(got[i]) - Bf16Step(exact[i]));
    if (steps > 1 || Bf16Value(Bf16Bits(got[i])) != got[i]) {
      return ::testing::AssertionFailure() << "at " << i << ": got " << got[i] << ", exact "
                                           << exact[i] << ", " << steps << " bf16 steps apart";
    }
    flips += steps;
    naive_flips += Bf16Step(naive[i]) != Bf16Step(exact[i]) ? 1 : 0;
  }
  const auto n = static_cast<double>(exact.size());
  const double share = static_cast<double>(flips) / n;
  const double budget = factor * static_cast<double>(naive_flips) / n + floor;
  const std::string text =
      absl::StrCat("share of flips ", share, ", budget ", budget, ", ", WorstPlace(got, exact));
  if (share <= budget) return ::testing::AssertionSuccess() << text;
  return ::testing::AssertionFailure() << text;
}

GuardedFloats::GuardedFloats(int64_t size)
    : size_(size), storage_(static_cast<size_t>(size + 3 * kGuard)) {
  const auto address = reinterpret_cast<uintptr_t>(storage_.data()) / sizeof(float);
  offset_ = kGuard + static_cast<int64_t>((kGuard - address % kGuard) % kGuard);
  for (float& x : storage_) x = std::bit_cast<float>(kGuardBits);
  for (int64_t i = 0; i < size_; ++i) data()[i] = std::numeric_limits<float>::quiet_NaN();
}

float* GuardedFloats::data() { return storage_.data() + offset_; }

std::span<const float> GuardedFloats::values() const {
  return {storage_.data() + offset_, static_cast<size_t>(size_)};
}

::testing::AssertionResult GuardedFloats::Intact() const {
  for (int64_t i = 0; i < static_cast<int64_t>(storage_.size()); ++i) {
    const bool inside = i >= offset_ && i < offset_ + size_;
    const auto bits = std::bit_cast<uint32_t>(storage_[static_cast<size_t>(i)]);
    if (!inside && bits != kGuardBits) {
      return ::testing::AssertionFailure() << "guard at " << i - offset_ << " was overwritten";
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace isthmus::kernels::testing
