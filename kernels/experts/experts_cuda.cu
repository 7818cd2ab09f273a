// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of experts: any architecture, format and layout, the bits of the CPU path.
// Every (token, choice) is a row of its own, the shared expert's rows come last; a row whose id is
// negative is skipped. Bound by decoding weights one by one, again for every row.
//
// Letters: t token, j choice, r row, n output, k input, g group of inputs.
#include <algorithm>

#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/math.h"
#include "kernels/core/weight_tiles.h"
#include "kernels/core/workspace.h"
#include "kernels/experts/experts_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int kOutputs = 16;  // Of a block: a row of tiles.
constexpr int kGroups = 16;   // Side by side.
constexpr int kQuantiseWarps = 8;
constexpr int kCombineThreads = 256;
constexpr int64_t kTokensAtOnce = 1024;  // Bounds the workspace of a long prefill.

// The batch as every kernel here sees it.
struct Rows {
  const int32_t* ids;            // [tokens, k]
  const float* weights;          // [tokens, k]
  const ExpertWeights* experts;  // [num_experts]
  ExpertWeights shared;
  int64_t tokens;
  int64_t k;
  int64_t intermediate;  // Of the widest expert; rows of h lie that far apart.
  float limit;
  float shared_limit;
  bool has_shared;
  bool reference;
};

// Row r of the tokens * k routed rows and, behind them, one shared row per token.
struct Row {
  const ExpertWeights* expert;  // Null: the row of a padding token.
  int64_t token;
  float weight;
  float limit;
};

__device__ __forceinline__ Row RowAt(const Rows& rows, int64_t r) {
  const int64_t routed = rows.tokens * rows.k;
  if (r >= routed) return {&rows.shared, r - routed, 1.0f, rows.shared_limit};
  const int32_t id = rows.ids[r];
  return {id < 0 ? nullptr : rows.experts + id, r / rows.k, rows.weights[r], rows.limit};
}

// Group g of a view covers [GroupBegin(g), GroupBegin(g + 1)) of its inputs.
__device__ __forceinline__ int64_t GroupBegin(const WeightView& w, int64_t group, int64_t g) {
  const int64_t k = g * group - w.first_col;
  return k < 0 ? 0 : (k < w.cols ? k : w.cols);
}

struct DotScratch {
  float sums[kGroups][kOutputs];
  float scales[kGroups][kOutputs];
};

// x . w[n] for the sixteen outputs n of a block [kOutputs, kGroups]: a group of inputs a thread,
// then the groups in ascending order, each as one FMA with its scale (kernels/core/gemm.h). The
// sum is that of the threads of slot 0.
template <WeightFormat kFormat>
__device__ float DotOf(const float* x, const WeightView& view, int64_t n, DotScratch* shared) {
  WeightView w = view;
  w.format = kFormat;  // So that the decoders are chosen at compile time.
  const auto lane = static_cast<int>(threadIdx.x);
  const auto slot = static_cast<int>(threadIdx.y);
  const int64_t group = SumGroup(w);
  const int64_t groups = (w.first_col + w.cols + group - 1) / group;
  float total = 0.0f;
  for (int64_t base = 0; base < groups; base += kGroups) {
    const int64_t begin = GroupBegin(w, group, base + slot);
    const int64_t end = GroupBegin(w, group, base + slot + 1);
    float sum = 0.0f;
    if (n < w.rows && begin < end) {
      for (int64_t k = begin; k < end; ++k) sum = fmaf(x[k], WeightElement(w, n, k), sum);
      const float scale = WeightScale(w, n, begin);
      shared->scales[slot][lane] = kFormat == WeightFormat::kNvfp4 ? scale * w.global_scale : scale;
    }
    shared->sums[slot][lane] = sum;
    __syncthreads();
    if (slot == 0 && n < w.rows) {
      for (int i = 0; i < kGroups && base + i < groups; ++i) {
        total = fmaf(shared->sums[i][lane], shared->scales[i][lane], total);
      }
    }
    __syncthreads();
  }
  return total;
}

__device__ float Dot(const float* x, const WeightView& w, int64_t n, DotScratch* shared) {
  switch (w.format) {
    case WeightFormat::kF32:
      return DotOf<WeightFormat::kF32>(x, w, n, shared);
    case WeightFormat::kBf16:
      return DotOf<WeightFormat::kBf16>(x, w, n, shared);
    case WeightFormat::kFp8Block128:
      return DotOf<WeightFormat::kFp8Block128>(x, w, n, shared);
    case WeightFormat::kMxfp4:
      return DotOf<WeightFormat::kMxfp4>(x, w, n, shared);
    default:
      return DotOf<WeightFormat::kNvfp4>(x, w, n, shared);
  }
}

// silu(min(g, limit)) * clamp(u, -limit, limit) * weight, in the steps of GateRow.
__device__ __forceinline__ float Gated(float g, float u, float limit, float weight) {
  if (limit > 0.0f) {  // Written so that a NaN stays one.
    g = g > limit ? limit : g;
    u = u > limit ? limit : u;
    u = u < -limit ? -limit : u;
  }
  return g * Sigmoid(g) * u * weight;
}

// h = gated products of w1 and w3. Grid: [rows, ceil(intermediate / kOutputs)]. Block: [kOutputs,
// kGroups].
__global__ __launch_bounds__(kOutputs* kGroups) void GateOutputPerThread(
    const __grid_constant__ Rows rows,
    const float* x,          // [tokens, hidden], rows x_stride apart
    int64_t x_stride,        //
    const float* quantised,  // [tokens, hidden]: x after its fp8 round trip; null in math
    float* h) {              // [rows, intermediate]
  __shared__ DotScratch shared;
  const int64_t r = blockIdx.x;
  const Row row = RowAt(rows, r);
  if (row.expert == nullptr) return;  // Whole blocks leave together, here and below.
  const ExpertWeights& e = *row.expert;
  const int64_t n = int64_t{blockIdx.y} * kOutputs + threadIdx.x;
  if (int64_t{blockIdx.y} * kOutputs >= e.w1.rows) return;
  const float* in = x + row.token * x_stride;
  if (rows.reference && QuantisesInput(e.w1.format)) in = quantised + row.token * e.w1.cols;
  float g = 0.0f;
  float u = 0.0f;
#pragma unroll 1  // One copy of the decoders.
  for (int i = 0; i < 2; ++i) {
    g = u;
    u = Dot(in, i == 0 ? e.w1 : e.w3, n, &shared);
  }
  if (threadIdx.y != 0 || n >= e.w1.rows) return;
  if (rows.reference) {
    g = RoundBf16(g);
    u = RoundBf16(u);
  }
  const float value = Gated(g, u, row.limit, row.weight);
  h[r * rows.intermediate + n] = rows.reference ? RoundBf16(value) : value;
}

// The e4m3 1x128 round trip of one group by one warp. out may be x.
__device__ void RoundTripGroup(const float* x, float* out, int64_t count) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  float amax = 0.0f;
  for (int64_t i = lane; i < count; i += kWarpLanes) amax = fmaxf(amax, fabsf(x[i]));
  const int exponent = Fp8ScaleExponent(WarpMax(amax));
  const float inverse = 1.0f / PowerOfTwo(exponent);
  for (int64_t i = lane; i < count; i += kWarpLanes) {
    out[i] = Fp8E4m3Value(Fp8E4m3Code(x[i] * inverse)) * PowerOfTwo(exponent);
  }
}

// Grid: [tokens, ceil(groups / kQuantiseWarps)]. Block: kQuantiseWarps warps.
__global__ __launch_bounds__(kQuantiseWarps* kWarpLanes) void QuantiseInput(
    const float* x,  // [tokens, hidden], rows x_stride apart
    int64_t x_stride, int64_t hidden,
    float* quantised) {  // [tokens, hidden]
  const int64_t group = int64_t{blockIdx.y} * kQuantiseWarps + threadIdx.x / kWarpLanes;
  const int64_t begin = group * kActivationGroup;
  if (begin >= hidden) return;
  const int64_t t = blockIdx.x;
  RoundTripGroup(x + t * x_stride + begin, quantised + t * hidden + begin,
                 hidden - begin < kActivationGroup ? hidden - begin : kActivationGroup);
}

// In place, where the expert's w2 asks for it. Grid: [rows, ceil(groups / kQuantiseWarps)]. Block:
// kQuantiseWarps warps.
__global__ __launch_bounds__(kQuantiseWarps* kWarpLanes) void QuantiseHidden(
    const __grid_constant__ Rows rows, float* h) {  // [rows, intermediate]
  const int64_t r = blockIdx.x;
  const Row row = RowAt(rows, r);
  if (row.expert == nullptr || !QuantisesInput(row.expert->w2.format)) return;
  const int64_t group = int64_t{blockIdx.y} * kQuantiseWarps + threadIdx.x / kWarpLanes;
  const int64_t begin = group * kActivationGroup;
  const int64_t width = row.expert->w1.rows;
  if (begin >= width) return;
  float* in = h + r * rows.intermediate + begin;
  RoundTripGroup(in, in, width - begin < kActivationGroup ? width - begin : kActivationGroup);
}

// y = w2 h. Grid: [rows, ceil(hidden / kOutputs)]. Block: [kOutputs, kGroups].
__global__ __launch_bounds__(kOutputs* kGroups) void DownOutputPerThread(
    const __grid_constant__ Rows rows,
    const float* h,  // [rows, intermediate]
    float* y,        // [rows, hidden]
    int64_t hidden) {
  __shared__ DotScratch shared;
  const int64_t r = blockIdx.x;
  const Row row = RowAt(rows, r);
  if (row.expert == nullptr) return;
  const int64_t n = int64_t{blockIdx.y} * kOutputs + threadIdx.x;
  const float sum = Dot(h + r * rows.intermediate, row.expert->w2, n, &shared);
  if (threadIdx.y == 0 && n < hidden) y[r * hidden + n] = rows.reference ? RoundBf16(sum) : sum;
}

// A token's results in ascending expert id, then the shared one. Grid: [tokens, ceil(hidden /
// kCombineThreads)]. Block: kCombineThreads. A padding token is left as it is.
__global__ __launch_bounds__(kCombineThreads) void CombineOutputPerThread(
    const __grid_constant__ Rows rows,
    const float* y,  // [rows, hidden]
    float* routed,   // [tokens, hidden], rows routed_stride apart; may be null
    int64_t routed_stride,
    float* out,  // [tokens, hidden], rows out_stride apart
    int64_t out_stride, int64_t hidden) {
  const int64_t t = blockIdx.x;
  const int64_t d = int64_t{blockIdx.y} * kCombineThreads + threadIdx.x;
  const int32_t* ids = rows.ids + t * rows.k;
  if (d >= hidden || (rows.k > 0 && ids[0] < 0)) return;
  float sum = 0.0f;
  int32_t last = -1;
  for (int64_t step = 0; step < rows.k; ++step) {  // The smallest id above the last one.
    int64_t next = -1;
    for (int64_t j = 0; j < rows.k; ++j) {
      if (ids[j] > last && (next < 0 || ids[j] < ids[next])) next = j;
    }
    if (next < 0) break;
    last = ids[next];
    sum += y[(t * rows.k + next) * hidden + d];
  }
  if (routed != nullptr) routed[t * routed_stride + d] = sum;
  if (rows.has_shared) sum += y[(rows.tokens * rows.k + t) * hidden + d];
  out[t * out_stride + d] = rows.reference ? RoundBf16(sum) : sum;
}

bool AnyQuantises(const ExpertsArgs& args) {
  const auto asks = [&](const ExpertWeights& e) { return QuantisesInput(e.w1, args.arithmetic); };
  return (args.shared != nullptr && asks(*args.shared)) ||
         std::any_of(args.experts.begin(), args.experts.end(), asks);
}

int64_t WidestIntermediate(const ExpertsArgs& args) {
  int64_t widest = args.shared != nullptr ? args.shared->w1.rows : 0;
  for (const ExpertWeights& e : args.experts) widest = std::max(widest, e.w1.rows);
  return widest;
}

dim3 RowGrid(int64_t rows, int64_t cols, int per_block) {
  return dim3(static_cast<unsigned>(rows), CeilDiv(cols, per_block));
}

// The tokens [first, first + count) of the batch.
absl::Status RunTokens(const ExpertsArgs& args, int64_t first, int64_t count, const Exec& exec) {
  Workspace::Scope scope(exec.workspace);
  Rows rows = {.ids = args.ids + first * args.k,
               .weights = args.weights + first * args.k,
               .experts = args.device_experts,
               .shared = args.shared != nullptr ? *args.shared : ExpertWeights{},
               .tokens = count,
               .k = args.k,
               .intermediate = WidestIntermediate(args),
               .limit = args.limit,
               .shared_limit = args.shared_limit,
               .has_shared = args.shared != nullptr,
               .reference = args.arithmetic == Arithmetic::kReference};
  const int64_t num_rows = count * args.k + (rows.has_shared ? count : 0);
  const int64_t hidden = args.x.cols;
  const MatrixView x = args.x.Rows(first, count);
  const dim3 dot_block(kOutputs, kGroups);
  const dim3 quantise_block(kQuantiseWarps * kWarpLanes);
  auto* h = scope.Take<float>(num_rows * rows.intermediate);
  auto* y = scope.Take<float>(num_rows * hidden);
  float* quantised = nullptr;
  constexpr int kPerBlock = kQuantiseWarps * kActivationGroup;
  if (AnyQuantises(args)) {
    quantised = scope.Take<float>(count * hidden);
    ISTHMUS_RETURN_IF_ERROR(Launch(
        "QuantiseInput", {.grid = RowGrid(count, hidden, kPerBlock), .block = quantise_block}, exec,
        QuantiseInput, x.f32(0), x.row_stride, hidden, quantised));
  }
  if (num_rows > 0 && rows.intermediate > 0) {
    ISTHMUS_RETURN_IF_ERROR(
        Launch("GateOutputPerThread",
               {.grid = RowGrid(num_rows, rows.intermediate, kOutputs), .block = dot_block}, exec,
               GateOutputPerThread, rows, x.f32(0), x.row_stride, quantised, h));
    if (rows.reference) {
      ISTHMUS_RETURN_IF_ERROR(
          Launch("QuantiseHidden",
                 {.grid = RowGrid(num_rows, rows.intermediate, kPerBlock), .block = quantise_block},
                 exec, QuantiseHidden, rows, h));
    }
    ISTHMUS_RETURN_IF_ERROR(Launch(
        "DownOutputPerThread", {.grid = RowGrid(num_rows, hidden, kOutputs), .block = dot_block},
        exec, DownOutputPerThread, rows, h, y, hidden));
  }
  float* routed = args.routed.data != nullptr ? args.routed.f32(first) : nullptr;
  return Launch("CombineOutputPerThread",
                {.grid = RowGrid(count, hidden, kCombineThreads), .block = dim3(kCombineThreads)},
                exec, CombineOutputPerThread, rows, y, routed, args.routed.row_stride,
                args.out.f32(first), args.out.row_stride, hidden);
}

}  // namespace

absl::Status LaunchExpertsCuda(const ExpertsArgs& args, const Exec& exec) {
  if (args.x.cols == 0) return absl::OkStatus();
  for (int64_t first = 0; first < args.x.rows; first += kTokensAtOnce) {
    const int64_t count = std::min(kTokensAtOnce, args.x.rows - first);
    ISTHMUS_RETURN_IF_ERROR(RunTokens(args, first, count, exec));
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
