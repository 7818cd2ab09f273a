// SPDX-License-Identifier: Apache-2.0
// Patch expert_choice.split_k: the router of at most 64 tokens in one launch. Bound by latency; the
// floor is reading the weights once, 2 * experts * K bytes.
//
// The 16 rows of tiles of 256 experts would keep 16 multiprocessors busy with 128 KB each, so that
// blocks share K, too. The last block of a row of tiles to come adds the parts, in the order of K,
// and makes scores of them; the last row of tiles chooses for eight tokens, a warp each. The cut of
// K depends on the device alone, and columns of other tokens add nothing, so a token's bits do not
// depend on the batch; but in a prefill linear.tiles_large has others.
//
// Letters: c a lane's accumulator, e expert, i rank, t token.
#include <algorithm>

#include "kernels/core/workspace.h"
#include "kernels/fused/expert_choice/expert_choice_variants.h"
#include "kernels/gate/gate_device.cuh"
#include "kernels/linear/few_tokens.cuh"

namespace isthmus::kernels {
namespace {

constexpr Product kProduct = Product::kBf16;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kTokens = 8;  // Of a block: a warp chooses for one.
constexpr int kTile = static_cast<int>(kPanelRows);
constexpr int kSums = kTile * kTokens;   // Of a row of tiles.
constexpr int kEach = 256 / kWarpLanes;  // Experts of a lane that chooses, at most.
constexpr int kMostSplits = 8;

struct ChoiceParams {
  GateParams gate;
  const float* x;        // [tokens, K], rows x_stride apart
  const uint8_t* tiles;  // [row tiles][tiles_in_row][512]
  float* partials;       // [eights of tokens][row tiles][splits][kSums]
  unsigned* counters;    // [eights of tokens][row tiles + 1]
  int64_t x_stride;
  int cols;  // K
  int tokens;
  int groups;        // Along K: four k steps each.
  int tiles_in_row;  // k steps along K.
  int row_tiles;
  int splits;
  bool is_aligned;  // As RawTokens::Load has it.
};

// Sums of a warp's groups of the block's share of K, [c][lane] as mma.sync leaves them. The first
// group's weights set out before the predecessor has ended.
__device__ __forceinline__ void MultiplyShare(const ChoiceParams& params, int row_tile, int split,
                                              unsigned char* tile, Mbarrier* full,
                                              float (&total)[4]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int begin = params.groups * split / params.splits;
  const int end = params.groups * (split + 1) / params.splits;
  const auto steps_of = [&](int group) {
    return min(kUnitSteps, params.tiles_in_row - group * kUnitSteps);
  };
  const auto fetch = [&](int group) {
    if (group >= end || lane != 0) return;
    const auto bytes = static_cast<unsigned>(steps_of(group) * kTileCodeBytes);
    BarrierArriveExpect(full, bytes);
    const int64_t at = int64_t{row_tile} * params.tiles_in_row + int64_t{group} * kUnitSteps;
    BulkCopy(tile, params.tiles + at * kTileCodeBytes, bytes, full);
  };
  if (lane == 0) {
    BarrierInit(full, 1);
    FenceBarrierInit();
  }
  __syncwarp();
  fetch(begin + warp);
  LetSuccessorStart();
  WaitForPredecessor();
  const int token = static_cast<int>(blockIdx.y) * kTokens + lane / 4;
  const float* x = token < params.tokens ? params.x + token * params.x_stride : nullptr;
  unsigned parity = 0;
  for (int group = begin + warp; group < end; group += kWarps) {
    RawTokens<kProduct> raw;
    raw.Load(x, params.cols, params.is_aligned, group, lane);
    PackedGroup<kProduct> packed;
    packed.Pack(raw, lane);
    BarrierWait(full, parity);
    AddGroup<kProduct>(tile, steps_of(group), lane, packed, 1.0f, total);
    __syncwarp();
    fetch(group + kWarps);
    parity ^= 1;
  }
}

// What the last block reads first, into L2: bias, a weight, before WaitForPredecessor.
__device__ __forceinline__ void PrefetchBias(const GateParams& gate) {
  constexpr int kSectorFloats = 8;
  const int e = static_cast<int>(threadIdx.x) * kSectorFloats;
  if (gate.bias != nullptr && e < gate.experts) PrefetchL2(gate.bias + e);
}
// And the rows of the table of the block's tokens, after it.
__device__ __forceinline__ void PrefetchTable(const ChoiceParams& params) {
  const GateParams& gate = params.gate;
  const int t = static_cast<int>(blockIdx.y) * kTokens + static_cast<int>(threadIdx.x);
  if (gate.hash_ids == nullptr || threadIdx.x >= kTokens || t >= params.tokens) return;
  const int32_t token = gate.token_ids[t];
  if (token >= 0 && token < gate.vocab) PrefetchL2(gate.hash_ids + int64_t{token} * gate.k);
}

// The block's sums, of all its warps in their order, by its first kSums threads.
__device__ __forceinline__ float AddWarps(const float (&total)[4], float* sums) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    sums[thread / kWarpLanes * kSums + c * kWarpLanes + thread % kWarpLanes] = total[c];
  }
  __syncthreads();
  float sum = 0.0f;
  if (thread < kSums) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w * kSums + thread];
  }
  return sum;
}

// The score of the thread's place among the sums of a row of tiles, unless its token or expert is
// none.
__device__ __forceinline__ void WriteScore(const ChoiceParams& params, int row_tile, float logit) {
  const int c = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int t = static_cast<int>(blockIdx.y) * kTokens + lane % 4 * 2 + c % 2;
  const int e = row_tile * kTile + lane / 4 + (c >= 2 ? 8 : 0);
  const GateParams& gate = params.gate;
  if (t >= params.tokens || e >= gate.experts) return;
  if (gate.token_ids != nullptr && gate.token_ids[t] < 0) return;  // Padding.
  __stcg(gate.scores + t * gate.scores_stride + e, ScoreOf(logit));
}

// The experts of token t and their weights, by one warp. a: [experts], shared memory of the warp.
__device__ __forceinline__ void ChooseForToken(const GateParams& gate, int64_t t, float* a,
                                               int32_t* chosen) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int32_t token = gate.token_ids != nullptr ? gate.token_ids[t] : 0;
  int32_t* ids = gate.ids + t * gate.k;
  float* weights = gate.weights + t * gate.k;
  if (token < 0) {  // Padding.
    for (int i = lane; i < gate.k; i += kWarpLanes) {
      ids[i] = -1;
      weights[i] = 0.0f;
    }
    return;
  }
  const bool hash = gate.hash_ids != nullptr;
  uint64_t keys[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int e = j * kWarpLanes + lane;
    keys[j] = 0;  // Below that of any expert.
    if (e >= gate.experts) continue;
    const float score = __ldcg(gate.scores + t * gate.scores_stride + e);
    a[e] = score;
    if (!hash) keys[j] = ChoiceKey(score + gate.bias[e], e);
  }
  if (hash) {
    for (int i = lane; i < gate.k; i += kWarpLanes) chosen[i] = HashExpert(gate, token, i);
  } else {
    uint64_t last = ~uint64_t{0};
    for (int i = 0; i < gate.k; ++i) {
      uint64_t best = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (keys[j] < last && keys[j] > best) best = keys[j];
      }
      last = WarpLargest(best);
      if (lane == 0) chosen[i] = ExpertOfKey(last);
    }
  }
  __syncwarp();
  float sum = 0.0f;
  for (int i = 0; i < gate.k; ++i) {
    if (chosen[i] >= 0) sum += a[chosen[i]];
  }
  if (sum == 0.0f) sum = 1e-20f;
  for (int i = lane; i < gate.k; i += kWarpLanes) {
    ids[i] = chosen[i];
    weights[i] = chosen[i] < 0 ? 0.0f : a[chosen[i]] / sum * gate.route_scale;
  }
}

// Grid: [row tiles * splits, eights of tokens]. Block: kThreads. Shared memory: static.
__global__ __launch_bounds__(kThreads) void ChooseExpertsSplitK(
    const __grid_constant__ ChoiceParams params) {
  alignas(128) __shared__ unsigned char tiles[kWarps][kTileUnitBytes];
  __shared__ float sums[kWarps * kSums];
  __shared__ int32_t chosen[kWarps][kMaxGateK];
  __shared__ Mbarrier full[kWarps];
  __shared__ unsigned turn;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int row_tile = static_cast<int>(blockIdx.x) / params.splits;
  const int split = static_cast<int>(blockIdx.x) % params.splits;
  float total[4] = {};
  PrefetchBias(params.gate);
  MultiplyShare(params, row_tile, split, tiles[warp], full + warp, total);
  PrefetchTable(params);
  float logit = AddWarps(total, sums);

  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t row = int64_t{blockIdx.y} * params.row_tiles + row_tile;
  unsigned* counters = params.counters + blockIdx.y * (params.row_tiles + 1);
  const auto splits = static_cast<unsigned>(params.splits);
  if (splits > 1) {
    float* parts = params.partials + row * params.splits * kSums;
    if (thread < kSums) __stcg(parts + split * kSums + thread, logit);
    if (TakeTurn(counters + row_tile, splits, &turn) != splits - 1) return;
    if (thread < kSums) {
      float part[kMostSplits];
#pragma unroll
      for (int s = 0; s < kMostSplits; ++s) {
        part[s] = s < params.splits ? __ldcg(parts + s * kSums + thread) : 0.0f;
      }
      logit = 0.0f;
#pragma unroll
      for (int s = 0; s < kMostSplits; ++s) logit += part[s];
    }
  }
  if (thread < kSums) WriteScore(params, row_tile, logit);
  const auto row_tiles = static_cast<unsigned>(params.row_tiles);
  if (TakeTurn(counters + row_tiles, row_tiles, &turn) != row_tiles - 1) return;
  const int t = static_cast<int>(blockIdx.y) * kTokens + warp;
  if (t >= params.tokens) return;
  ChooseForToken(params.gate, t, reinterpret_cast<float*>(tiles[warp]), chosen[warp]);
}

}  // namespace

absl::Status LaunchExpertChoiceSplitK(const ExpertChoiceArgs& args, const Exec& exec) {
  if (exec.batch_invariant) return LaunchExpertChoiceInTurn(args, exec);
  static_assert(kTileUnitBytes >= kEach * kWarpLanes * 4);
  const WeightView& w = args.weight;
  ChoiceParams params = {};
  params.gate = GateParamsOf(args.gate);
  params.x = args.x.f32(0);
  params.tiles = static_cast<const uint8_t*>(w.elements);
  params.counters = exec.counters;
  params.x_stride = args.x.row_stride;
  params.cols = static_cast<int>(w.cols);
  params.tokens = static_cast<int>(args.x.rows);
  params.groups = static_cast<int>(CeilDiv(w.cols, UnitInputs(kProduct)));
  params.tiles_in_row = static_cast<int>(TilesInRow(w));
  params.row_tiles = static_cast<int>(CeilDiv(w.rows, kPanelRows));
  params.splits =
      std::clamp(exec.num_sms / params.row_tiles, 1, std::min(kMostSplits, params.groups));
  params.is_aligned = params.cols % 4 == 0 && reinterpret_cast<uintptr_t>(params.x) % 16 == 0 &&
                      params.x_stride % 4 == 0;
  const unsigned eights = CeilDiv(params.tokens, kTokens);
  Workspace::Scope scope(exec.workspace);
  params.partials = scope.Take<float>(int64_t{eights} * params.row_tiles * params.splits * kSums);
  return Launch("ChooseExpertsSplitK",
                {.grid = dim3(static_cast<unsigned>(params.row_tiles * params.splits), eights),
                 .block = dim3(kThreads),
                 .overlaps_predecessor = true},
                exec, ChooseExpertsSplitK, params);
}

}  // namespace isthmus::kernels
