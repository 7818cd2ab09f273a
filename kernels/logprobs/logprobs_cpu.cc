// SPDX-License-Identifier: Apache-2.0
// The trusted path: two passes over the row, one for the largest and one for everything else; the
// few likeliest tokens are kept in order as they are met. Exponentials are computed eight at a time
// and added one by one in order of id, as the contract says, so the chain of additions is what
// bounds a row. Compiled once for the floor (AVX2).
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "hwy/highway.h"
#include "kernels/core/math.h"
#include "kernels/logprobs/logprobs_variants.h"

namespace isthmus::kernels {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
constexpr hn::FixedTag<float, 8> kFloats;
constexpr hn::FixedTag<float, 4> kHalfFloats;
constexpr hn::FixedTag<double, 4> kDoubles;
constexpr hn::FixedTag<int64_t, 4> kIntegers;
using Floats = hn::Vec<decltype(kFloats)>;
using Doubles = hn::Vec<decltype(kDoubles)>;
constexpr int64_t kLanes = 8;
constexpr float kImpossible = -std::numeric_limits<float>::infinity();

// ExpF64 (math.h), lane by lane the same bits, of what is no NaN.
Doubles ExpOf(Doubles x) {
  const auto set = [](double value) { return hn::Set(kDoubles, value); };
  const Doubles clamped = hn::Min(hn::Max(x, set(-750.0)), set(710.0));
  const Doubles shifted = hn::MulAdd(clamped, set(0x1.71547652b82fep+0), set(math::kRoundF64));
  const Doubles n = hn::Sub(shifted, set(math::kRoundF64));
  const Doubles r =
      hn::NegMulAdd(n, set(math::kLn2Low), hn::NegMulAdd(n, set(math::kLn2High), clamped));
  Doubles p = set(1.0);
  for (int k = 14; k >= 1; --k) p = hn::MulAdd(p, hn::Mul(r, set(1.0 / k)), set(1.0));
  const auto whole =
      hn::Sub(hn::BitCast(kIntegers, shifted), hn::BitCast(kIntegers, set(math::kRoundF64)));
  const auto half = hn::ShiftRight<1>(whole);
  const auto power_of_two = [](auto exponent) {
    return hn::BitCast(kDoubles, hn::ShiftLeft<52>(hn::Add(exponent, hn::Set(kIntegers, 1023))));
  };
  return hn::Mul(hn::Mul(p, power_of_two(half)), power_of_two(hn::Sub(whole, half)));
}

// Logits from `begin` on; past the end none is possible.
Floats LoadLogits(const float* logits, int64_t begin, int64_t n) {
  if (begin + kLanes <= n) return hn::LoadU(kFloats, logits + begin);
  std::array<float, kLanes> rest;
  rest.fill(kImpossible);
  std::copy(logits + begin, logits + n, rest.begin());
  return hn::LoadU(kFloats, rest.data());
}

float LargestFinite(const float* logits, int64_t n) {
  const Floats lowest = hn::Set(kFloats, kImpossible);
  Floats largest = lowest;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats value = LoadLogits(logits, i, n);
    largest = hn::Max(largest, hn::IfThenElse(hn::IsFinite(value), value, lowest));
  }
  return hn::GetLane(hn::MaxOfLanes(kFloats, largest));
}

// Holds `limit` entries at most, the likeliest first. Ids come in ascending order, so an equal one
// goes behind. The logits stand where the log probabilities will be.
void Keep(std::vector<TokenLogprob>& top, size_t limit, TokenLogprob entry) {
  if (top.size() == limit && (limit == 0 || entry.logprob <= top.back().logprob)) return;
  const auto place =
      std::ranges::upper_bound(top, entry.logprob, std::greater<>(), &TokenLogprob::logprob);
  top.insert(place, entry);
  if (top.size() > limit) top.pop_back();
}

// Of the finite logits among those from `begin` on.
void KeepSome(const float* logits, int64_t begin, int64_t n, Floats value, size_t limit,
              std::vector<TokenLogprob>& top) {
  if (limit == 0) return;
  const float least = top.size() == limit ? top.back().logprob : kImpossible;
  const auto is_above = hn::And(hn::IsFinite(value), hn::Gt(value, hn::Set(kFloats, least)));
  if (hn::AllFalse(kFloats, is_above)) return;
  for (int64_t id = begin; id < std::min(begin + kLanes, n); ++id) {
    if (std::isfinite(logits[id])) Keep(top, limit, {static_cast<int32_t>(id), logits[id]});
  }
}

}  // namespace

absl::StatusOr<TokenLogprobs> LaunchLogprobsCpu(const LogprobsArgs& args, const Exec&) {
  const float* logits = args.logits.f32();
  const int64_t n = args.logits.size;
  const float largest = LargestFinite(logits, n);
  TokenLogprobs result;
  const float chosen = std::isfinite(logits[args.chosen]) ? logits[args.chosen] : kImpossible;
  const auto limit = static_cast<size_t>(args.num_top);
  double sum = 0.0;
  result.rank = 1;
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    const Floats value = LoadLogits(logits, begin, n);
    const auto is_finite = hn::IsFinite(value);
    // What is impossible adds 0, which changes no sum.
    const Floats possible = hn::IfThenElse(is_finite, value, hn::Set(kFloats, kImpossible));
    const Doubles offset = hn::Set(kDoubles, double{largest});
    const auto low = hn::PromoteTo(kDoubles, hn::LowerHalf(kHalfFloats, possible));
    const auto high = hn::PromoteTo(kDoubles, hn::UpperHalf(kHalfFloats, possible));
    std::array<double, kLanes> terms;
    hn::StoreU(ExpOf(hn::Sub(low, offset)), kDoubles, terms.data());
    hn::StoreU(ExpOf(hn::Sub(high, offset)), kDoubles, terms.data() + kLanes / 2);
    for (const double term : terms) sum += term;
    const auto is_likelier = hn::And(is_finite, hn::Gt(value, hn::Set(kFloats, chosen)));
    result.rank += static_cast<int64_t>(hn::CountTrue(kFloats, is_likelier));
    KeepSome(logits, begin, n, value, limit, result.top);
  }
  const double log_sum = LogF64(sum);
  const auto logprob = [&](float logit) {
    return static_cast<float>((double{logit} - double{largest}) - log_sum);
  };
  result.chosen = {args.chosen, chosen == kImpossible ? chosen : logprob(chosen)};
  for (TokenLogprob& entry : result.top) entry.logprob = logprob(entry.logprob);
  return result;
}

}  // namespace isthmus::kernels
