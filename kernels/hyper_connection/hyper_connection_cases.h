// SPDX-License-Identifier: Apache-2.0
// Seeded cases of the hyper-connection operations for tests and benchmarks: the arguments and the
// memory that they point to. No part of the product.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {

// What pre and the stream head share.
struct MixCase {
  MixCase(uint64_t seed, int64_t num_tokens, int64_t hidden_size, int64_t num_mixes,
          std::vector<float> scales)
      : tokens(num_tokens), hidden(hidden_size), mixes(num_mixes), scale(std::move(scales)) {
    streams = testing::OutlierValues(seed, tokens * 4 * hidden);
    fn = testing::NormalValues(seed + 100, mixes * 4 * hidden, 0.02f);
    base = testing::NormalValues(seed + 200, mixes);
    x.assign(tokens * hidden, 0.0f);
  }

  // The weight as the operation reads it; made anew, since tests change `fn`.
  WeightView Fn() {
    weight = testing::WeightFrom(WeightFormat::kF32, mixes, 4 * hidden, fn);
    if (!packed) return weight.view;
    panels = testing::Packed(weight.view);
    return panels.view;
  }
  void KeepToken(int64_t t) {
    const auto first = streams.begin() + t * 4 * hidden;
    streams = std::vector<float>(first, first + 4 * hidden);
    tokens = 1;
    x.resize(hidden);
  }

  int64_t tokens, hidden, mixes;
  bool packed = false;
  Arithmetic arithmetic = Arithmetic::kReference;
  std::vector<float> streams, fn, base, scale, x;
  testing::OwnedWeight weight, panels;
};

struct PreCase : MixCase {
  PreCase(uint64_t seed, int64_t num_tokens, int64_t hidden_size)
      : MixCase(seed, num_tokens, hidden_size, kNumMixes, {0.5f, 0.75f, 1.25f}) {
    post.assign(tokens * 4, 0.0f);
    comb.assign(tokens * 16, 0.0f);
  }

  void KeepToken(int64_t t) {
    MixCase::KeepToken(t);
    post.resize(4);
    comb.resize(16);
  }
  HyperConnectionPreArgs Args() {
    return {.streams = F32Matrix(streams.data(), tokens, 4 * hidden),
            .fn = Fn(),
            .scale = F32Vector(scale.data(), 3),
            .base = F32Vector(base.data(), kNumMixes),
            .x = F32Matrix(x.data(), tokens, hidden),
            .post = F32Matrix(post.data(), tokens, 4),
            .comb = F32Matrix(comb.data(), tokens, 16),
            .arithmetic = arithmetic};
  }
  void Run(absl::Status (*operation)(const HyperConnectionPreArgs&,
                                     const Exec&) = HyperConnectionPre,
           const Exec& exec = {}) {
    const absl::Status status = operation(Args(), exec);
    ASSERT_TRUE(status.ok()) << status;
  }

  std::vector<float> post, comb;
};

struct HeadCase : MixCase {
  HeadCase(uint64_t seed, int64_t num_tokens, int64_t hidden_size)
      : MixCase(seed, num_tokens, hidden_size, kNumStreams, {0.75f}) {}

  HyperConnectionHeadArgs Args() {
    return {.streams = F32Matrix(streams.data(), tokens, 4 * hidden),
            .fn = Fn(),
            .scale = F32Vector(scale.data(), 1),
            .base = F32Vector(base.data(), kNumStreams),
            .x = F32Matrix(x.data(), tokens, hidden),
            .arithmetic = arithmetic};
  }
  void Run(absl::Status (*operation)(const HyperConnectionHeadArgs&,
                                     const Exec&) = HyperConnectionHead,
           const Exec& exec = {}) {
    const absl::Status status = operation(Args(), exec);
    ASSERT_TRUE(status.ok()) << status;
  }
};

struct PostCase {
  PostCase(uint64_t seed, int64_t num_tokens, int64_t hidden_size)
      : tokens(num_tokens), hidden(hidden_size) {
    y = testing::OutlierValues(seed, tokens * hidden);
    streams = testing::OutlierValues(seed + 100, tokens * 4 * hidden);
    post = testing::NormalValues(seed + 200, tokens * 4);
    comb = testing::NormalValues(seed + 300, tokens * 16, 0.5f);
    out.assign(tokens * 4 * hidden, 0.0f);
  }

  HyperConnectionPostArgs Args() {
    return {.y = F32Matrix(y.data(), tokens, hidden),
            .streams = F32Matrix(streams.data(), tokens, 4 * hidden),
            .post = F32Matrix(post.data(), tokens, 4),
            .comb = F32Matrix(comb.data(), tokens, 16),
            .out = F32Matrix(out.data(), tokens, 4 * hidden),
            .arithmetic = arithmetic};
  }
  void Run(absl::Status (*operation)(const HyperConnectionPostArgs&,
                                     const Exec&) = HyperConnectionPost,
           const Exec& exec = {}) {
    const absl::Status status = operation(Args(), exec);
    ASSERT_TRUE(status.ok()) << status;
  }

  int64_t tokens, hidden;
  Arithmetic arithmetic = Arithmetic::kReference;
  std::vector<float> y, streams, post, comb, out;
};

}  // namespace isthmus::kernels
