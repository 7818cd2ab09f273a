// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of linear: any architecture, format and layout, the bits of the CPU path.
// Each group of inputs is summed by one thread in ascending k, then the groups in ascending order,
// each as one FMA with its scale (kernels/core/gemm.h). Bound by decoding weights one by one; the
// floor is the weight once per kRows tokens.
//
// Letters: t token, n output, k input, g group of inputs.
#include "absl/strings/str_cat.h"
#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/weight_tiles.h"
#include "kernels/core/workspace.h"
#include "kernels/linear/linear_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int kOutputs = 16;  // Of a block: a row of tiles.
constexpr int kGroups = 16;   // Side by side.
constexpr int kRows = 4;      // Tokens that share a decoded weight.

// The groups g that begin before w.cols, of `group` inputs of the stored matrix: [GroupBegin(g),
// GroupBegin(g + 1)) cut to [0, w.cols).
__device__ int64_t GroupBegin(const WeightView& w, int64_t group, int64_t g) {
  const int64_t k = g * group - w.first_col;
  return k < 0 ? 0 : (k < w.cols ? k : w.cols);
}

__device__ float GroupScale(const WeightView& w, int64_t n, int64_t k) {
  const float scale = WeightScale(w, n, k);
  return w.format == WeightFormat::kNvfp4 ? scale * w.global_scale : scale;
}

// Grid: [ceil(N / kOutputs), ceil(tokens / kRows)]. Block: [kOutputs, kGroups]. `view` has format
// kFormat.
template <WeightFormat kFormat>
__global__ __launch_bounds__(kOutputs* kGroups) void LinearGroupPerThread(
    const float* __restrict__ x,  // [tokens, K], rows x_stride apart
    WeightView view,
    float* __restrict__ out,  // [tokens, N], rows out_stride apart
    int64_t tokens, int64_t x_stride, int64_t out_stride, int64_t group, bool round) {
  __shared__ float sums[kRows][kGroups][kOutputs];
  __shared__ float scales[kGroups][kOutputs];
  WeightView w = view;
  w.format = kFormat;  // So that the decoders below are chosen at compile time.
  const auto lane = static_cast<int>(threadIdx.x);
  const auto slot = static_cast<int>(threadIdx.y);
  const int64_t n = int64_t{blockIdx.x} * kOutputs + lane;
  const int64_t first = int64_t{blockIdx.y} * kRows;
  const int64_t groups = (w.first_col + w.cols + group - 1) / group;

  float total[kRows] = {};  // Of the threads of slot 0.
  for (int64_t base = 0; base < groups; base += kGroups) {
    const int64_t g = base + slot;
    const int64_t begin = GroupBegin(w, group, g);
    const int64_t end = GroupBegin(w, group, g + 1);
    float acc[kRows] = {};
    if (n < w.rows && begin < end) {
      // Where a code of fp4 lies takes registers, of which few are left.
      constexpr bool kIsFp4 = kFormat == WeightFormat::kMxfp4 || kFormat == WeightFormat::kNvfp4;
      [[maybe_unused]] constexpr int kAtOnce = kIsFp4 ? 2 : 4;
#pragma unroll kAtOnce
      for (int64_t k = begin; k < end; ++k) {
        const float weight = WeightElement(w, n, k);
        for (int r = 0; r < kRows; ++r) {
          if (first + r < tokens) acc[r] = fmaf(x[(first + r) * x_stride + k], weight, acc[r]);
        }
      }
      scales[slot][lane] = GroupScale(w, n, begin);
    }
    for (int r = 0; r < kRows; ++r) sums[r][slot][lane] = acc[r];
    __syncthreads();
    if (slot == 0 && n < w.rows) {
      for (int i = 0; i < kGroups && base + i < groups; ++i) {
        for (int r = 0; r < kRows; ++r) {
          total[r] = fmaf(sums[r][i][lane], scales[i][lane], total[r]);
        }
      }
    }
    __syncthreads();
  }
  if (slot != 0 || n >= w.rows) return;
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= tokens) break;
    out[(first + r) * out_stride + n] = round ? RoundBf16(total[r]) : total[r];
  }
}

constexpr int kQuantiseWarps = 8;

// The e4m3 1x128 round trip, a warp per group. Grid: [tokens, ceil(groups / kQuantiseWarps)].
// Block: kQuantiseWarps warps. out may be x.
__global__ __launch_bounds__(kQuantiseWarps* kWarpLanes) void RoundTripFp8Groups(
    const float* x,  // [tokens, K], rows x_stride apart
    float* out,      // [tokens, K], rows out_stride apart
    int64_t cols, int64_t x_stride, int64_t out_stride) {
  constexpr int kEach = kActivationGroup / kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t begin = (int64_t{blockIdx.y} * kQuantiseWarps + warp) * kActivationGroup;
  if (begin >= cols) return;  // Whole warps leave together.
  const int64_t row = blockIdx.x;
  float value[kEach] = {};
  float amax = 0.0f;
  for (int i = 0; i < kEach; ++i) {
    const int64_t k = begin + i * kWarpLanes + lane;
    if (k < cols) value[i] = x[row * x_stride + k];
    amax = fmaxf(amax, fabsf(value[i]));  // Passes over NaN.
  }
  const int exponent = Fp8ScaleExponent(WarpMax(amax));
  const float inverse = 1.0f / PowerOfTwo(exponent);
  for (int i = 0; i < kEach; ++i) {
    const int64_t k = begin + i * kWarpLanes + lane;
    if (k >= cols) continue;
    out[row * out_stride + k] =
        Fp8E4m3Value(Fp8E4m3Code(value[i] * inverse)) * PowerOfTwo(exponent);
  }
}

template <WeightFormat kFormat>
absl::Status LaunchFormat(const LinearArgs& args, const MatrixView& x, const Exec& exec) {
  const WeightView& w = args.weight;
  return Launch("LinearGroupPerThread",
                {.grid = dim3(CeilDiv(w.rows, kOutputs), CeilDiv(x.rows, kRows)),
                 .block = dim3(kOutputs, kGroups)},
                exec, LinearGroupPerThread<kFormat>, x.f32(0), w, args.out.f32(0), x.rows,
                x.row_stride, args.out.row_stride, SumGroup(w), args.round_output);
}

}  // namespace

absl::Status LaunchQuantiseActivationCuda(const MatrixView& x, const MatrixView& out,
                                          const Exec& exec) {
  if (x.rows == 0 || x.cols == 0) return absl::OkStatus();
  const unsigned blocks = CeilDiv(x.cols, int64_t{kQuantiseWarps} * kActivationGroup);
  return Launch("RoundTripFp8Groups",
                {.grid = dim3(static_cast<unsigned>(x.rows), blocks),
                 .block = dim3(kQuantiseWarps * kWarpLanes),
                 .overlaps_predecessor = true},
                exec, RoundTripFp8Groups, x.f32(0), out.f32(0), x.cols, x.row_stride,
                out.row_stride);
}

absl::Status LaunchLinearCuda(const LinearArgs& args, const Exec& exec) {
  const WeightView& w = args.weight;
  if (args.x.rows == 0 || w.rows == 0) return absl::OkStatus();
  if (w.layout == WeightLayout::kPanels) {
    return absl::InvalidArgumentError("linear: panels are the CPU's layout, the device has none");
  }
  MatrixView x = args.x;
  Workspace::Scope scope(exec.workspace);
  if (args.quantise_input) {
    x = F32Matrix(scope.Take<float>(x.rows * x.cols), x.rows, x.cols);
    ISTHMUS_RETURN_IF_ERROR(LaunchQuantiseActivationCuda(args.x, x, exec));
  }
  switch (w.format) {
    case WeightFormat::kF32:
      return LaunchFormat<WeightFormat::kF32>(args, x, exec);
    case WeightFormat::kBf16:
      return LaunchFormat<WeightFormat::kBf16>(args, x, exec);
    case WeightFormat::kFp8Block128:
      return LaunchFormat<WeightFormat::kFp8Block128>(args, x, exec);
    case WeightFormat::kMxfp4:
      return LaunchFormat<WeightFormat::kMxfp4>(args, x, exec);
    default:
      return LaunchFormat<WeightFormat::kNvfp4>(args, x, exec);
  }
}

}  // namespace isthmus::kernels
