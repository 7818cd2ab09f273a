// SPDX-License-Identifier: Apache-2.0
// Sparse attention of many rows on tensor cores: patch attention.prefill_widened.
//
// Bound by mma.sync: 131,072 operations per key and row at 64 heads, 47 clocks of a multiprocessor
// at the measured 643 TFLOP/s; and by reads and writes of shared memory, 9 KB per key and row, 70
// clocks. Keys come out of the L2.
//
// Queries are taken as bf16, on whose grid reference arithmetic has them. A block takes a row and
// up to 64 heads, and widens each key once to bf16 in shared memory, scale and all
// (attention_prefill_keys.cuh). Half a block, four warps, takes 32 heads: a warp holds the queries
// of its slice of 128 channels in registers, adds that slice's share of the scores, and adds up
// those columns of the output. What warps exchange is shares of scores, which the warp that owns
// eight heads turns into the weights of a tile's keys.
//
// Letters: g = lane / 4, t = lane % 4 as in mma.cuh; m a tile of 16 heads, n a tile of 8 keys, s a
// step of 16 channels, j a chunk of 8 channels of the warp's slice.
#include <type_traits>

#include "kernels/attention/attention_prefill_keys.cuh"
#include "kernels/core/fast_math.cuh"
#include "kernels/core/mma.cuh"
#include "kernels/core/workspace.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace attention_prefill {
namespace {

constexpr int kHalfWarps = 4;
constexpr int kHalfThreads = kHalfWarps * kWarpLanes;
constexpr int kHalfHeads = 32;
constexpr int kTilesM = kHalfHeads / 16;
constexpr int kTilesN = kTile / 8;
constexpr int kSteps = 8;
constexpr int kSliceChunks = 16;
constexpr float kLog2E = 1.44269504f;
// The running maximum follows only when it has fallen back by this much, in powers of two: weights
// stay below 2^8.
constexpr float kLateness = 8.0f;

// Shared memory of a block with kHalves halves.
template <int kHalves>
struct Shared {
  uint4 tile[kTile][kChunks];
  float2 share[kHalves][kHalfWarps][kHalfWarps][kTilesN][kWarpLanes];  // [..][owner][from]
  uint4 weights[kHalves][kTilesM][kTile / 16][kWarpLanes];             // A fragments
  KeyQueue queue;
  float rescale[kHalves][kHalfHeads];
  RowKeys keys;  // Not in registers, which are full.
};

// The warp's place in the block.
struct Place {
  int half;
  int slice;  // And the eight heads that it owns.
};
__device__ __forceinline__ Place PlaceOfWarp() {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  return {warp / kHalfWarps, warp % kHalfWarps};
}
__device__ __forceinline__ void SyncHalf(int half) { SyncThreads(1 + half, kHalfThreads); }

using Queries = uint32_t[kSteps][kTilesM][4];
using Output = float[kTilesM][kSliceChunks][4];

// The queries of the slice as A fragments. What is beyond the last head is of that one, and has no
// place in the output. All loads of two steps are on their way before the first is used: one behind
// a branch of its own would be waited for.
template <typename T>
__device__ __forceinline__ void LoadQueriesOf(const T* of_row, int last_head, int first_head,
                                              int slice, Queries& q) {
  const int g = FreshLane() / 4;
  const int t = FreshLane() % 4;
  using Pair = std::conditional_t<sizeof(T) == 2, uint32_t, float2>;
#pragma unroll
  for (int s = 0; s < kSteps; s += 2) {
    Pair pairs[2][kTilesM][4];
#pragma unroll
    for (int n = 0; n < 8 * kTilesM; ++n) {
      const int m = n / 8;
      const int i = n % 4;
      const int head = min(first_head + 16 * m + 8 * (i % 2) + g, last_head);
      const int channel = ChunkChannel(slice, 2 * (s + n / 4 % 2) + i / 2) + 2 * t;
      pairs[n / 4 % 2][m][i] = *reinterpret_cast<const Pair*>(of_row + head * kHeadDim + channel);
    }
#pragma unroll
    for (int n = 0; n < 8 * kTilesM; ++n) {
      const Pair& pair = pairs[n / 4 % 2][n / 8][n % 4];
      if constexpr (sizeof(T) == 2) {
        q[s + n / 4 % 2][n / 8][n % 4] = pair;
      } else {
        q[s + n / 4 % 2][n / 8][n % 4] = Bf16Pair(pair.x, pair.y);
      }
    }
  }
}

__device__ __forceinline__ void LoadQueries(const DeviceAttention& args, int64_t row,
                                            int first_head, int slice, Queries& q) {
  const int last = args.num_heads - 1;
  if (args.is_q_bf16) {
    LoadQueriesOf(static_cast<const uint16_t*>(args.q) + row * args.q_stride, last, first_head,
                  slice, q);
  } else {
    LoadQueriesOf(static_cast<const float*>(args.q) + row * args.q_stride, last, first_head, slice,
                  q);
  }
}

// The slice's share of the scores of the half's heads, to their owners.
template <int kHalves>
__device__ __forceinline__ void ShareScores(Shared<kHalves>& shared, const Place& place,
                                            const Queries& q) {
  const int lane = FreshLane();
  const int row = lane % 8 + lane / 16 * 8;  // Of 16 keys: its address is the lane's to give.
#pragma unroll
  for (int pair = 0; pair < kTilesN / 2; ++pair) {
    float c[kTilesM][2][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint32_t k[4];  // Of two tiles of keys, two words each.
      LoadMatrix<4, false>(k, ChunkAt(shared.tile, 16 * pair + row,
                                      kSliceChunks * place.slice + 2 * s + lane / 8 % 2));
      const uint32_t first[2] = {k[0], k[1]};
      const uint32_t second[2] = {k[2], k[3]};
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        MmaBf16(c[m][0], q[s][m], first);
        MmaBf16(c[m][1], q[s][m], second);
      }
    }
#pragma unroll
    for (int owner = 0; owner < kHalfWarps; ++owner) {
      const int m = owner / 2;
      const int e = owner % 2 * 2;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        shared.share[place.half][owner][place.slice][2 * pair + n][lane] =
            make_float2(c[m][n][e], c[m][n][e + 1]);
      }
    }
  }
}

// What a lane knows of its owned head.
struct OwnedHead {
  float max = -INFINITY;
  float sum = 0.0f;  // Of the weights of the lane's keys.
};

// Turns the scores of the warp's eight heads into weights. `valid` has a bit a key.
template <int kHalves>
__device__ __forceinline__ void WeighKeys(Shared<kHalves>& shared, const Place& place,
                                          uint32_t valid, float factor, OwnedHead& head) {
  const int lane = FreshLane();
  auto& share = shared.share[place.half][place.slice];
  float s[8] = {};
#pragma unroll
  for (int from = 0; from < kHalfWarps; ++from) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      const float2 v = share[from][n][lane];
      s[2 * n] += v.x;
      s[2 * n + 1] += v.y;
    }
  }
  float max = -INFINITY;
  const uint32_t of_lane = valid >> (2 * (lane % 4));  // Keys 8 n + 2 t and the next.
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    s[i] = (of_lane & 1u << (8 * (i / 2) + i % 2)) != 0 ? s[i] * factor : -INFINITY;
    max = fmaxf(max, s[i]);
  }
  max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
  max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
  float rescale = 1.0f;
  if (max > head.max + kLateness) {  // Also at first: -infinity is below everything.
    rescale = FastExp2(head.max - max);
    head.max = max;
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    s[i] = FastExp2(s[i] - head.max);
    sum += s[i];
  }
  head.sum = fmaf(head.sum, rescale, sum);
  if (lane % 4 == 0) shared.rescale[place.half][8 * place.slice + lane / 4] = rescale;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    auto* words = reinterpret_cast<uint32_t*>(
        &shared.weights[place.half][place.slice / 2][i][lane]);  // Of rows g or g + 8.
    words[place.slice % 2] = Bf16Pair(s[4 * i], s[4 * i + 1]);
    words[place.slice % 2 + 2] = Bf16Pair(s[4 * i + 2], s[4 * i + 3]);
  }
}

// Multiplies what has been added up by the half's factors, head by head.
__device__ __forceinline__ void Rescale(const float* factors, Output& o) {
  const int g = FreshLane() / 4;
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
    const float low = factors[16 * m + g];
    const float high = factors[16 * m + 8 + g];
    if (__any_sync(kFullWarp, low != 1.0f || high != 1.0f ? 1 : 0) == 0) continue;
#pragma unroll
    for (int j = 0; j < kSliceChunks; ++j) {
      o[m][j][0] *= low, o[m][j][1] *= low;
      o[m][j][2] *= high, o[m][j][3] *= high;
    }
  }
}

// o += weights * values over the tile's keys and the slice's columns.
template <int kHalves>
__device__ __forceinline__ void AddValues(Shared<kHalves>& shared, const Place& place, Output& o) {
  const int lane = FreshLane();
  const int row = lane % 16;
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
    uint32_t p[kTilesM][4];
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      const uint4 words = shared.weights[place.half][m][step][lane];
      p[m][0] = words.x, p[m][1] = words.y, p[m][2] = words.z, p[m][3] = words.w;
    }
#pragma unroll
    for (int j = 0; j < kSliceChunks; j += 2) {
      uint32_t v[4];  // Of two chunks, two words each.
      LoadMatrix<4, true>(
          v, ChunkAt(shared.tile, 16 * step + row, kSliceChunks * place.slice + j + lane / 16));
      const uint32_t first[2] = {v[0], v[1]};
      const uint32_t second[2] = {v[2], v[3]};
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        MmaBf16(o[m][j], p[m], first);
        MmaBf16(o[m][j + 1], p[m], second);
      }
    }
  }
}

// The warp's columns, times the half's factors, to the output.
__device__ __forceinline__ void StoreOutput(const DeviceAttention& args, int64_t row,
                                            int first_head, int slice, const float* factors,
                                            const Output& o) {
  const int g = FreshLane() / 4;
  const int t = FreshLane() % 4;
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int own = 16 * m + 8 * high + g;
      const float factor = factors[own];
      if (first_head + own >= args.num_heads) continue;
      const int64_t at = row * args.out_stride + int64_t{first_head + own} * kHeadDim + 2 * t;
#pragma unroll
      for (int j = 0; j < kSliceChunks; ++j) {
        const uint32_t pair = Bf16Pair(o[m][j][2 * high] * factor, o[m][j][2 * high + 1] * factor);
        const int64_t place = at + ChunkChannel(slice, j);
        if (args.is_out_bf16) {
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(args.out) + place) = pair;
        } else {
          *reinterpret_cast<float2*>(static_cast<float*>(args.out) + place) =
              make_float2(LowBf16(pair), HighBf16(pair));
        }
      }
    }
  }
}

__device__ __forceinline__ RowKeys KeysOf(const DeviceAttention& args, int64_t row, int sequence,
                                          const unsigned char* chunk_entries) {
  const int position = args.batch.row_position[row];
  RowKeys keys;
  keys.sequence = args.batch.sequences + sequence;
  keys.selected = args.selected != nullptr ? args.selected + row * args.max_selected : nullptr;
  keys.chunk_entries = chunk_entries;
  keys.num_window = position + 1 < args.window ? position + 1 : args.window;
  keys.first_position = position - keys.num_window + 1;
  keys.num_keys = keys.num_window + (args.ratio == 0            ? 0
                                     : args.selected != nullptr ? args.max_selected
                                                                : (position + 1) / args.ratio);
  return keys;
}

// What the steps of the first tiles fetch, one step after another. By one warp.
__device__ __forceinline__ void StartQueue(const DeviceAttention& args, const RowKeys& keys,
                                           KeyQueue& queue) {
#pragma unroll 1
  for (int tile = 0; tile < kKindsAhead; ++tile) FetchKind(args, keys, queue, tile);
  CommitCopies();
  WaitForCopies<0>();
#pragma unroll 1
  for (int tile = 0; tile < kPagesAhead; ++tile) {
    if (tile == 1) {
      CommitCopies();
      WaitForCopies<0>();
      FindSource(args, queue, 0);
    }
    FetchPage(args, keys, queue, tile);
  }
  CommitCopies();
}

// All tiles of the row's keys: adds to o and to what the warp knows of its owned heads.
template <int kHalves>
__device__ __forceinline__ void AttendTiles(const DeviceAttention& args, const Place& place,
                                            const Queries& q, Shared<kHalves>& shared, Output& o,
                                            OwnedHead& head) {
  constexpr int kThreads = kHalves * kHalfThreads;
  const RowKeys& keys = shared.keys;
  KeyQueue& queue = shared.queue;
  const float factor = args.scale * kLog2E;
#pragma unroll 1
  for (int i = 0; i * kTile < keys.num_keys; ++i) {
    WaitForCopies<0>();
    __syncwarp();
    if (threadIdx.x < kWarpLanes) FindSource(args, queue, i + 1);
    WidenKeys<kThreads>(queue, shared.tile);
    __syncthreads();
    FetchRaw<kThreads>(args, queue);
    if (threadIdx.x < kWarpLanes) {
      FetchPage(args, keys, queue, i + kPagesAhead);
      FetchKind(args, keys, queue, i + kKindsAhead);
    }
    CommitCopies();
    const uint32_t valid =
        __ballot_sync(kFullWarp, queue.kind[i % kKindTiles][FreshLane()] != kNoKey ? 1 : 0);
    if (valid != 0) {  // The same in all warps.
      ShareScores<kHalves>(shared, place, q);
      SyncHalf(place.half);
      WeighKeys<kHalves>(shared, place, valid, factor, head);
      SyncHalf(place.half);
      Rescale(shared.rescale[place.half], o);
      AddValues<kHalves>(shared, place, o);
    }
    __syncthreads();  // The tile has been read.
  }
}

// The queries of a row that comes later, into the L2. By one thread.
__device__ __forceinline__ void PrefetchQueries(const DeviceAttention& args, int64_t row) {
  if (row >= args.batch.rows) return;
  const int bytes = args.is_q_bf16 ? 2 : 4;
  BulkPrefetchL2(static_cast<const std::byte*>(args.q) + row * args.q_stride * bytes,
                 static_cast<unsigned>(args.num_heads * kHeadDim * bytes));
}

// Grid: rows * groups of 32 * kHalves heads. Block: 128 * kHalves. Shared memory: Shared<kHalves>.
// `rows_ahead` run at the same time as a row.
template <int kHalves>
__global__ __launch_bounds__(kHalves* kHalfThreads, 1) void AttendRow(
    DeviceAttention args, int groups, int rows_ahead,
    const unsigned char* chunk_entries) {  // [rows][kChunkEntryBytes]
  auto& shared = *reinterpret_cast<Shared<kHalves>*>(DynamicShared());
  const int64_t row = blockIdx.x / static_cast<unsigned>(groups);
  const int sequence = args.batch.row_sequence[row];
  if (sequence < 0) return;
  const Place place = PlaceOfWarp();
  if (threadIdx.x == kWarpLanes) PrefetchQueries(args, row + rows_ahead);
  if (threadIdx.x < kWarpLanes) {
    if (threadIdx.x == 0) shared.keys = KeysOf(args, row, sequence, chunk_entries);
    __syncwarp();
    StartQueue(args, shared.keys, shared.queue);
  }
  __syncthreads();
  FetchRaw<kHalves * kHalfThreads>(args, shared.queue);
  CommitCopies();
  const int first_head =
      (static_cast<int>(blockIdx.x % static_cast<unsigned>(groups)) * kHalves + place.half) *
      kHalfHeads;
  Queries q;
  LoadQueries(args, row, first_head, place.slice, q);
  __syncthreads();  // All have read the first sources.
  Output o = {};
  OwnedHead head;
  AttendTiles<kHalves>(args, place, q, shared, o, head);

  const int lane = FreshLane();
  const int own = 8 * place.slice + lane / 4;
  float total = head.sum + __shfl_xor_sync(kFullWarp, head.sum, 1);
  total += __shfl_xor_sync(kFullWarp, total, 2);
  if (first_head + own < args.num_heads) {
    total += FastExp2(args.sink[first_head + own] * kLog2E - head.max);
  }
  if (lane % 4 == 0) shared.rescale[place.half][own] = 1.0f / total;
  SyncHalf(place.half);
  StoreOutput(args, row, first_head, place.slice, shared.rescale[place.half], o);
}

// The rows of this step as entries. Grid: rows. Block: a warp per block of channels. Shared memory:
// none.
__global__ void EncodeRows(DeviceAttention args,
                           unsigned char* entries) {  // [rows][kChunkEntryBytes]
  if (args.batch.row_sequence[blockIdx.x] < 0) return;
  auto* entry = reinterpret_cast<std::byte*>(entries + int64_t{blockIdx.x} * kChunkEntryBytes);
  const int block = static_cast<int>(threadIdx.x) / kWarpLanes;
  EncodeKvBlock(args.chunk_kv + int64_t{blockIdx.x} * args.kv_stride, kNope, block, entry,
                entry + kEntryBytes);
  if (threadIdx.x == 0) entry[kEntryBytes + kNope / kKvNopeBlock] = std::byte{0};
}

template <int kHalves>
absl::Status LaunchHalves(const AttentionArgs& args, const Exec& exec,
                          const unsigned char* chunk_entries) {
  static_assert(sizeof(Shared<kHalves>) <= kMaxSharedBytes);
  const int groups = static_cast<int>(CeilDiv(args.num_heads, kHalves * kHalfHeads));
  const LaunchShape shape = {.grid = dim3(static_cast<unsigned>(args.q.rows * groups)),
                             .block = dim3(kHalves * kHalfThreads),
                             .shared_bytes = sizeof(Shared<kHalves>)};
  return Launch("AttendRow", shape, exec, AttendRow<kHalves>, ToDevice(args), groups,
                (exec.num_sms + groups - 1) / groups, chunk_entries);
}

}  // namespace
}  // namespace attention_prefill

absl::Status LaunchAttentionPrefill(const AttentionArgs& args, const Exec& exec) {
  using attention_prefill::kChunkEntryBytes;
  const int64_t rows = args.q.rows;
  if (rows == 0) return absl::OkStatus();
  // A row's bits must not depend on its being decoded or not.
  if (exec.batch_invariant) return LaunchAttentionMma(args, exec);
  Workspace::Scope scope(exec.workspace);
  auto* entries = scope.Take<unsigned char>(rows * kChunkEntryBytes);
  const LaunchShape shape = {
      .grid = dim3(static_cast<unsigned>(rows)),
      .block = dim3(attention_prefill::kHeadDim / kKvNopeBlock * kWarpLanes)};
  ISTHMUS_RETURN_IF_ERROR(
      Launch("EncodeRows", shape, exec, attention_prefill::EncodeRows, ToDevice(args), entries));
  ISTHMUS_RETURN_IF_ERROR(args.num_heads <= attention_prefill::kHalfHeads
                              ? attention_prefill::LaunchHalves<1>(args, exec, entries)
                              : attention_prefill::LaunchHalves<2>(args, exec, entries));
  return CommitWindowCuda(args, exec);
}

}  // namespace isthmus::kernels
