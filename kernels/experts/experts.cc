// SPDX-License-Identifier: Apache-2.0
#include "kernels/experts/experts.h"

#include "absl/strings/str_cat.h"
#include "kernels/experts/experts_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr Patch kGroupedW4A8 = {
    .name = "experts.grouped_w4a8",
    .summary =
        "All experts of a step, the shared one among them, run in two launches of "
        "tensor-core products that stream the weights of experts with tokens once, without "
        "a pause between experts.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = true,
    // The hardware adds the 32 products of an fp8 step with fewer bits than f32; that turns bf16
    // and e4m3 roundings of values near the middle. The cosine differs by 5e-6 at 3.2e-3.
    .bound = {NumericClass::kReducedPrecision, /*factor=*/2.0, /*floor=*/2e-3},
    .test = "ExpertsCudaTest",
    .decision = "kernels/experts/decisions/0001-grouped-w4a8.md"};
constexpr Patch kGroupedMxf8f6f4 = {
    .name = "experts.grouped_mxf8f6f4",
    .summary =
        "experts.grouped_w4a8 with the block-scaled tensor cores of sm_120a, which take fp4 codes "
        "and scales as they are stored, so that less work stands around each product.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = false,
    .bound = {NumericClass::kReducedPrecision, /*factor=*/2.0, /*floor=*/2e-3},
    .test = "ExpertsCudaTest",
    .decision = "kernels/experts/decisions/0001-grouped-w4a8.md"};
constexpr Patch kGroupedW4A4 = {
    .name = "experts.grouped_w4a4",
    .summary =
        "experts.grouped_mxf8f6f4 with the inputs of routed experts rounded to NVFP4 as well, "
        "which "
        "the tensor cores of sm_120a multiply twice as fast, for prompts.",
    .phases = kPhasePrefill,
    .default_on = false,
    // Of what the rounding of inputs does, twice in a row; without it as the others.
    .bound = {NumericClass::kReducedPrecision, /*factor=*/2.0, /*floor=*/0.25},
    .test = "ExpertsCudaTest",
    .decision = "kernels/experts/decisions/0002-grouped-w4a4.md"};
constexpr const Patch* kPatches[] = {&kGroupedW4A8, &kGroupedMxf8f6f4, &kGroupedW4A4};

// Fastest first within an architecture; each architecture ends in its trusted path.
constexpr ExpertsVariant kVariants[] = {
    {&kGroupedW4A4, kSm120Only, SupportsGroupedW4A4, LaunchExpertsGroupedW4A4},
    {&kGroupedMxf8f6f4, kSm120Only, SupportsGroupedOnSm120, LaunchExpertsGroupedMxf8f6f4},
    {&kGroupedW4A8, kSm120Only, SupportsGroupedOnSm120, LaunchExpertsGroupedW4A8Sm120},
    {&kGroupedW4A8, kSm90Only, SupportsGroupedOnSm90, LaunchExpertsGroupedW4A8},
    {nullptr, kAnyCuda, nullptr, LaunchExpertsCuda},
    {nullptr, kCpuOnly, nullptr, LaunchExpertsCpu},  // experts_cpu.cc: parallel over panels
};

absl::Status CheckWeight(absl::string_view expert, absl::string_view name, const WeightView& w,
                         int64_t rows, int64_t cols) {
  if (w.rows != rows || w.cols != cols) {
    return absl::InvalidArgumentError(absl::StrCat("experts: ", expert, " ", name, " is [", w.rows,
                                                   ", ", w.cols, "], expected [", rows, ", ", cols,
                                                   "]"));
  }
  const int64_t group = w.is_mxfp4_cast ? 32 : ScaleGroup(w.format);
  if (IsFp4(w.format) && cols % group != 0) {
    return absl::InvalidArgumentError(absl::StrCat("experts: ", expert, " ", name,
                                                   " is fp4 with K ", cols,
                                                   ", not a multiple of its group ", group));
  }
  // Tiles of fp4 hold their scales.
  const bool needs_scales = ScaleGroup(w.format) != 0 && !(IsFp4(w.format) && IsTiled(w.layout));
  if (w.elements == nullptr || (needs_scales && w.scales == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("experts: ", expert, " ", name, " [", rows, ", ",
                                                   cols, "] lacks elements or scales"));
  }
  return absl::OkStatus();
}

absl::Status CheckExpert(absl::string_view expert, const ExpertWeights& e, int64_t hidden) {
  const int64_t intermediate = e.w1.rows;
  ISTHMUS_RETURN_IF_ERROR(CheckWeight(expert, "w1", e.w1, intermediate, hidden));
  ISTHMUS_RETURN_IF_ERROR(CheckWeight(expert, "w3", e.w3, intermediate, hidden));
  if (QuantisesInput(e.w1.format) != QuantisesInput(e.w3.format)) {
    return absl::InvalidArgumentError(
        absl::StrCat("experts: ", expert, " w1 has format ", static_cast<int>(e.w1.format),
                     ", w3 has ", static_cast<int>(e.w3.format), "; only one quantises its input"));
  }
  return CheckWeight(expert, "w2", e.w2, hidden, intermediate);
}

absl::Status CheckMatrix(absl::string_view name, const MatrixView& m, const MatrixView& x) {
  if (m.dtype != DType::kF32) {
    return absl::InvalidArgumentError(absl::StrCat(
        "experts: ", name, " has type ", static_cast<int>(m.dtype), ", expected f32 (0)"));
  }
  if (m.rows != x.rows || m.cols != x.cols || (m.rows > 1 && m.row_stride < m.cols)) {
    return absl::InvalidArgumentError(absl::StrCat("experts: ", name, " is [", m.rows, ", ", m.cols,
                                                   "] with row stride ", m.row_stride, ", x is [",
                                                   x.rows, ", ", x.cols, "]"));
  }
  return absl::OkStatus();
}

// Ids in range and distinct per token, and every named expert of the right shape.
absl::Status CheckIds(const ExpertsArgs& args) {
  const auto num_experts = static_cast<int64_t>(args.experts.size());
  for (int64_t t = 0; t < args.x.rows; ++t) {
    const int32_t* ids = args.ids + t * args.k;
    for (int64_t j = 0; j < args.k; ++j) {
      if (ids[j] < 0 || ids[j] >= num_experts) {
        return absl::InvalidArgumentError(
            absl::StrCat("experts: token ", t, " names expert ", ids[j], " of ", num_experts));
      }
      for (int64_t i = 0; i < j; ++i) {
        if (ids[i] != ids[j]) continue;
        return absl::InvalidArgumentError(absl::StrCat("experts: token ", t, " names expert ",
                                                       ids[j], " as choice ", i, " and ", j));
      }
      const ExpertWeights& expert = args.experts[static_cast<size_t>(ids[j])];
      ISTHMUS_RETURN_IF_ERROR(CheckExpert("an expert's", expert, args.x.cols));
    }
  }
  return absl::OkStatus();
}

// The ids lie in device memory: every expert that is loaded must fit, and none may keep the CPU's
// panels.
absl::Status CheckTable(const ExpertsArgs& args) {
  if (args.k > 0 && args.device_experts == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("experts: ", args.experts.size(), " experts without device_experts"));
  }
  const auto has_panels = [](const ExpertWeights& e) {
    return e.w1.layout == WeightLayout::kPanels || e.w3.layout == WeightLayout::kPanels ||
           e.w2.layout == WeightLayout::kPanels;
  };
  for (const ExpertWeights& expert : args.experts) {
    if (expert.w1.elements == nullptr) continue;  // Not loaded, so never named.
    ISTHMUS_RETURN_IF_ERROR(CheckExpert("an expert's", expert, args.x.cols));
    if (has_panels(expert)) {
      return absl::InvalidArgumentError("experts: panels are the CPU's layout");
    }
  }
  if (args.shared != nullptr && has_panels(*args.shared)) {
    return absl::InvalidArgumentError("experts: panels are the CPU's layout");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateExperts(const ExpertsArgs& args, bool is_device) {
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("x", args.x, args.x));
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("out", args.out, args.x));
  if (args.routed.data != nullptr) {
    ISTHMUS_RETURN_IF_ERROR(CheckMatrix("routed", args.routed, args.x));
  }
  if (args.k < 0 || args.k > static_cast<int64_t>(args.experts.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("experts: k is ", args.k, " of ", args.experts.size(), " experts"));
  }
  if (args.x.rows * args.k != 0 && (args.ids == nullptr || args.weights == nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat("experts: k is ", args.k, " without ids or weights"));
  }
  if (args.shared != nullptr) {
    ISTHMUS_RETURN_IF_ERROR(CheckExpert("shared", *args.shared, args.x.cols));
  }
  return is_device ? CheckTable(args) : CheckIds(args);
}

std::span<const ExpertsVariant> ExpertsVariants() { return kVariants; }
std::span<const Patch* const> ExpertsPatches() { return kPatches; }

absl::Status Experts(const ExpertsArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateExperts(args, IsDevice(exec.arch)));
  ISTHMUS_ASSIGN_OR_RETURN(const ExpertsVariant* variant, Choose(ExpertsVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
