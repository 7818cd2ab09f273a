// SPDX-License-Identifier: Apache-2.0
// Sampling on the CPU that ranks only what may be drawn. Patch sampling.candidates.
//
// With top_k those are the top_k largest, which one pass over the logits keeps. Otherwise a draw
// needs the tokens down to the cut or to the drawn one, in order, and of all others only what their
// masses add up to: one vectorised pass adds masses, in all and above a few thresholds, and those
// above the threshold that suffices are ranked. They are a prefix of the order, so their sums have
// the bits of the trusted path; the total, added in another order, does not, so a decision that
// hangs on less than what two orders can differ by is left to the trusted path, as is whatever the
// thresholds do not reach.
//
// Bound by the pass that adds masses, some 30 instructions for 8 logits; a sort of the whole
// vocabulary takes six passes that scatter.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>

#include "hwy/highway.h"
#include "kernels/core/math.h"
#include "kernels/core/simd-inl.h"
#include "kernels/core/workspace.h"
#include "kernels/sampling/sampling_ranks.h"
#include "kernels/sampling/sampling_variants.h"

namespace isthmus::kernels {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using HWY_NAMESPACE::DF;
using HWY_NAMESPACE::VF;
constexpr int64_t kLanes = HWY_NAMESPACE::kLanes;

// Of SamplingArgs::top_k: more are sorted by the trusted path.
constexpr int64_t kMaxTopK = 1024;
// Below the largest logit, in temperatures. All tokens of the real vocabulary at the last one would
// weigh half a percent of the largest.
constexpr std::array<float, 10> kDepths = {1.0f, 2.5f,  4.0f,  5.5f,  7.0f,
                                           8.5f, 10.0f, 12.0f, 14.0f, 17.0f};

// A register of `logits` from `begin` on; past the end none is finite.
VF LoadLogits(const float* logits, int64_t begin, int64_t n) {
  const DF d;
  if (begin + kLanes <= n) return hn::LoadU(d, logits + begin);
  std::array<float, kLanes> rest;
  rest.fill(kNoFiniteLogit);
  std::copy(logits + begin, logits + n, rest.begin());
  return hn::LoadU(d, rest.data());
}

// Appends the finite logits of one register that `is_above` takes.
template <typename Above>
int64_t Collect(const float* logits, int64_t begin, int64_t n, Above is_above, Ranked* ranked) {
  const DF d;
  const VF value = LoadLogits(logits, begin, n);
  const auto taken = hn::And(hn::IsFinite(value), is_above(value));
  if (hn::AllFalse(d, taken)) return 0;
  std::array<uint8_t, sizeof(uint64_t)> bytes = {};
  hn::StoreMaskBits(d, taken, bytes.data());
  int64_t added = 0;
  for (auto bits = std::bit_cast<uint64_t>(bytes); bits != 0; bits &= bits - 1) {
    const int64_t id = begin + std::countr_zero(bits);
    ranked[added++] = {DescendingKey(logits[id]), static_cast<int32_t>(id)};
  }
  return added;
}

// The `k` largest of `n` logits in order; fewer where fewer are finite. `ranked` has room for
// 2 * k + one register.
int64_t SelectTop(const float* logits, int64_t n, int64_t k, Ranked* ranked) {
  const DF d;
  float threshold = kNoFiniteLogit;  // Of what follows, only what is larger can be among them.
  int64_t size = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto is_above = [&](VF value) { return hn::Gt(value, hn::Set(d, threshold)); };
    size += Collect(logits, i, n, is_above, ranked + size);
    if (size < 2 * k) continue;
    std::nth_element(ranked, ranked + k - 1, ranked + size);
    size = k;
    threshold = logits[ranked[k - 1].id];
  }
  std::sort(ranked, ranked + size);
  return std::min(size, k);
}

struct Masses {
  double total = 0.0;
  std::array<float, kDepths.size()> above = {};  // Down to each depth, nearly.
};

Masses AddMasses(const float* logits, int64_t n, float largest, float temperature) {
  const DF d;
  const hn::Half<DF> half;
  const hn::Rebind<double, hn::Half<DF>> d64;
  std::array<VF, kDepths.size()> least;
  std::array<VF, kDepths.size()> above;
  for (size_t i = 0; i < kDepths.size(); ++i) {
    least[i] = hn::Set(d, Exp(-kDepths[i]));
    above[i] = hn::Zero(d);
  }
  auto low = hn::Zero(d64);
  auto high = hn::Zero(d64);
  for (int64_t i = 0; i < n; i += kLanes) {
    const VF value = LoadLogits(logits, i, n);
    const VF depth = hn::Div(hn::Sub(value, hn::Set(d, largest)), hn::Set(d, temperature));
    const VF mass = hn::IfThenElseZero(hn::IsFinite(value), HWY_NAMESPACE::ExpV(depth));
    low = hn::Add(low, hn::PromoteTo(d64, hn::LowerHalf(half, mass)));
    high = hn::Add(high, hn::PromoteTo(d64, hn::UpperHalf(half, mass)));
    // Of most real logits nearly all lie deeper.
    if (hn::AllFalse(d, hn::Ge(mass, least.back()))) continue;
    for (size_t k = 0; k < kDepths.size(); ++k) {
      above[k] = hn::Add(above[k], hn::IfThenElseZero(hn::Ge(mass, least[k]), mass));
    }
  }
  Masses masses;
  masses.total = hn::GetLane(hn::SumOfLanes(d64, hn::Add(low, high)));
  for (size_t k = 0; k < kDepths.size(); ++k) {
    masses.above[k] = hn::GetLane(hn::SumOfLanes(d, above[k]));
  }
  return masses;
}

// The least logit that is ranked: all that may be drawn is at least as large, as far as the sums in
// `masses` tell. None: no depth reaches so far.
std::optional<float> Threshold(const SamplingArgs& args, float largest, const Masses& masses) {
  double share = args.top_p;
  if (args.top_p == 1.0f && args.min_p == 0.0f) share = UniformAt(args.seed, args.counter);
  const double wanted = share * masses.total * 1.001;  // The sums above are of f32.
  for (size_t k = 0; k < kDepths.size(); ++k) {
    const bool is_below_min_p = Exp(-kDepths[k]) * 1.001f < args.min_p;
    if (masses.above[k] < wanted && !is_below_min_p) continue;
    const float threshold = largest - kDepths[k] * args.temperature;
    if (!std::isfinite(threshold)) return std::nullopt;
    return threshold;
  }
  return std::nullopt;
}

// The first `size` of `num_finite` tokens in order.
struct Prefix {
  const Ranked* ranked = nullptr;
  int64_t size = 0;
  float* mass = nullptr;     // [size], written here.
  float mass_behind = 0.0f;  // No token behind them has more.
};

// What the total may be: in whatever order `n` masses are added, the sum is within half of this
// share of the true one, with room for the few roundings that follow.
double Slack(int64_t n) { return static_cast<double>(n + 16) * 0x1p-52; }

// The token that the trusted path draws, or none where that cannot be told.
std::optional<int32_t> DrawFromPrefix(const SamplingArgs& args, float largest, double total,
                                      const Prefix& prefix) {
  const float* logits = args.logits.f32();
  const double slack = Slack(args.logits.size);
  const double uniform = UniformAt(args.seed, args.counter);
  const auto mass_at = [&](int64_t rank) {
    return Exp((logits[prefix.ranked[rank].id] - largest) / args.temperature);
  };
  if (args.top_p == 1.0f && args.min_p == 0.0f) {
    // Nothing is cut: what is kept is the total.
    const double target = uniform * total;
    double reached = 0.0;
    for (int64_t rank = 0; rank < prefix.size; ++rank) {
      reached += mass_at(rank);
      if (reached > target * (1.0 + slack)) return prefix.ranked[rank].id;
      if (reached > target * (1.0 - slack)) return std::nullopt;
    }
    return std::nullopt;
  }
  const double wanted = double{args.top_p} * total;
  double kept = 0.0;
  int64_t cut = 0;
  while (kept < wanted * (1.0 + slack)) {
    if (kept >= wanted * (1.0 - slack)) return std::nullopt;
    if (cut == prefix.size) {
      if (prefix.mass_behind < args.min_p) break;
      return std::nullopt;
    }
    prefix.mass[cut] = mass_at(cut);
    if (prefix.mass[cut] < args.min_p) break;
    kept += prefix.mass[cut++];
  }
  double reached = 0.0;
  for (int64_t rank = 0; rank < cut; ++rank) {
    reached += prefix.mass[rank];
    if (reached > uniform * kept) return prefix.ranked[rank].id;
  }
  return std::nullopt;
}

int32_t DrawOfTop(const SamplingArgs& args, float largest, Workspace* workspace) {
  const float* logits = args.logits.f32();
  Workspace::Scope scope(workspace);
  auto* ranked = scope.Take<Ranked>(2 * int64_t{args.top_k} + kLanes);
  auto* mass = scope.Take<float>(args.top_k);
  const int64_t n = SelectTop(logits, args.logits.size, args.top_k, ranked);
  for (int64_t rank = 0; rank < n; ++rank) {
    mass[rank] = Exp((logits[ranked[rank].id] - largest) / args.temperature);
  }
  return DrawRanked(args, ranked, mass, n);
}

std::optional<int32_t> DrawOfCandidates(const SamplingArgs& args, float largest,
                                        Workspace* workspace) {
  const float* logits = args.logits.f32();
  const int64_t n = args.logits.size;
  const Masses masses = AddMasses(logits, n, largest, args.temperature);
  const std::optional<float> threshold = Threshold(args, largest, masses);
  if (!threshold.has_value()) return std::nullopt;

  Workspace::Scope scope(workspace);
  auto* items = scope.Take<Ranked>(n);
  auto* ranked = scope.Take<Ranked>(n);
  const DF d;
  const auto is_above = [&](VF value) { return hn::Ge(value, hn::Set(d, *threshold)); };
  int64_t size = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    size += Collect(logits, i, n, is_above, items + size);
  }
  SortRanked(items, ranked, size);
  // The exponential is within 2 units in the last place, and its argument falls with the logit.
  const float next = std::nextafter(*threshold, kNoFiniteLogit);
  const float mass_behind = Exp((next - largest) / args.temperature) * (1.0f + 0x1p-20f);
  const Prefix prefix = {
      .ranked = ranked, .size = size, .mass = scope.Take<float>(size), .mass_behind = mass_behind};
  return DrawFromPrefix(args, largest, masses.total, prefix);
}

}  // namespace

// Rows of few logits are soon sorted, and greedy ones need no order.
bool RanksCandidates(const SamplingArgs& args) {
  return args.temperature > 0.0f && args.logits.size >= 256 &&
         args.top_k <= std::min(kMaxTopK, args.logits.size / 4);
}

absl::StatusOr<int32_t> LaunchSampleCandidates(const SamplingArgs& args, const Exec& exec) {
  const float largest = LargestFinite(args.logits.f32(), args.logits.size);
  if (largest == kNoFiniteLogit) return NoFiniteLogit(args.logits.size);
  if (args.top_k > 0) return DrawOfTop(args, largest, exec.workspace);
  if (const auto token = DrawOfCandidates(args, largest, exec.workspace)) return *token;
  return LaunchSampleCpu(args, exec);
}

}  // namespace isthmus::kernels
