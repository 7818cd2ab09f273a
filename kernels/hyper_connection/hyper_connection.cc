// SPDX-License-Identifier: Apache-2.0
// Validation and the variant tables of the hyper-connection operations.
#include "kernels/hyper_connection/hyper_connection.h"

#include "absl/strings/str_cat.h"
#include "kernels/hyper_connection/hyper_connection_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

// More passes than any model uses; a bound, so that a bad configuration cannot hang a step.
constexpr int kMaxSinkhornIterations = 1000;

absl::Status CheckMatrix(absl::string_view name, const MatrixView& view, int64_t rows, int64_t cols,
                         bool may_be_bf16 = false) {
  if (view.dtype != DType::kF32 && !(may_be_bf16 && view.dtype == DType::kBf16)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hyper_connection: ", name, " must be f32, has dtype ", static_cast<int>(view.dtype)));
  }
  if (view.rows != rows || view.cols != cols) {
    return absl::InvalidArgumentError(absl::StrCat("hyper_connection: ", name, " is [", view.rows,
                                                   ", ", view.cols, "], expected [", rows, ", ",
                                                   cols, "]"));
  }
  if (view.rows > 1 && view.row_stride < view.cols) {
    return absl::InvalidArgumentError(absl::StrCat("hyper_connection: ", name, " has row stride ",
                                                   view.row_stride, ", columns ", view.cols));
  }
  if (view.rows > 0 && view.data == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("hyper_connection: ", name, " has ", view.rows, " rows and null data"));
  }
  return absl::OkStatus();
}

absl::Status CheckVector(absl::string_view name, const VectorView& view, int64_t size) {
  if (view.dtype != DType::kF32 || view.size != size || view.data == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("hyper_connection: ", name, " has size ", view.size, " and dtype ",
                     static_cast<int>(view.dtype), ", expected ", size, " and f32"));
  }
  return absl::OkStatus();
}

// On a GPU, values that are on the bf16 grid anyway may be stored so.
bool MayBeBf16(Arithmetic arithmetic, int arch) {
  return IsDevice(arch) && arithmetic == Arithmetic::kReference;
}

// What pre and the stream head share: streams, fn, scale, base, the epsilons and x.
template <typename Args>
absl::Status CheckMix(const Args& args, int64_t num_mixes, int64_t num_scales, int arch) {
  const int64_t hidden = args.x.cols;
  const bool bf16 = MayBeBf16(args.arithmetic, arch);
  if (args.streams.rows < 0 || hidden < 1) {
    return absl::InvalidArgumentError(absl::StrCat("hyper_connection: ", args.streams.rows,
                                                   " tokens of hidden ", hidden,
                                                   "; hidden must be at least 1"));
  }
  ISTHMUS_RETURN_IF_ERROR(
      CheckMatrix("streams", args.streams, args.streams.rows, kNumStreams * hidden, bf16));
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("x", args.x, args.streams.rows, hidden, bf16));
  if (args.fn.format != WeightFormat::kF32 || args.fn.elements == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("hyper_connection: fn must be f32, has format ",
                                                   static_cast<int>(args.fn.format)));
  }
  if (args.fn.rows != num_mixes || args.fn.cols != kNumStreams * hidden) {
    return absl::InvalidArgumentError(absl::StrCat("hyper_connection: fn is [", args.fn.rows, ", ",
                                                   args.fn.cols, "], expected [", num_mixes, ", ",
                                                   kNumStreams * hidden, "]"));
  }
  ISTHMUS_RETURN_IF_ERROR(CheckVector("scale", args.scale, num_scales));
  ISTHMUS_RETURN_IF_ERROR(CheckVector("base", args.base, num_mixes));
  if (!(args.epsilon >= 0.0f) || !(args.hc_epsilon >= 0.0f)) {
    return absl::InvalidArgumentError(absl::StrCat("hyper_connection: epsilon is ", args.epsilon,
                                                   ", hc_epsilon ", args.hc_epsilon,
                                                   "; both must be at least 0"));
  }
  return absl::OkStatus();
}

constexpr Patch kFusedPre = {
    .name = "hyper_connection.fused_pre",
    .summary =
        "Mix, gates and weighted sum in two launches over blocks of columns, on tensor cores with "
        "fn "
        "in three bf16 terms, so that one token fills the device and fn is read once for many.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = true,
    .bound = {NumericClass::kReordered, /*factor=*/2.0, /*floor=*/1e-6},
    .test = "HyperConnectionFusedTest",
    .decision = "kernels/hyper_connection/decisions/0001-mix-split-over-columns.md"};
constexpr const Patch* kPatches[] = {&kFusedPre};

template <typename Args>
bool FusesMixOf(const Args& args) {
  return FusesMix(args.streams, args.fn, args.x, args.arithmetic);
}
bool FusesPre(const HyperConnectionPreArgs& args) {
  return FusesMixOf(args) && IsAligned16(args.comb);
}

constexpr HyperConnectionVariant<HyperConnectionPreArgs> kPreVariants[] = {
    {&kFusedPre, kSm90Up, FusesPre, LaunchHyperConnectionPreMma},
    {nullptr, kCpuOnly, nullptr, LaunchHyperConnectionPreCpu},
    {nullptr, kAnyCuda, nullptr, LaunchHyperConnectionPreCuda},
};
constexpr HyperConnectionVariant<HyperConnectionPostArgs> kPostVariants[] = {
    {nullptr, kCpuOnly, nullptr, LaunchHyperConnectionPostCpu},
    {nullptr, kAnyCuda, nullptr, LaunchHyperConnectionPostCuda},
};
constexpr HyperConnectionVariant<HyperConnectionHeadArgs> kHeadVariants[] = {
    {&kFusedPre, kSm90Up, FusesMixOf<HyperConnectionHeadArgs>, LaunchHyperConnectionHeadMma},
    {nullptr, kCpuOnly, nullptr, LaunchHyperConnectionHeadCpu},
    {nullptr, kAnyCuda, nullptr, LaunchHyperConnectionHeadCuda},
};

}  // namespace

std::span<const Patch* const> HyperConnectionPatches() { return kPatches; }

bool IsAligned16(const MatrixView& view) {
  const int64_t bytes = view.dtype == DType::kBf16 ? 2 : 4;
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.row_stride * bytes % 16 == 0;
}

bool FusesMix(const MatrixView& streams, const WeightView& fn, const MatrixView& x,
              Arithmetic arithmetic) {
  constexpr int64_t kBlock = 64;
  constexpr int64_t kMaxHidden = 8192;  // x of four tokens fits into shared memory.
  return arithmetic == Arithmetic::kReference && fn.layout == WeightLayout::kMmaTiles &&
         streams.dtype == x.dtype && x.cols % kBlock == 0 && x.cols <= kMaxHidden &&
         IsAligned16(streams) && IsAligned16(x);
}

std::span<const HyperConnectionVariant<HyperConnectionPreArgs>> HyperConnectionPreVariants() {
  return kPreVariants;
}
std::span<const HyperConnectionVariant<HyperConnectionPostArgs>> HyperConnectionPostVariants() {
  return kPostVariants;
}
std::span<const HyperConnectionVariant<HyperConnectionHeadArgs>> HyperConnectionHeadVariants() {
  return kHeadVariants;
}

absl::Status ValidateHyperConnectionPre(const HyperConnectionPreArgs& args, int arch) {
  ISTHMUS_RETURN_IF_ERROR(CheckMix(args, kNumMixes, 3, arch));
  if (args.sinkhorn_iterations < 1 || args.sinkhorn_iterations > kMaxSinkhornIterations) {
    return absl::InvalidArgumentError(absl::StrCat("hyper_connection: sinkhorn_iterations is ",
                                                   args.sinkhorn_iterations, "; it must be in [1, ",
                                                   kMaxSinkhornIterations, "]"));
  }
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("post", args.post, args.streams.rows, kNumStreams));
  return CheckMatrix("comb", args.comb, args.streams.rows, int64_t{kNumStreams} * kNumStreams);
}

absl::Status ValidateHyperConnectionPost(const HyperConnectionPostArgs& args, int arch) {
  const int64_t tokens = args.y.rows;
  const int64_t hidden = args.y.cols;
  if (tokens < 0 || hidden < 1) {
    return absl::InvalidArgumentError(absl::StrCat("hyper_connection: y is [", tokens, ", ", hidden,
                                                   "]; hidden must be at least 1"));
  }
  const bool bf16 = MayBeBf16(args.arithmetic, arch);
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("y", args.y, tokens, hidden, bf16));
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("streams", args.streams, tokens, kNumStreams * hidden, bf16));
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("post", args.post, tokens, kNumStreams));
  ISTHMUS_RETURN_IF_ERROR(
      CheckMatrix("comb", args.comb, tokens, int64_t{kNumStreams} * kNumStreams));
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("out", args.out, tokens, kNumStreams * hidden, bf16));
  const bool in_place = args.out.data == args.streams.data;
  if (in_place && args.out.dtype != args.streams.dtype) {
    return absl::InvalidArgumentError("hyper_connection: out is streams in another type");
  }
  if (in_place && args.out.row_stride != args.streams.row_stride) {
    return absl::InvalidArgumentError(
        absl::StrCat("hyper_connection: out is streams with row stride ", args.out.row_stride,
                     " instead of ", args.streams.row_stride));
  }
  return absl::OkStatus();
}

absl::Status ValidateHyperConnectionHead(const HyperConnectionHeadArgs& args, int arch) {
  return CheckMix(args, kNumStreams, 1, arch);
}

absl::Status HyperConnectionPre(const HyperConnectionPreArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateHyperConnectionPre(args, exec.arch));
  ISTHMUS_ASSIGN_OR_RETURN(const auto* variant, Choose(HyperConnectionPreVariants(), args, exec));
  return variant->launch(args, exec);
}

absl::Status HyperConnectionPost(const HyperConnectionPostArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateHyperConnectionPost(args, exec.arch));
  ISTHMUS_ASSIGN_OR_RETURN(const auto* variant, Choose(HyperConnectionPostVariants(), args, exec));
  return variant->launch(args, exec);
}

absl::Status HyperConnectionHead(const HyperConnectionHeadArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateHyperConnectionHead(args, exec.arch));
  ISTHMUS_ASSIGN_OR_RETURN(const auto* variant, Choose(HyperConnectionHeadVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
