// SPDX-License-Identifier: Apache-2.0
// Patch attention_inputs.one_launch: in a decode step, all that stands between a layer's
// projections and its choice of entries. Bound by latency: the floor is what the parts read and
// write, a few hundred KB at 64 tokens, and of the entries of ratio 128 the 512 KB of ring of one
// that completes. The compressors' blocks come first, since an entry that completes takes longest.
#include <cmath>

#include "kernels/compressor/compressor_insert.cuh"
#include "kernels/core/workspace.h"
#include "kernels/fused/attention_inputs/attention_inputs_variants.h"
#include "kernels/fused/attention_inputs/head_norm_rope.cuh"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = heads::kWarps * kWarpLanes;
static_assert(kThreads == insert::kThreads);
constexpr int kQueryDim = 128;
constexpr int kEach = kQueryDim / kWarpLanes;  // Channels of a lane: lane, lane + 32, ...
static_assert(kIndexKeyBlock == kWarpLanes);

struct QueryParams {
  float* q;                  // [tokens, heads * kQueryDim], rows q_stride apart
  float* weights;            // [tokens, heads], rows weights_stride apart
  const int64_t* positions;  // [tokens]
  const float* frequency;    // [pairs]
  int64_t q_stride, weights_stride;
  int heads, pairs;
  float transform_factor;  // kQueryDim^-0.5
  float weight_scale;
};

struct InsertParams {
  CompressorParams compressor;
  float* pooled;  // [sequences][most_entries][dim]
  int most_entries;
  unsigned* counters;  // [sequences]
};

struct PartsParams {
  InsertParams inserts[2];
  heads::HeadParams heads;
  QueryParams query;
  int end_block[4];  // Of the grid: of either compressor, of the heads, of the index query.
};

// Rotates, transforms and rounds head h of the index query of token t, and scales its weight. By
// one warp; the operations and their order are those of rope, indexer and elementwise.
__device__ __forceinline__ void TransformHead(const QueryParams& params, int64_t t, int h,
                                              const float* cosine, const float* sine) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  float* row = params.q + t * params.q_stride + int64_t{h} * kQueryDim;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = row[kWarpLanes * i + lane];
  float* weight = params.weights + t * params.weights_stride + h;
  if (lane == 0) *weight = RoundBf16(*weight * params.weight_scale);
  const int rotated = kQueryDim - 2 * params.pairs;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float other = __shfl_xor_sync(kFullWarp, x[i], 1);
    const int d = kWarpLanes * i + lane;
    if (d < rotated) continue;
    const int pair = (d - rotated) / 2;
    const float s = sine[pair];
    x[i] = RoundBf16(x[i] * cosine[pair] + other * (d % 2 == 0 ? -s : s));
  }
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float other = __shfl_xor_sync(kFullWarp, x[i], distance);
      x[i] = (lane & distance) != 0 ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int distance = 1; distance < kEach; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((i & distance) != 0) continue;
      const float a = x[i];
      const float b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float value = RoundBf16(x[i] * params.transform_factor);
    const float scale = PowerOfTwo(Fp4ScaleExponent(WarpMax(fabsf(value))));
    const float inverse = 1.0f / scale;
    row[kWarpLanes * i + lane] = Fp4E2m1Value(Fp4E2m1Code(value * inverse)) * scale;
  }
}

// Heads [first_head, first_head + kWarps) of token t. By a whole block; heads are a multiple of
// kWarps.
__device__ __forceinline__ void TransformHeads(const QueryParams& params, int64_t t,
                                               int first_head) {
  __shared__ float cosine[heads::kMaxPairs];
  __shared__ float sine[heads::kMaxPairs];
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < params.pairs) {
    SinCos(static_cast<float>(params.positions[t]) * params.frequency[thread], &sine[thread],
           &cosine[thread]);
  }
  __syncthreads();
  TransformHead(params, t, first_head + thread / kWarpLanes, cosine, sine);
}

// Grid: end_block[3] blocks. Block: kThreads. Shared memory: the larger of the compressors'
// SharedBytes, dynamic.
__global__ __launch_bounds__(kThreads, 1) void AttentionInputParts(
    const __grid_constant__ PartsParams params) {
  LetSuccessorStart();
  WaitForPredecessor();
  const auto block = static_cast<int>(blockIdx.x);
  if (block < params.end_block[1]) {
    const int which = block < params.end_block[0] ? 0 : 1;
    const InsertParams& part = params.inserts[which];
    const int item = block - (which == 0 ? 0 : params.end_block[0]);
    const int pieces = part.compressor.dim / insert::kChannels;
    insert::InsertPiece(part.compressor, item % pieces, item / pieces, part.pooled,
                        part.most_entries, part.counters);
  } else if (block < params.end_block[2]) {
    const int item = block - params.end_block[1];
    const int each = params.heads.heads / heads::kWarps + 1;  // ceil((heads + 1) / kWarps)
    heads::NormRopeHeads(params.heads, item / each, item % each * heads::kWarps);
  } else {
    const int item = block - params.end_block[2];
    const int each = params.query.heads / heads::kWarps;
    TransformHeads(params.query, item / each, item % each * heads::kWarps);
  }
}

QueryParams QueryOf(const IndexQueryArgs& args) {
  return {.q = args.q.f32(0),
          .weights = args.weights.f32(0),
          .positions = args.positions.data(),
          .frequency = args.frequency.data(),
          .q_stride = args.q.row_stride,
          .weights_stride = args.weights.row_stride,
          .heads = static_cast<int>(args.num_heads),
          .pairs = static_cast<int>(args.frequency.size()),
          .transform_factor = 1.0f / std::sqrt(static_cast<float>(args.dim)),
          .weight_scale = args.weight_scale};
}

}  // namespace

absl::Status LaunchAttentionInputsParts(const AttentionInputsArgs& args, const Exec& exec) {
  Workspace::Scope scope(exec.workspace);
  PartsParams params = {};
  int64_t end = 0;
  size_t shared_bytes = 0;
  const std::optional<CompressorArgs>* inserts[2] = {&args.compressor, &args.index_compressor};
  for (int i = 0; i < 2; ++i) {
    if (inserts[i]->has_value() && (*inserts[i])->device_batch->rows > 0) {
      const CompressorArgs& compressor = **inserts[i];
      const int64_t sequences = compressor.device_batch->num_sequences;
      params.inserts[i] = {.compressor = ParamsOf(compressor),
                           .pooled = scope.Take<float>(insert::PooledFloats(compressor)),
                           .most_entries = static_cast<int>(insert::MostEntries(compressor)),
                           .counters = exec.counters + i * sequences};
      end += sequences * (compressor.dim / insert::kChannels);
      shared_bytes = std::max(shared_bytes, insert::SharedBytes(compressor));
    }
    params.end_block[i] = static_cast<int>(end);
  }
  params.heads = heads::ParamsOf(args.heads);
  end += args.heads.q.rows * CeilDiv(params.heads.heads + 1, heads::kWarps);
  params.end_block[2] = static_cast<int>(end);
  if (args.index_query.q.data != nullptr) {
    params.query = QueryOf(args.index_query);
    end += args.index_query.q.rows * (args.index_query.num_heads / heads::kWarps);
  }
  params.end_block[3] = static_cast<int>(end);
  return Launch("AttentionInputParts",
                {.grid = dim3(static_cast<unsigned>(end)),
                 .block = dim3(kThreads),
                 .shared_bytes = shared_bytes,
                 .overlaps_predecessor = true},
                exec, AttentionInputParts, params);
}

}  // namespace isthmus::kernels
