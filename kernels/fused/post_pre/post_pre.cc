// SPDX-License-Identifier: Apache-2.0
// Validation, the trusted path and the variant table of post_pre.
#include "kernels/fused/post_pre/post_pre.h"

#include "absl/strings/str_cat.h"
#include "kernels/fused/post_pre/post_pre_variants.h"
#include "kernels/hyper_connection/hyper_connection_variants.h"
#include "kernels/rms_norm/rms_norm.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr uint32_t kBothPhases = kPhasePrefill | kPhaseDecode;

constexpr Patch kFused = {
    .name = "hyper_connection.fused_post_pre",
    .summary =
        "Post, mix, gates, weighted sum and norm in two launches that read the streams from "
        "memory once, fn in three bf16 terms, which are all of f32.",
    .phases = kBothPhases,
    .default_on = true,
    .bound = {NumericClass::kReordered, /*factor=*/2.0, /*floor=*/1e-6},
    .test = "PostPreTest",
    .decision = "kernels/fused/post_pre/decisions/0002-finish-in-a-launch-of-its-own.md"};
constexpr Patch kBf16HiLo = {
    .name = "hyper_connection.bf16_hilo",
    .summary = "The same launches with fn in two bf16 terms: a third fewer products and registers.",
    .phases = kBothPhases,
    .default_on = false,
    .bound = {NumericClass::kReducedPrecision, /*factor=*/2.0, /*floor=*/1e-5},
    .test = "PostPreTest",
    .decision = "kernels/fused/post_pre/decisions/0002-finish-in-a-launch-of-its-own.md"};
constexpr Patch kTf32 = {
    .name = "hyper_connection.tf32",
    .summary =
        "The same launches with fn in tf32, as other engines have it: as many products as two "
        "bf16 terms.",
    .phases = kBothPhases,
    .default_on = false,
    .bound = {NumericClass::kReducedPrecision, /*factor=*/2.0, /*floor=*/5e-4},
    .test = "PostPreTest",
    .decision = "kernels/fused/post_pre/decisions/0002-finish-in-a-launch-of-its-own.md"};
constexpr Patch kBf16 = {
    .name = "hyper_connection.bf16",
    .summary = "The same launches with fn in bf16: the fewest products and registers.",
    .phases = kBothPhases,
    .default_on = false,
    .bound = {NumericClass::kReducedPrecision, /*factor=*/2.0, /*floor=*/5e-3},
    .test = "PostPreTest",
    .decision = "kernels/fused/post_pre/decisions/0002-finish-in-a-launch-of-its-own.md"};
constexpr const Patch* kPatches[] = {&kFused, &kBf16HiLo, &kTf32, &kBf16};

bool Fuses(const PostPreArgs& args) {
  const DType dtype = args.pre.x.dtype;
  const bool is_weight_aligned = reinterpret_cast<uintptr_t>(args.norm_weight.data) % 16 == 0;
  return is_weight_aligned &&
         FusesMix(args.pre.streams, args.pre.fn, args.pre.x, args.pre.arithmetic) &&
         args.post.y.dtype == dtype && args.post.streams.dtype == dtype &&
         IsAligned16(args.post.y) && IsAligned16(args.post.streams) &&
         IsAligned16(args.post.post) && IsAligned16(args.post.comb) && IsAligned16(args.pre.comb);
}

// The less exact ones come first, since whoever turned one on wants it.
constexpr PostPreVariant kVariants[] = {
    {&kBf16, kSm90Up, Fuses, LaunchPostPreBf16},
    {&kTf32, kSm90Up, Fuses, LaunchPostPreTf32},
    {&kBf16HiLo, kSm90Up, Fuses, LaunchPostPreBf16HiLo},
    {&kFused, kSm90Up, Fuses, LaunchPostPreF32},
    {nullptr, {kArchCpu, kAnyCuda.end}, nullptr, LaunchPostPreInTurn},
};

bool SameView(const MatrixView& a, const MatrixView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rows == b.rows && a.cols == b.cols &&
         a.row_stride == b.row_stride;
}

}  // namespace

std::span<const Patch* const> PostPrePatches() { return kPatches; }
std::span<const PostPreVariant> PostPreVariants() { return kVariants; }

absl::Status ValidatePostPre(const PostPreArgs& args, int arch) {
  ISTHMUS_RETURN_IF_ERROR(ValidateHyperConnectionPost(args.post, arch));
  ISTHMUS_RETURN_IF_ERROR(ValidateHyperConnectionPre(args.pre, arch));
  if (!SameView(args.pre.streams, args.post.out)) {
    return absl::InvalidArgumentError("post_pre: pre.streams is not post.out");
  }
  if (args.post.arithmetic != args.pre.arithmetic) {
    return absl::InvalidArgumentError("post_pre: post and pre have different arithmetics");
  }
  const VectorView& weight = args.norm_weight;
  if (weight.size == 0) return absl::OkStatus();
  if (weight.size != args.pre.x.cols || weight.dtype != DType::kF32 || weight.data == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("post_pre: norm_weight has ", weight.size, " elements of dtype ",
                     static_cast<int>(weight.dtype), ", expected f32 of hidden ", args.pre.x.cols));
  }
  if (!(args.norm_epsilon >= 0.0f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("post_pre: norm_epsilon is ", args.norm_epsilon, "; it must be at least 0"));
  }
  return absl::OkStatus();
}

absl::Status LaunchPostPreInTurn(const PostPreArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(HyperConnectionPost(args.post, exec));
  ISTHMUS_RETURN_IF_ERROR(HyperConnectionPre(args.pre, exec));
  if (args.norm_weight.size == 0) return absl::OkStatus();
  return RmsNorm({.x = args.pre.x,
                  .weight = args.norm_weight,
                  .out = args.pre.x,
                  .epsilon = args.norm_epsilon,
                  .arithmetic = args.pre.arithmetic},
                 exec);
}

absl::Status PostPre(const PostPreArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidatePostPre(args, exec.arch));
  ISTHMUS_ASSIGN_OR_RETURN(const PostPreVariant* variant, Choose(PostPreVariants(), args, exec));
  return variant->launch(args, exec);
}

absl::Status PostPreDefinition(const PostPreArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidatePostPre(args));
  ISTHMUS_RETURN_IF_ERROR(HyperConnectionPostDefinition(args.post, exec));
  ISTHMUS_RETURN_IF_ERROR(HyperConnectionPreDefinition(args.pre, exec));
  if (args.norm_weight.size == 0) return absl::OkStatus();
  return RmsNormDefinition({.x = args.pre.x,
                            .weight = args.norm_weight,
                            .out = args.pre.x,
                            .epsilon = args.norm_epsilon,
                            .arithmetic = args.pre.arithmetic},
                           exec);
}

}  // namespace isthmus::kernels
