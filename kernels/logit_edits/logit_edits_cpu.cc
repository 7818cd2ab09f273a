// SPDX-License-Identifier: Apache-2.0
// The trusted path: what tokens with biases become is computed first, then all mentioned tokens are
// penalised, four at a time and without a branch on their signs, and then the biased ones are
// written over them. Compiled once for the floor (AVX2).
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>

#include "hwy/highway.h"
#include "kernels/core/scratch_count.h"
#include "kernels/core/workspace.h"
#include "kernels/logit_edits/logit_edits_variants.h"

namespace isthmus::kernels {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
constexpr hn::FixedTag<int32_t, 4> kIntegers;
constexpr hn::FixedTag<float, 4> kFloats;
constexpr hn::FixedTag<double, 4> kDoubles;
constexpr size_t kLanes = 4;
constexpr double kLimit = std::numeric_limits<float>::max();

// Where the bias of a token stands among the arguments.
struct BiasPlace {
  int32_t id = 0;
  int32_t index = 0;
};

struct Edited {
  int32_t id = 0;
  float logit = 0.0f;
};

// `mention` is null for a token without one.
float EditedLogit(const LogitEditsArgs& args, const TokenMention* mention, double bias,
                  float before) {
  double logit = before;
  if (mention != nullptr) {
    logit = logit > 0.0 ? logit / args.repetition_penalty : logit * args.repetition_penalty;
    if (mention->in_output > 0) {
      logit -= double{args.frequency_penalty} * mention->in_output + double{args.presence_penalty};
    }
  }
  return static_cast<float>(std::clamp(logit + bias, -kLimit, kLimit));
}

// The tokens with biases, whose logits are not changed yet. Returns how many there are.
int64_t EditBiased(const LogitEditsArgs& args, std::span<const TokenMention> mentions,
                   std::span<BiasPlace> places, Edited* edited) {
  for (size_t i = 0; i < places.size(); ++i) {
    places[i] = {args.biases[i].id, static_cast<int32_t>(i)};
  }
  // Biases of one token are summed in the order of the arguments.
  std::ranges::sort(places, [](const BiasPlace& a, const BiasPlace& b) {
    return std::tie(a.id, a.index) < std::tie(b.id, b.index);
  });
  int64_t count = 0;
  for (size_t i = 0; i < places.size();) {
    const int32_t id = places[i].id;
    double bias = 0.0;
    for (; i < places.size() && places[i].id == id; ++i) {
      bias += args.biases[static_cast<size_t>(places[i].index)].bias;
    }
    const auto place = std::ranges::lower_bound(mentions, id, {}, &TokenMention::id);
    const bool is_known = place != mentions.end() && place->id == id;
    const float before = args.logits[static_cast<size_t>(id)];
    if (!std::isfinite(before) || (!is_known && bias == 0.0)) continue;
    edited[count++] = {id, EditedLogit(args, is_known ? &*place : nullptr, bias, before)};
  }
  return count;
}

void Penalise(const LogitEditsArgs& args, std::span<const TokenMention> mentions) {
  float* logits = args.logits.data();
  const auto repetition = hn::Set(kDoubles, double{args.repetition_penalty});
  const auto frequency = hn::Set(kDoubles, double{args.frequency_penalty});
  const auto presence = hn::Set(kDoubles, double{args.presence_penalty});
  const auto zero = hn::Zero(kDoubles);
  size_t i = 0;
  for (; i + kLanes <= mentions.size(); i += kLanes) {
    const TokenMention* m = &mentions[i];
    const std::array<int32_t, kLanes> counts = {m[0].in_output, m[1].in_output, m[2].in_output,
                                                m[3].in_output};
    const std::array<float, kLanes> values = {logits[m[0].id], logits[m[1].id], logits[m[2].id],
                                              logits[m[3].id]};
    const auto before = hn::LoadU(kFloats, values.data());
    const auto in_output = hn::PromoteTo(kDoubles, hn::LoadU(kIntegers, counts.data()));
    const auto logit = hn::PromoteTo(kDoubles, before);
    const auto repeated =
        hn::IfThenElse(hn::Gt(logit, zero), hn::Div(logit, repetition), hn::Mul(logit, repetition));
    const auto counted = hn::IfThenElseZero(hn::Gt(in_output, zero),
                                            hn::Add(hn::Mul(frequency, in_output), presence));
    // A bias of 0 is added, as to whom has one.
    const auto sum = hn::Add(hn::Sub(repeated, counted), zero);
    const auto bounded =
        hn::Min(hn::Max(sum, hn::Set(kDoubles, -kLimit)), hn::Set(kDoubles, kLimit));
    const auto after = hn::IfThenElse(hn::IsFinite(before), hn::DemoteTo(kFloats, bounded), before);
    std::array<float, kLanes> results;
    hn::StoreU(after, kFloats, results.data());
    for (size_t lane = 0; lane < kLanes; ++lane) logits[m[lane].id] = results[lane];
  }
  for (; i < mentions.size(); ++i) {
    float& logit = logits[mentions[i].id];
    if (std::isfinite(logit)) logit = EditedLogit(args, &mentions[i], 0.0, logit);
  }
}

}  // namespace

int64_t EditLogitsScratchBytes(int64_t num_biases) {
  ScratchCount scratch;
  scratch.Take<BiasPlace>(num_biases);
  scratch.Take<Edited>(num_biases);
  return scratch.peak_bytes();
}

absl::Status LaunchEditLogitsCpu(const LogitEditsArgs& args, const Exec& exec) {
  Workspace::Scope scope(exec.workspace);
  const size_t num_biases = args.biases.size();
  auto* places = scope.Take<BiasPlace>(static_cast<int64_t>(num_biases));
  auto* edited = scope.Take<Edited>(static_cast<int64_t>(num_biases));
  const bool has_penalty = args.repetition_penalty != 1.0f || args.frequency_penalty != 0.0f ||
                           args.presence_penalty != 0.0f;
  const std::span<const TokenMention> mentions =
      has_penalty ? args.mentions : std::span<const TokenMention>();
  const int64_t num_edited = EditBiased(args, mentions, {places, num_biases}, edited);
  Penalise(args, mentions);
  for (int64_t i = 0; i < num_edited; ++i) {
    args.logits[static_cast<size_t>(edited[i].id)] = edited[i].logit;
  }
  for (const int32_t id : args.banned_ids) {
    args.logits[static_cast<size_t>(id)] = -std::numeric_limits<float>::infinity();
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
