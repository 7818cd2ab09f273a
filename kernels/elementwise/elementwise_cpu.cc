// SPDX-License-Identifier: Apache-2.0
// elementwise on the CPU: what is said in the header, loop by loop.
#include <algorithm>
#include <cstring>

#include "kernels/core/formats.h"
#include "kernels/core/quantise.h"
#include "kernels/elementwise/elementwise_variants.h"

namespace isthmus::kernels {

absl::Status LaunchEmbedTokensCpu(const EmbedTokensArgs& args, const Exec&) {
  const int64_t hidden = args.table.cols;
  const auto* table = static_cast<const uint16_t*>(args.table.elements);
  for (int64_t t = 0; t < args.streams.rows; ++t) {
    float* out = args.streams.f32(t);
    if (args.tokens[t] < 0) {
      std::fill_n(out, args.streams.cols, 0.0f);
      continue;
    }
    const uint16_t* row = table + int64_t{args.tokens[t]} * hidden;
    for (int64_t d = 0; d < hidden; ++d) out[d] = Bf16Value(row[d]);
    for (int64_t first = hidden; first < args.streams.cols; first += hidden) {
      std::memcpy(out + first, out, sizeof(float) * static_cast<size_t>(hidden));
    }
  }
  return absl::OkStatus();
}

absl::Status LaunchGatherRowsCpu(const GatherRowsArgs& args, const Exec&) {
  for (int64_t r = 0; r < args.out.rows; ++r) {
    if (args.rows[r] < 0) {
      std::fill_n(args.out.f32(r), args.out.cols, 0.0f);
    } else {
      std::copy_n(args.x.f32(args.rows[r]), args.out.cols, args.out.f32(r));
    }
  }
  return absl::OkStatus();
}

absl::Status LaunchRoundTripKvCpu(const RoundTripKvArgs& args, const Exec&) {
  for (int64_t t = 0; t < args.x.rows; ++t) {
    RoundTripFp8Row(args.x.f32(t), args.x.cols - args.rope_dim, kKvNopeBlock, args.x.f32(t));
  }
  return absl::OkStatus();
}

absl::Status LaunchScaleRowsCpu(const ScaleRowsArgs& args, const Exec&) {
  const bool rounds = args.arithmetic == Arithmetic::kReference;
  for (int64_t t = 0; t < args.x.rows; ++t) {
    float* x = args.x.f32(t);
    for (int64_t d = 0; d < args.x.cols; ++d) {
      x[d] = rounds ? RoundBf16(x[d] * args.scale) : x[d] * args.scale;
    }
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
