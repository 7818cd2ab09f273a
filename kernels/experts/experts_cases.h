// SPDX-License-Identifier: Apache-2.0
// Cases for the tests of experts: random experts, a batch that names them, and the naive yardstick.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/core/formats.h"
#include "kernels/core/gemm.h"
#include "kernels/core/quantise.h"
#include "kernels/experts/experts_variants.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {

// One expert and the memory of its weights.
struct OwnedExpert {
  kernels::testing::OwnedWeight w1, w3, w2;
  ExpertWeights weights() const { return {w1.view, w3.view, w2.view}; }
};

inline OwnedExpert RandomExpert(uint64_t seed, WeightFormat format, int64_t hidden,
                                int64_t intermediate) {
  return {kernels::testing::RandomWeight(seed, format, intermediate, hidden),
          kernels::testing::RandomWeight(seed + 1, format, intermediate, hidden),
          kernels::testing::RandomWeight(seed + 2, format, hidden, intermediate)};
}

// A case with its inputs: `k` distinct experts per token, weights that sum to 1.5.
struct ExpertsCase {
  ExpertsCase(WeightFormat format, int64_t tokens, int64_t hidden, int64_t intermediate,
              int64_t num_experts, int64_t k, bool packed)
      : tokens_(tokens), hidden_(hidden), k_(k) {
    kernels::testing::Random random(17);
    for (int64_t e = 0; e < num_experts; ++e) {
      stored.push_back(RandomExpert(100 + 3 * uint64_t(e), format, hidden, intermediate));
    }
    shared_stored = RandomExpert(50, WeightFormat::kFp8Block128, hidden, intermediate);
    for (const OwnedExpert& e : stored) {
      panels.push_back({kernels::testing::Packed(e.w1.view), kernels::testing::Packed(e.w3.view),
                        kernels::testing::Packed(e.w2.view)});
      experts.push_back(packed ? panels.back().weights() : e.weights());
    }
    shared = shared_stored.weights();
    x = kernels::testing::OutlierValues(18, tokens * hidden);
    for (float& v : x) v = RoundBf16(v);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t j = 0; j < k; ++j) {
        ids.push_back(static_cast<int32_t>((random.Below(3) + 3 * j + t) % num_experts));
        weights.push_back(1.5f / static_cast<float>(k));
      }
    }
  }
  ExpertsArgs Args(Arithmetic arithmetic, float* out, float* routed) {
    ExpertsArgs args;
    args.x = F32Matrix(x.data(), tokens_, hidden_);
    args.ids = ids.data();
    args.weights = weights.data();
    args.k = k_;
    args.experts = experts;
    args.shared = &shared;
    args.out = F32Matrix(out, tokens_, hidden_);
    if (routed != nullptr) args.routed = F32Matrix(routed, tokens_, hidden_);
    args.arithmetic = arithmetic;
    return args;
  }
  int64_t tokens_, hidden_, k_;
  std::vector<OwnedExpert> stored, panels;
  OwnedExpert shared_stored;
  std::vector<ExpertWeights> experts;
  ExpertWeights shared;
  std::vector<float> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// The definition's loops with f32 sums and values: the yardstick.
inline std::vector<float> NaiveLinear(std::vector<float> x, const WeightView& w,
                                      Arithmetic arithmetic) {
  if (QuantisesInput(w, arithmetic)) {
    RoundTripFp8Row(x.data(), static_cast<int64_t>(x.size()), kActivationGroup, x.data());
  }
  std::vector<float> out(static_cast<size_t>(w.rows));
  for (int64_t n = 0; n < w.rows; ++n) {
    float sum = 0.0f;
    for (int64_t k = 0; k < w.cols; ++k) {
      sum += x[size_t(k)] * static_cast<float>(WeightValue(w, n, k));
    }
    out[size_t(n)] = arithmetic == Arithmetic::kReference ? RoundBf16(sum) : sum;
  }
  return out;
}
inline void NaiveExpert(const std::vector<float>& x, const ExpertWeights& e, float weight,
                        Arithmetic arithmetic, std::vector<float>* sum) {
  const std::vector<float> gate = NaiveLinear(x, e.w1, arithmetic);
  const std::vector<float> up = NaiveLinear(x, e.w3, arithmetic);
  std::vector<float> h(gate.size());
  for (size_t i = 0; i < h.size(); ++i) {
    const float g = std::min(gate[i], 10.0f);
    h[i] = g / (1.0f + std::exp(-g)) * std::clamp(up[i], -10.0f, 10.0f) * weight;
    if (arithmetic == Arithmetic::kReference) h[i] = RoundBf16(h[i]);
  }
  const std::vector<float> y = NaiveLinear(h, e.w2, arithmetic);
  for (size_t i = 0; i < y.size(); ++i) (*sum)[i] += y[i];
}
inline std::vector<float> NaiveExperts(const ExpertsArgs& args) {
  std::vector<float> out;
  for (int64_t t = 0; t < args.x.rows; ++t) {
    const std::vector<float> x(args.x.f32(t), args.x.f32(t) + args.x.cols);
    std::vector<float> sum(x.size(), 0.0f);
    for (int32_t id = 0; id < static_cast<int32_t>(args.experts.size()); ++id) {
      for (int64_t j = 0; j < args.k; ++j) {
        if (args.ids[t * args.k + j] != id) continue;
        NaiveExpert(x, args.experts[size_t(id)], args.weights[t * args.k + j], args.arithmetic,
                    &sum);
      }
    }
    NaiveExpert(x, *args.shared, 1.0f, args.arithmetic, &sum);
    for (const float v : sum) {
      out.push_back(args.arithmetic == Arithmetic::kReference ? RoundBf16(v) : v);
    }
  }
  return out;
}

}  // namespace isthmus::kernels
