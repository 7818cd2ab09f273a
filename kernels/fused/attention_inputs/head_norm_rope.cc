// SPDX-License-Identifier: Apache-2.0
// Validation, the trusted path and the variant table of head_norm_rope.
#include "kernels/fused/attention_inputs/head_norm_rope.h"

#include "absl/strings/str_cat.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/fused/attention_inputs/head_norm_rope_variants.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {

const Patch kHeadNormRopeWarpPerHead = {
    .name = "head_norm_rope.warp_per_head",
    .summary =
        "Norm, rotation and round trip of all heads and of the latent entry in one launch, a head "
        "in the registers of a warp, instead of five.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = true,
    .bound = {NumericClass::kBitExact, /*factor=*/1.0, /*floor=*/0.0},
    .test = "HeadNormRopeTest",
    .decision = "kernels/fused/attention_inputs/decisions/0001-warp-per-head.md"};

namespace {

// A lane holds whole blocks of the round trip, and at most 16 elements.
bool FitsWarps(const HeadNormRopeArgs& args) {
  return args.head_dim % 128 == 0 && args.head_dim <= 512;
}

constexpr HeadNormRopeVariant kVariants[] = {
    {&kHeadNormRopeWarpPerHead, kAnyCuda, FitsWarps, LaunchHeadNormRopeWarps},
    {nullptr, {kArchCpu, kAnyCuda.end}, nullptr, LaunchHeadNormRopeInTurn},
};

}  // namespace

absl::Status ValidateHeadNormRope(const HeadNormRopeArgs& args) {
  const MatrixView& q = args.q;
  if (args.head_dim < 1 || q.cols % args.head_dim != 0 || args.kv.cols != args.head_dim ||
      args.kv.rows != q.rows || args.kv_weight.size != args.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "head_norm_rope: q is [", q.rows, ", ", q.cols, "], kv [", args.kv.rows, ", ", args.kv.cols,
        "], kv_weight ", args.kv_weight.size, ", head_dim ", args.head_dim));
  }
  if (q.rows > 1 && q.row_stride != q.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_norm_rope: q has row stride ", q.row_stride, ", columns ", q.cols));
  }
  const auto pairs = static_cast<int64_t>(args.frequency.size());
  if (pairs < 1 || pairs > 64 || 2 * pairs > args.head_dim ||
      static_cast<int64_t>(args.positions.size()) != q.rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_norm_rope: ", pairs, " frequencies for head_dim ", args.head_dim, ", ",
                     args.positions.size(), " positions for ", q.rows, " tokens"));
  }
  if (args.arithmetic == Arithmetic::kReference && (args.head_dim - 2 * pairs) % 64 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("head_norm_rope: head_dim ", args.head_dim,
                                                   " less the ", 2 * pairs,
                                                   " rotated is no multiple of 64"));
  }
  return absl::OkStatus();
}

std::span<const HeadNormRopeVariant> HeadNormRopeVariants() { return kVariants; }

absl::Status LaunchHeadNormRopeInTurn(const HeadNormRopeArgs& args, const Exec& exec) {
  const int64_t heads = args.q.cols / args.head_dim;
  const MatrixView per_head = F32Matrix(args.q.f32(0), args.q.rows * heads, args.head_dim);
  ISTHMUS_RETURN_IF_ERROR(RmsNorm({.x = per_head,
                                   .weight = {},
                                   .out = per_head,
                                   .epsilon = args.epsilon,
                                   .arithmetic = args.arithmetic},
                                  exec));
  ISTHMUS_RETURN_IF_ERROR(RmsNorm({.x = args.kv,
                                   .weight = args.kv_weight,
                                   .out = args.kv,
                                   .epsilon = args.epsilon,
                                   .arithmetic = args.arithmetic},
                                  exec));
  for (const MatrixView& x : {args.q, args.kv}) {
    ISTHMUS_RETURN_IF_ERROR(Rope({.x = x,
                                  .head_dim = args.head_dim,
                                  .positions = args.positions,
                                  .frequency = args.frequency,
                                  .arithmetic = args.arithmetic},
                                 exec));
  }
  if (args.arithmetic != Arithmetic::kReference) return absl::OkStatus();
  const auto rope_dim = static_cast<int64_t>(2 * args.frequency.size());
  return RoundTripKv({.x = args.kv, .rope_dim = rope_dim}, exec);
}

absl::Status HeadNormRope(const HeadNormRopeArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateHeadNormRope(args));
  ISTHMUS_ASSIGN_OR_RETURN(const HeadNormRopeVariant* variant,
                           Choose(HeadNormRopeVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
