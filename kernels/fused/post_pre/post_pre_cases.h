// SPDX-License-Identifier: Apache-2.0
// Seeded arguments of post_pre in host memory, for its tests. No part of the product.
#pragma once

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/fused/post_pre/post_pre.h"
#include "kernels/hyper_connection/hyper_connection_cases.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {

struct PostPreCase {
  PostPreCase(uint64_t seed, int64_t tokens, int64_t hidden)
      : post(seed, tokens, hidden), pre(seed + 1000, tokens, hidden) {
    norm_weight = testing::NormalValues(seed + 2000, hidden);
    for (std::vector<float>* values : {&post.y, &post.streams}) {
      for (float& value : *values) value = RoundBf16(value);
    }
  }

  // The new streams are in post.out, the outputs of pre in `pre`.
  PostPreArgs Args() {
    PostPreArgs args;
    args.post = post.Args();
    args.pre = pre.Args();
    args.pre.streams = args.post.out;
    if (has_norm) {
      args.norm_weight = F32Vector(norm_weight.data(), static_cast<int64_t>(norm_weight.size()));
    }
    return args;
  }
  void Run(absl::Status (*operation)(const PostPreArgs&, const Exec&) = PostPre) {
    const absl::Status status = operation(Args(), Exec{});
    ASSERT_TRUE(status.ok()) << status;
  }

  PostCase post;
  PreCase pre;
  std::vector<float> norm_weight;
  bool has_norm = true;
};

}  // namespace isthmus::kernels
