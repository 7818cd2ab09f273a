// SPDX-License-Identifier: Apache-2.0
// The launches of experts.grouped_w4a8 that handle rows: who goes to which expert, quantisation,
// and the weighted sum. A few microseconds each, bound by latency: each lets its successor start
// before it waits itself, so that the weights of the products set out while it still does.
#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/pairs.cuh"
#include "kernels/experts/experts_grouped.h"

namespace isthmus::kernels::grouped {
namespace {

constexpr int kRouteWarps = 16;
constexpr int kRouteThreads = kRouteWarps * kWarpLanes;
static_assert(kMaxExperts <= kRouteThreads);
constexpr int kQuantiseWarps = 8;
constexpr int kCombineThreads = 128;
constexpr int kCombineEach = 4;  // Columns of a thread.
constexpr int kRowsAtOnce = 8;

// Quantised rows lie in the order of the mma's B fragment: of 64 inputs, thread t of a quad finds
// its two k32 steps in 16 bytes. Input k = 32 s + 16 h + 4 t + j is byte 16 t + 8 s + 4 h + j.
__device__ __forceinline__ int CodePlace(int k) {
  return (k & ~63) | (k >> 2 & 3) << 4 | (k >> 5 & 1) << 3 | (k >> 4 & 1) << 2 | (k & 3);
}

// One group of a row by one warp, the group that begins at element `first` of all rows; lane l has
// its inputs 4 l to 4 l + 3.
__device__ __forceinline__ void QuantiseGroup(const float (&x)[4], int64_t first, bool as_f16,
                                              uint8_t* codes, float* scales) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const float amax = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
  const float power = PowerOfTwo(Fp8ScaleExponent(WarpMax(amax)));
  const float inverse = 1.0f / power;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= uint32_t{Fp8E4m3Code(x[i] * inverse)} << (8 * i);
  const int64_t place = first + CodePlace(4 * lane);
  if (as_f16) {
    *reinterpret_cast<uint2*>(codes + 2 * place) =
        make_uint2(F16PairOfE4m3(word), F16PairOfE4m3(word >> 16));
  } else {
    *reinterpret_cast<uint32_t*>(codes + place) = word;
  }
  if (lane == 0) scales[first / kGroup] = power;
}

struct RouteShared {
  int32_t* before;     // [kRouteWarps][experts]: rows of an expert that earlier warps found
  int32_t* first_row;  // [experts]
};
// What a warp's 32 experts come to.
struct ExpertTotals {
  int32_t rows, jobs, blocks;
};

size_t RouteSharedBytes(int64_t num_experts) {
  return static_cast<size_t>(num_experts) * (kRouteWarps + 1) * sizeof(int32_t);
}

__device__ __forceinline__ JobWeight MakeJobWeight(const WeightView& w) {
  // The codes of fp4 are read as e4m3, which is 2^-6 of them, or as f16, which is 2^-14.
  const float read = w.layout == WeightLayout::kMmaTilesF16 ? 0x1p14f : 0x1p6f;
  const float factor =
      IsFp4(w.format) ? read * (w.format == WeightFormat::kNvfp4 ? w.global_scale : 1.0f) : 1.0f;
  return {static_cast<const uint8_t*>(w.elements),
          w.scales,
          factor,
          static_cast<int32_t>(ScaleColumns(w)),
          static_cast<int32_t>(w.first_row),
          w.format};
}
__device__ __forceinline__ Job MakeJob(const ExpertWeights& e, int first_row, int num_rows,
                                       float limit) {
  return {
      MakeJobWeight(e.w1), MakeJobWeight(e.w3), MakeJobWeight(e.w2), first_row, num_rows, limit};
}

// The choices [begin, end) of one warp, 32 at a time: visit(choice, expert or -1, peers), where
// peers are the lanes with the same expert.
template <typename Visit>
__device__ __forceinline__ void ForChoices(const Batch& batch, Visit visit) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int choices = batch.tokens * batch.k;
  const int each = (choices + kRouteThreads - 1) / kRouteThreads * kWarpLanes;
  for (int base = warp * each; base < (warp + 1) * each && base < choices; base += kWarpLanes) {
    const int i = base + lane;
    int expert = i < choices ? batch.ids[i] : -1;
    if (expert >= batch.num_experts) expert = -1;
    visit(i, expert, __match_any_sync(kFullWarp, expert));
    __syncwarp();
  }
}

__device__ __forceinline__ int ScanInclusive(int value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const int other = __shfl_up_sync(kFullWarp, value, static_cast<unsigned>(distance));
    if (lane >= distance) value += other;
  }
  return value;
}

__device__ __forceinline__ int LastLane(int value) {
  return __shfl_sync(kFullWarp, value, kWarpLanes - 1);
}

// Where the rows and blocks of every expert begin, a thread an expert; writes the list. By the
// whole block.
__device__ __forceinline__ void PlaceExperts(const Batch& batch, const RouteShared& shared,
                                             const Scratch& scratch) {
  __shared__ ExpertTotals totals[kRouteWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int e = static_cast<int>(threadIdx.x);
  int rows = 0;
  if (e < batch.num_experts) {
    for (int w = 0; w < kRouteWarps; ++w) {
      const int found = shared.before[w * batch.num_experts + e];
      shared.before[w * batch.num_experts + e] = rows;
      rows += found;
    }
  }
  const int blocks = (rows + batch.block_rows - 1) / batch.block_rows;
  const unsigned active = __ballot_sync(kFullWarp, rows > 0 ? 1 : 0);
  const int rows_to_here = ScanInclusive(rows);
  const int blocks_to_here = ScanInclusive(blocks);
  const ExpertTotals of_warp = {LastLane(rows_to_here), __popc(active), LastLane(blocks_to_here)};
  if (lane == 0) totals[warp] = of_warp;
  __syncthreads();
  // The shared expert's job comes first, and its rows last.
  int row = rows_to_here - rows;
  int job = __popc(active & ((1u << lane) - 1)) + (batch.has_shared ? 1 : 0);
  int block = blocks_to_here - blocks +
              (batch.has_shared ? (batch.tokens + batch.block_rows - 1) / batch.block_rows : 0);
  for (int w = 0; w < warp; ++w) {
    row += totals[w].rows;
    job += totals[w].jobs;
    block += totals[w].blocks;
  }
  JobList* list = scratch.list;
  if (e < batch.num_experts) {
    shared.first_row[e] = row;
    if (rows > 0) {
      list->first_block[job] = block;
      scratch.jobs[job] = MakeJob(batch.experts[e], row, rows, batch.limit);
    }
  }
  if (e != kRouteThreads - 1) return;
  if (batch.has_shared) {
    list->first_block[0] = 0;
    scratch.jobs[0] =
        MakeJob(batch.shared, batch.tokens * batch.k, batch.tokens, batch.shared_limit);
  }
  job += rows > 0 ? 1 : 0;
  list->first_block[job] = block + blocks;
  list->num_jobs = job;
  list->num_blocks = block + blocks;
  list->num_routed_rows = row + rows;
}

// A token's choices in ascending expert id.
__device__ __forceinline__ void WriteRow(const Batch& batch, const Scratch& scratch, int choice,
                                         int expert, int row) {
  const int token = choice / batch.k;
  const int j = choice % batch.k;
  int rank = 0;
  for (int other = 0; other < batch.k; ++other) {
    const int id = batch.ids[token * batch.k + other];
    const int valid = id < batch.num_experts ? id : -1;
    if (valid < expert || (valid == expert && other < j)) ++rank;
  }
  scratch.rows_of[token * batch.k + rank] = row;
  if (row < 0) return;
  scratch.row_token[row] = token;
  scratch.row_weight[row] = batch.weights[choice];
}

// A stable counting sort of the choices by expert, by one block.
__device__ __forceinline__ void Route(const Batch& batch, const Scratch& scratch) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int experts = batch.num_experts;
  auto* words = reinterpret_cast<int32_t*>(DynamicShared());
  const RouteShared shared = {words, words + kRouteWarps * experts};
  for (int i = static_cast<int>(threadIdx.x); i < kRouteWarps * experts; i += kRouteThreads) {
    shared.before[i] = 0;
  }
  __syncthreads();
  int32_t* mine = shared.before + warp * experts;
  ForChoices(batch, [&](int, int expert, unsigned peers) {
    if (expert >= 0 && lane == __ffs(static_cast<int>(peers)) - 1) mine[expert] += __popc(peers);
  });
  __syncthreads();
  PlaceExperts(batch, shared, scratch);
  __syncthreads();
  ForChoices(batch, [&](int choice, int expert, unsigned peers) {
    const int rank = __popc(peers & ((1u << lane) - 1));
    const int row = expert >= 0 ? shared.first_row[expert] + mine[expert] + rank : -1;
    __syncwarp();
    if (expert >= 0 && rank == 0) mine[expert] += __popc(peers);
    if (choice < batch.tokens * batch.k) WriteRow(batch, scratch, choice, expert, row);
  });
  if (!batch.has_shared) return;
  const int first = batch.tokens * batch.k;
  for (int t = static_cast<int>(threadIdx.x); t < batch.tokens; t += kRouteThreads) {
    scratch.row_token[first + t] = t;
    scratch.row_weight[first + t] = 1.0f;
  }
}

// Block 0 makes the list of jobs, the others quantise x. Grid: 1 + ceil(tokens * groups /
// kRouteWarps). Block: kRouteThreads. Shared memory: RouteSharedBytes.
__global__ __launch_bounds__(kRouteThreads, 1) void RouteAndQuantise(
    const __grid_constant__ Batch batch, const __grid_constant__ Scratch scratch,
    const float* __restrict__ x,  // [tokens, hidden], rows x_stride apart, aligned to 16 bytes
    int64_t x_stride) {
  LetSuccessorStart();
  WaitForPredecessor();
  if (blockIdx.x == 0) return Route(batch, scratch);
  const int groups = batch.hidden / static_cast<int>(kGroup);
  const int64_t item =
      (int64_t{blockIdx.x} - 1) * kRouteWarps + static_cast<int>(threadIdx.x) / kWarpLanes;
  const int64_t t = item / groups;
  if (t >= batch.tokens) return;
  const int64_t k = item % groups * kGroup;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const float4 v = *reinterpret_cast<const float4*>(x + t * x_stride + k + 4 * lane);
  QuantiseGroup({v.x, v.y, v.z, v.w}, t * batch.hidden + k, scratch.row_kind == RowKind::kF16,
                scratch.x_codes, scratch.x_scales);
}

// h_codes, h_scales from h, of rows [first, rows). Grid: ceil((rows - first) * groups /
// kQuantiseWarps). Block: kQuantiseWarps warps.
__global__ __launch_bounds__(kQuantiseWarps* kWarpLanes) void QuantiseHiddenRows(
    const __grid_constant__ Scratch scratch, int64_t first, int64_t rows, int64_t first_shared_row,
    int64_t intermediate) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t groups = intermediate / kGroup;
  const int64_t item =
      int64_t{blockIdx.x} * kQuantiseWarps + static_cast<int>(threadIdx.x) / kWarpLanes;
  const int64_t row = first + item / groups;
  if (row >= rows) return;
  if (row >= scratch.list->num_routed_rows && row < first_shared_row) return;  // Padding.
  const int64_t k = item % groups * kGroup;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const uint2 pairs =
      *reinterpret_cast<const uint2*>(scratch.h + row * intermediate + k + 4 * lane);
  QuantiseGroup({__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
                 __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u)},
                row * intermediate + k, scratch.row_kind == RowKind::kF16, scratch.h_codes,
                scratch.h_scales);
}

__device__ __forceinline__ void AddPairs(const uint2& pairs, float (&sum)[kCombineEach]) {
  sum[0] += __uint_as_float(pairs.x << 16);
  sum[1] += __uint_as_float(pairs.x & 0xffff0000u);
  sum[2] += __uint_as_float(pairs.y << 16);
  sum[3] += __uint_as_float(pairs.y & 0xffff0000u);
}

// Up to kRowsAtOnce of a token's rows, loaded side by side and added in their order.
__device__ __forceinline__ void AddRows(const int32_t* rows, int count, const uint16_t* y,
                                        int64_t hidden, float (&sum)[kCombineEach]) {
  int32_t row[kRowsAtOnce];
#pragma unroll
  for (int j = 0; j < kRowsAtOnce; ++j) row[j] = j < count ? rows[j] : -1;
  uint2 pairs[kRowsAtOnce];
#pragma unroll
  for (int j = 0; j < kRowsAtOnce; ++j) {
    if (row[j] >= 0) pairs[j] = *reinterpret_cast<const uint2*>(y + row[j] * hidden);
  }
#pragma unroll
  for (int j = 0; j < kRowsAtOnce; ++j) {
    if (row[j] >= 0) AddPairs(pairs[j], sum);
  }
}

// A token's rows of y in ascending expert id, then the shared one. Grid: [tokens, ceil(hidden /
// (kCombineThreads * kCombineEach))]. Block: kCombineThreads. A padding token is left as it is.
__global__ __launch_bounds__(kCombineThreads) void CombineRows(
    const __grid_constant__ Batch batch, const __grid_constant__ Scratch scratch,
    float* routed,  // [tokens, hidden], rows routed_stride apart; may be null
    int64_t routed_stride,
    float* out,  // [tokens, hidden], rows out_stride apart
    int64_t out_stride) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t t = blockIdx.x;
  const int64_t d =
      (int64_t{blockIdx.y} * kCombineThreads + static_cast<int>(threadIdx.x)) * kCombineEach;
  if (d >= batch.hidden) return;
  const int32_t* rows = scratch.rows_of + t * batch.k;
  if (batch.k > 0 && rows[batch.k - 1] < 0) return;
  float sum[kCombineEach] = {};
  const uint16_t* y = scratch.y + d;
  uint2 shared = {};
  if (batch.has_shared) {
    const int64_t row = int64_t{batch.tokens} * batch.k + t;
    shared = *reinterpret_cast<const uint2*>(y + row * batch.hidden);
  }
  for (int j = 0; j < batch.k; j += kRowsAtOnce) {
    AddRows(rows + j, batch.k - j, y, batch.hidden, sum);
  }
  if (routed != nullptr) {
    for (int i = 0; i < kCombineEach; ++i) routed[t * routed_stride + d + i] = sum[i];
  }
  if (batch.has_shared) AddPairs(shared, sum);
  for (int i = 0; i < kCombineEach; ++i) out[t * out_stride + d + i] = RoundBf16(sum[i]);
}

}  // namespace

absl::Status LaunchRoute(const Batch& batch, const Scratch& scratch, const float* x,
                         int64_t x_stride, const Exec& exec) {
  const int64_t groups = int64_t{batch.tokens} * batch.hidden / kGroup;
  return Launch("RouteAndQuantise",
                {.grid = dim3(1 + CeilDiv(groups, kRouteWarps)),
                 .block = dim3(kRouteThreads),
                 .shared_bytes = RouteSharedBytes(batch.num_experts),
                 .overlaps_predecessor = true},
                exec, RouteAndQuantise, batch, scratch, x, x_stride);
}

absl::Status LaunchQuantiseHidden(const Batch& batch, const Scratch& scratch, const Exec& exec) {
  const int64_t routed_rows = int64_t{batch.tokens} * batch.k;
  const int64_t rows = routed_rows + (batch.has_shared ? batch.tokens : 0);
  const int64_t first = scratch.row_kind == RowKind::kFp4 ? routed_rows : 0;
  if (first == rows) return absl::OkStatus();
  const int64_t groups = (rows - first) * batch.intermediate / kGroup;
  return Launch("QuantiseHiddenRows",
                {.grid = dim3(CeilDiv(groups, kQuantiseWarps)),
                 .block = dim3(kQuantiseWarps * kWarpLanes),
                 .overlaps_predecessor = true},
                exec, QuantiseHiddenRows, scratch, first, rows, routed_rows,
                int64_t{batch.intermediate});
}

absl::Status LaunchCombine(const Batch& batch, const Scratch& scratch, float* routed,
                           int64_t routed_stride, float* out, int64_t out_stride,
                           const Exec& exec) {
  const unsigned columns = CeilDiv(batch.hidden, kCombineThreads * kCombineEach);
  return Launch("CombineRows",
                {.grid = dim3(static_cast<unsigned>(batch.tokens), columns),
                 .block = dim3(kCombineThreads),
                 .overlaps_predecessor = true},
                exec, CombineRows, batch, scratch, routed, routed_stride, out, out_stride);
}

}  // namespace isthmus::kernels::grouped
