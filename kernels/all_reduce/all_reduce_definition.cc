// SPDX-License-Identifier: Apache-2.0
// The definition: the formula of all_reduce.h over the inputs of all ranks, sums in f64.
#include "kernels/all_reduce/all_reduce.h"
#include "kernels/core/formats.h"

namespace isthmus::kernels {

absl::Status AllReduceDefinition(std::span<const AllReduceArgs> ranks) {
  const AllReduceArgs& first = ranks.front();
  for (int64_t t = 0; t < first.x.rows; ++t) {
    for (int64_t d = 0; d < first.x.cols; ++d) {
      double sum = 0.0;
      for (const AllReduceArgs& args : ranks) {
        const float x = args.x.f32(t)[d];
        sum += args.wire == DType::kBf16 && ranks.size() > 1 ? RoundBf16(x) : x;
      }
      for (const AllReduceArgs& args : ranks) {
        const auto value = static_cast<float>(sum);
        args.out.f32(t)[d] = args.round_output ? RoundBf16(value) : value;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
