// SPDX-License-Identifier: Apache-2.0
// Patches hyper_connection.fused_post_pre, bf16_hilo, tf32 and bf16: everything between two half
// layers in two launches (kernels/hyper_connection/mix_mma.cuh says how and what bounds it). The
// floor is 20 * hidden values a token, 80 KB at hidden 4096 in bf16, and fn once.
#include "kernels/fused/post_pre/post_pre_variants.h"
#include "kernels/hyper_connection/mix_finish.cuh"

namespace isthmus::kernels {
namespace {

template <typename T>
mix::Params<T> PostPreParams(const PostPreArgs& args) {
  const HyperConnectionPostArgs& post = args.post;
  const HyperConnectionPreArgs& pre = args.pre;
  mix::Params<T> params = {};
  params.y = static_cast<const T*>(post.y.data);
  params.y_stride = post.y.row_stride;
  params.streams = static_cast<const T*>(post.streams.data);
  params.streams_stride = post.streams.row_stride;
  params.out = static_cast<T*>(post.out.data);
  params.out_stride = post.out.row_stride;
  params.post_in = post.post.f32(0);
  params.post_in_stride = post.post.row_stride;
  params.comb_in = post.comb.f32(0);
  params.comb_in_stride = post.comb.row_stride;
  params.fn = static_cast<const uint8_t*>(pre.fn.elements);
  params.scale = pre.scale.f32();
  params.base = pre.base.f32();
  params.norm_weight = args.norm_weight.size == 0 ? nullptr : args.norm_weight.f32();
  params.x = static_cast<T*>(pre.x.data);
  params.x_stride = pre.x.row_stride;
  params.post = pre.post.f32(0);
  params.post_stride = pre.post.row_stride;
  params.comb = pre.comb.f32(0);
  params.comb_stride = pre.comb.row_stride;
  params.tokens = pre.x.rows;
  params.hidden = pre.x.cols;
  params.iterations = pre.sinkhorn_iterations;
  params.epsilon = pre.epsilon;
  params.hc_epsilon = pre.hc_epsilon;
  params.norm_epsilon = args.norm_epsilon;
  return params;
}

template <mix::Precision kPrecision>
absl::Status LaunchIn(const PostPreArgs& args, const Exec& exec) {
  if (args.pre.x.dtype == DType::kBf16) {
    return mix::LaunchMix<uint16_t, kPrecision, kNumMixes, true>(PostPreParams<uint16_t>(args),
                                                                 exec);
  }
  return mix::LaunchMix<float, kPrecision, kNumMixes, true>(PostPreParams<float>(args), exec);
}

}  // namespace

absl::Status LaunchPostPreF32(const PostPreArgs& args, const Exec& exec) {
  return LaunchIn<mix::Precision::kF32>(args, exec);
}
absl::Status LaunchPostPreBf16HiLo(const PostPreArgs& args, const Exec& exec) {
  return LaunchIn<mix::Precision::kBf16HiLo>(args, exec);
}
absl::Status LaunchPostPreTf32(const PostPreArgs& args, const Exec& exec) {
  return LaunchIn<mix::Precision::kTf32>(args, exec);
}
absl::Status LaunchPostPreBf16(const PostPreArgs& args, const Exec& exec) {
  return LaunchIn<mix::Precision::kBf16>(args, exec);
}

}  // namespace isthmus::kernels
