// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/linear.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "kernels/linear/linear_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr Patch kSwapAb = {
    .name = "linear.swap_ab",
    .summary =
        "Streams the weights of a linear of few tokens through tensor cores, weights on their "
        "long side, in equal shares for all multiprocessors.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = true,
    // Tensor cores keep fewer bits than f32 of a group's e4m3 sum: a cosine difference below 5e-6
    // is a relative error below 3.2e-3.
    .bound = {NumericClass::kReducedPrecision, /*factor=*/2.0, /*floor=*/1e-3},
    .test = "LinearCudaTest",
    .decision = "kernels/linear/decisions/0001-swap-ab.md"};

constexpr Patch kTilesLarge = {
    .name = "linear.tiles_large",
    .summary =
        "Multiplies the many tokens of a prefill by tiles of 128 x 128 on tensor cores, both "
        "operands streamed in the order of their fragments.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = false,
    .bound = {NumericClass::kReducedPrecision, /*factor=*/2.0, /*floor=*/1e-3},
    .test = "LinearCudaTest",
    .decision = "kernels/linear/decisions/0002-tiles-large.md"};

constexpr Patch kTwoFormats = {
    .name = "linear.two_formats",
    .summary =
        "Linears of fp8 and of bf16 weights that are called together share a launch of at most "
        "eight tokens, each format a share of the multiprocessors by its bytes.",
    .phases = kPhaseDecode,
    .default_on = true,
    .bound = {NumericClass::kBitExact, /*factor=*/1.0, /*floor=*/0.0},  // Against swap_ab.
    .test = "LinearManyCudaTest",
    .decision = "kernels/linear/decisions/0003-two-formats.md"};

constexpr const Patch* kPatches[] = {&kSwapAb, &kTilesLarge, &kTwoFormats};

// Weights in tiles whose groups are those of the tokens; e4m3 codes or bf16 on both sides.
bool FitsTensorCores(const LinearArgs& args) {
  const WeightView& w = args.weight;
  if (w.rows < 1 || w.cols < 1) return false;
  if (w.layout != WeightLayout::kMmaTiles || w.first_col != 0) return false;
  if (w.first_row % 16 != 0) return false;
  if (reinterpret_cast<uintptr_t>(w.elements) % 16 != 0) return false;
  if (w.format == WeightFormat::kBf16) return !args.quantise_input;
  return w.format == WeightFormat::kFp8Block128;
}

// Tiles of 128 x 128, each of which a launch may count with.
int64_t OutputTiles(const LinearArgs& args) {
  return (args.x.rows + 127) / 128 * ((args.weight.rows + 127) / 128);
}

// Fastest first within an architecture; each architecture ends in its trusted path.
constexpr LinearVariant kVariants[] = {
    {&kSwapAb, kSm90Up, FitsSwapAb, LaunchLinearSwapAb, LaunchLinearManySwapAb},
    {&kTilesLarge, kSm90Up, FitsTilesLarge, LaunchLinearTilesLarge, LaunchLinearManyTilesLarge},
    {nullptr, kAnyCuda, nullptr, LaunchLinearCuda},
    {nullptr, kCpuOnly, nullptr, LaunchLinearCpu},  // linear_cpu.cc: one fixed summation order
};

absl::Status CheckMatrix(absl::string_view name, const MatrixView& m) {
  if (m.dtype != DType::kF32) {
    return absl::InvalidArgumentError(absl::StrCat(
        "linear: ", name, " has type ", static_cast<int>(m.dtype), ", expected f32 (0)"));
  }
  if (m.rows < 0 || m.cols < 0 || (m.rows > 1 && m.row_stride < m.cols)) {
    return absl::InvalidArgumentError(absl::StrCat("linear: ", name, " is [", m.rows, ", ", m.cols,
                                                   "] with row stride ", m.row_stride));
  }
  if (m.data == nullptr && m.rows * m.cols != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("linear: ", name, " [", m.rows, ", ", m.cols, "] has no data"));
  }
  return absl::OkStatus();
}

absl::Status CheckWeight(const WeightView& w) {
  const int64_t group = ScaleGroup(w.format);
  if (IsFp4(w.format) && w.cols % group != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("linear: fp4 weight has K ", w.cols, ", not a multiple of its group ", group));
  }
  const bool can_begin_inside = w.format == WeightFormat::kFp8Block128;
  if (w.first_col < 0 || w.first_col % 32 != 0 || w.first_col >= (can_begin_inside ? 128 : 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "linear: weight of format ", static_cast<int>(w.format), " begins at column ", w.first_col,
        " of a scale block, must be ", can_begin_inside ? "0, 32, 64 or 96" : "0"));
  }
  if (w.is_mxfp4_cast && (w.format != WeightFormat::kNvfp4 || w.cols % 32 != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("linear: an MXFP4 cast must be NVFP4 with K a multiple of 32, format is ",
                     static_cast<int>(w.format), ", K ", w.cols));
  }
  if (w.rows * w.cols == 0) return absl::OkStatus();
  if (w.elements == nullptr || (group != 0 && w.scales == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("linear: weight [", w.rows, ", ", w.cols,
                                                   "] of format ", static_cast<int>(w.format),
                                                   " lacks elements or scales"));
  }
  return absl::OkStatus();
}

// The first and last byte of a matrix, for the overlap check.
bool Overlap(const MatrixView& a, const MatrixView& b) {
  if (a.rows * a.cols == 0 || b.rows * b.cols == 0) return false;
  const auto begin = [](const MatrixView& m) { return reinterpret_cast<uintptr_t>(m.data); };
  const auto end = [&](const MatrixView& m) {
    return begin(m) + sizeof(float) * static_cast<uint64_t>((m.rows - 1) * m.row_stride + m.cols);
  };
  if (begin(a) >= end(b) || begin(b) >= end(a)) return false;
  // Two column slices of one matrix interleave without sharing an element.
  if (a.row_stride != b.row_stride || a.row_stride == 0) return true;
  const int64_t stride = a.row_stride;
  const auto apart = static_cast<int64_t>((begin(b) - begin(a)) / sizeof(float)) % stride + stride;
  const int64_t offset = apart % stride;  // Column of b's first element, from a's first.
  return offset < a.cols || offset + b.cols > stride;
}

}  // namespace

absl::Status ValidateLinear(const LinearArgs& args) {
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("x", args.x));
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("out", args.out));
  ISTHMUS_RETURN_IF_ERROR(CheckWeight(args.weight));
  if (args.x.cols != args.weight.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("linear: x has K ", args.x.cols, ", weight has K ", args.weight.cols));
  }
  if (args.out.rows != args.x.rows || args.out.cols != args.weight.rows) {
    return absl::InvalidArgumentError(absl::StrCat("linear: out is [", args.out.rows, ", ",
                                                   args.out.cols, "], expected [", args.x.rows,
                                                   ", ", args.weight.rows, "]"));
  }
  if (Overlap(args.x, args.out)) {
    return absl::InvalidArgumentError(absl::StrCat("linear: out [", args.out.rows, ", ",
                                                   args.out.cols, "] overlaps x [", args.x.rows,
                                                   ", ", args.x.cols, "]"));
  }
  return absl::OkStatus();
}

std::span<const LinearVariant> LinearVariants() { return kVariants; }
std::span<const Patch* const> LinearPatches() { return kPatches; }

bool FitsSwapAb(const LinearArgs& args) {
  return args.x.rows >= 1 && args.x.rows <= kSwapAbTokens && FitsTensorCores(args);
}
bool FitsTilesLarge(const LinearArgs& args) {
  return args.x.rows > kSwapAbTokens && OutputTiles(args) <= kNumCounters && FitsTensorCores(args);
}

bool RunTogether(const LinearArgs& a, const LinearArgs& b) {
  return a.weight.format == b.weight.format && a.weight.cols == b.weight.cols &&
         a.x.rows == b.x.rows && a.quantise_input == b.quantise_input &&
         a.input_is_quantised == b.input_is_quantised;
}

namespace {

// The first linears of a list that are one launch of a variant.
struct Group {
  const LinearVariant* variant = nullptr;
  std::span<const LinearArgs> linears;
};
absl::StatusOr<Group> FirstGroup(std::span<const LinearArgs> linears, const Exec& exec) {
  ISTHMUS_ASSIGN_OR_RETURN(const LinearVariant* variant,
                           Choose(LinearVariants(), linears[0], exec));
  size_t count = 1;
  int64_t tiles = OutputTiles(linears[0]);
  if (variant->launch_many != nullptr) {
    while (count < std::min(linears.size(), kMaxLinearsTogether) &&
           RunTogether(linears[0], linears[count]) && variant->supports(linears[count])) {
      tiles += OutputTiles(linears[count]);
      if (tiles > kNumCounters) break;
      ++count;
    }
  }
  return Group{variant, linears.first(count)};
}

bool AreTwoFormats(const Group& a, const Group& b, const Exec& exec) {
  return a.variant->patch == &kSwapAb && b.variant->patch == &kSwapAb && !exec.batch_invariant &&
         FitsTwoFormats(a.linears, b.linears);
}

}  // namespace

absl::Status LinearMany(std::span<const LinearArgs> linears, const Exec& exec) {
  for (const LinearArgs& args : linears) ISTHMUS_RETURN_IF_ERROR(ValidateLinear(args));
  while (!linears.empty()) {
    ISTHMUS_ASSIGN_OR_RETURN(const Group group, FirstGroup(linears, exec));
    linears = linears.subspan(group.linears.size());
    if (!linears.empty() && IsActive(kTwoFormats, exec)) {
      ISTHMUS_ASSIGN_OR_RETURN(const Group next, FirstGroup(linears, exec));
      if (AreTwoFormats(group, next, exec)) {
        ISTHMUS_RETURN_IF_ERROR(LaunchLinearTwoFormats(group.linears, next.linears, exec));
        linears = linears.subspan(next.linears.size());
        continue;
      }
    }
    ISTHMUS_RETURN_IF_ERROR(group.linears.size() == 1
                                ? group.variant->launch(group.linears[0], exec)
                                : group.variant->launch_many(group.linears, exec));
  }
  return absl::OkStatus();
}

absl::Status Linear(const LinearArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateLinear(args));
  ISTHMUS_ASSIGN_OR_RETURN(const LinearVariant* variant, Choose(LinearVariants(), args, exec));
  return variant->launch(args, exec);
}

absl::Status QuantiseActivation(const MatrixView& x, const MatrixView& out, const Exec& exec) {
  if (x.dtype != DType::kF32 || out.dtype != DType::kF32) {
    return absl::InvalidArgumentError(
        absl::StrCat("quantise_activation: x has type ", static_cast<int>(x.dtype), ", out ",
                     static_cast<int>(out.dtype), "; both must be f32 (0)"));
  }
  if (x.rows != out.rows || x.cols != out.cols) {
    return absl::InvalidArgumentError(absl::StrCat("quantise_activation: x is [", x.rows, ", ",
                                                   x.cols, "], out is [", out.rows, ", ", out.cols,
                                                   "]"));
  }
  if (!IsDevice(exec.arch)) {
    QuantiseActivationCpu(x, out, exec);
    return absl::OkStatus();
  }
  return LaunchQuantiseActivationCuda(x, out, exec);
}

}  // namespace isthmus::kernels
