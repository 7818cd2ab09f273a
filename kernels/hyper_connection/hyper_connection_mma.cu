// SPDX-License-Identifier: Apache-2.0
// Patch hyper_connection.fused_pre: pre and the stream head in two launches, split over blocks of
// columns, fn as three bf16 terms. Bound by latency at few tokens; at many, by the streams, read
// once from memory and once more from L2 (mix_mma.cuh).
#include "kernels/hyper_connection/hyper_connection_variants.h"
#include "kernels/hyper_connection/mix_finish.cuh"

namespace isthmus::kernels {
namespace {

// What pre and the stream head share. The streams are read in place of the new ones.
template <typename T, typename Args>
mix::Params<T> MixParams(const Args& args) {
  mix::Params<T> params = {};
  params.streams = static_cast<const T*>(args.streams.data);
  params.out = static_cast<T*>(args.streams.data);
  params.streams_stride = params.out_stride = args.streams.row_stride;
  params.fn = static_cast<const uint8_t*>(args.fn.elements);
  params.scale = args.scale.f32();
  params.base = args.base.f32();
  params.x = static_cast<T*>(args.x.data);
  params.x_stride = args.x.row_stride;
  params.tokens = args.streams.rows;
  params.hidden = args.x.cols;
  params.epsilon = args.epsilon;
  params.hc_epsilon = args.hc_epsilon;
  return params;
}

template <typename T>
absl::Status LaunchPreOf(const HyperConnectionPreArgs& args, const Exec& exec) {
  mix::Params<T> params = MixParams<T>(args);
  params.post = args.post.f32(0);
  params.post_stride = args.post.row_stride;
  params.comb = args.comb.f32(0);
  params.comb_stride = args.comb.row_stride;
  params.iterations = args.sinkhorn_iterations;
  return mix::LaunchMix<T, mix::Precision::kF32, kNumMixes, false>(params, exec);
}

}  // namespace

absl::Status LaunchHyperConnectionPreMma(const HyperConnectionPreArgs& args, const Exec& exec) {
  return args.streams.dtype == DType::kBf16 ? LaunchPreOf<uint16_t>(args, exec)
                                            : LaunchPreOf<float>(args, exec);
}

absl::Status LaunchHyperConnectionHeadMma(const HyperConnectionHeadArgs& args, const Exec& exec) {
  constexpr mix::Precision kPrecision = mix::Precision::kF32;
  if (args.streams.dtype == DType::kBf16) {
    return mix::LaunchMix<uint16_t, kPrecision, kNumStreams, false>(MixParams<uint16_t>(args),
                                                                    exec);
  }
  return mix::LaunchMix<float, kPrecision, kNumStreams, false>(MixParams<float>(args), exec);
}

}  // namespace isthmus::kernels
