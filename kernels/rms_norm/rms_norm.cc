// SPDX-License-Identifier: Apache-2.0
// Validation and the variant table of rms_norm.
#include "kernels/rms_norm/rms_norm.h"

#include "absl/strings/str_cat.h"
#include "kernels/rms_norm/rms_norm_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

absl::Status CheckRows(absl::string_view name, const MatrixView& view) {
  if (view.dtype != DType::kF32) {
    return absl::InvalidArgumentError(
        absl::StrCat("rms_norm: ", name, " must be f32, has dtype ", static_cast<int>(view.dtype)));
  }
  if (view.rows > 1 && view.row_stride < view.cols) {
    return absl::InvalidArgumentError(absl::StrCat("rms_norm: ", name, " has row stride ",
                                                   view.row_stride, ", hidden ", view.cols));
  }
  if (view.rows > 0 && view.data == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("rms_norm: ", name, " has ", view.rows, " rows and null data"));
  }
  return absl::OkStatus();
}

constexpr RmsNormVariant kVariants[] = {
    {nullptr, kAnyCuda, nullptr, LaunchRmsNormCuda},
    {nullptr, kCpuOnly, nullptr, LaunchRmsNormCpu},
};

}  // namespace

std::span<const RmsNormVariant> RmsNormVariants() { return kVariants; }

absl::Status ValidateRmsNorm(const RmsNormArgs& args) {
  if (args.x.rows < 0 || args.x.cols < 1) {
    return absl::InvalidArgumentError(absl::StrCat("rms_norm: x is [", args.x.rows, ", ",
                                                   args.x.cols, "]; hidden must be at least 1"));
  }
  if (args.weight.size != 0 && args.weight.size != args.x.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("rms_norm: x has hidden ", args.x.cols, ", weight has ", args.weight.size));
  }
  if (args.weight.size != 0 && args.weight.dtype != DType::kF32) {
    return absl::InvalidArgumentError(absl::StrCat("rms_norm: weight must be f32, has dtype ",
                                                   static_cast<int>(args.weight.dtype)));
  }
  if (args.out.rows != args.x.rows || args.out.cols != args.x.cols) {
    return absl::InvalidArgumentError(absl::StrCat("rms_norm: x is [", args.x.rows, ", ",
                                                   args.x.cols, "], out is [", args.out.rows, ", ",
                                                   args.out.cols, "]"));
  }
  if (!(args.epsilon >= 0.0f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rms_norm: epsilon is ", args.epsilon, "; it must be at least 0"));
  }
  ISTHMUS_RETURN_IF_ERROR(CheckRows("x", args.x));
  return CheckRows("out", args.out);
}

absl::Status RmsNorm(const RmsNormArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateRmsNorm(args));
  ISTHMUS_ASSIGN_OR_RETURN(const RmsNormVariant* variant, Choose(RmsNormVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
