// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of attention, any architecture, without tensor cores. A block takes one
// row and up to kTaskHeads of its heads, with the sums of the CPU path in its order (attention.h),
// so that both differ by nothing but what the compiler may not reorder anyway. Bound by arithmetic
// in f32: 4 * head_dim operations per head and key, a stored value decoded once per use.
#include "kernels/attention/attention_device.cuh"
#include "kernels/core/math.h"
#include "kernels/core/workspace.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTaskHeads = 4;
constexpr int kPartialSums = 16;
constexpr int kBlocksPerSm = 4;

// A key of a row: f32 values of this chunk, or a stored entry.
struct Key {
  const float* row = nullptr;
  EntryFormat format = EntryFormat::kKvF32;
  const std::byte* data = nullptr;
  const std::byte* scale = nullptr;
};

__device__ __forceinline__ float KeyValue(const Key& key, int nope, int d) {
  return key.row != nullptr ? key.row[d] : KvEntryValue(key.format, key.data, key.scale, nope, d);
}

__device__ __forceinline__ Key Stored(const EntryPlane& plane, std::byte* base, int64_t entry) {
  return {nullptr, plane.format, EntryData(plane, base, entry), EntryScale(plane, base, entry)};
}

// Key `k`: the window in order of position, then the entries in the order of `order` (null: 0, 1
// and so on).
__device__ __forceinline__ Key KeyOf(const DeviceAttention& args, const DeviceRow& row,
                                     const int32_t* order, int k) {
  const DeviceSequence& sequence = *row.sequence;
  if (k < row.num_window) {
    const int position = row.position - row.num_window + 1 + k;
    if (position >= sequence.start_position) {
      const int64_t chunk_row = sequence.first_row + position - sequence.start_position;
      return {args.chunk_kv + chunk_row * args.kv_stride, EntryFormat::kKvF32, nullptr, nullptr};
    }
    return Stored(args.window_plane, sequence.state, position % args.window);
  }
  const int entry = order != nullptr ? order[k - row.num_window] : k - row.num_window;
  return Stored(args.entry_plane, PageOf(sequence, args.entry_kind, args.entry_plane, entry),
                entry % args.entry_plane.entries);
}

// The selected entries of a row in ascending order; returns how many there are. By all threads of
// the block. Each entry finds its own place, so that no thread waits for another's.
__device__ int SortSelected(const DeviceAttention& args, int64_t row, int32_t* order,
                            int* shared_count) {
  const int32_t* selected = args.selected + row * args.max_selected;
  if (threadIdx.x == 0) *shared_count = 0;
  __syncthreads();
  int mine = 0;
  for (int k = static_cast<int>(threadIdx.x); k < args.max_selected; k += kThreads) {
    const int32_t entry = selected[k];
    if (entry < 0) continue;
    int place = 0;
    for (int j = 0; j < args.max_selected; ++j) {
      place += selected[j] >= 0 && (selected[j] < entry || (selected[j] == entry && j < k)) ? 1 : 0;
    }
    order[place] = entry;
    ++mine;
  }
  if (mine != 0) atomicAdd(shared_count, mine);
  __syncthreads();
  return *shared_count;
}

// scores[h][k] = scale * q[h] . key[k]: sixteen lanes a key, lane i adding channels i, i + 16...
__device__ void Score(const DeviceAttention& args, const DeviceRow& row, const int32_t* order,
                      int num_keys, const float* q, float* scores, int64_t scores_stride) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int part = lane % kPartialSums;
  const int step = kThreads / kPartialSums;
  // The halves of a warp go on together, so that their shuffles name all lanes.
  for (int first = static_cast<int>(threadIdx.x) / kWarpLanes * 2; first < num_keys;
       first += step) {
    const int k = first + lane / kPartialSums;
    const Key key = KeyOf(args, row, order, k < num_keys ? k : num_keys - 1);
    float sum[kTaskHeads] = {};
    for (int d = part; d < args.head_dim; d += kPartialSums) {
      const float value = KeyValue(key, args.nope, d);
#pragma unroll
      for (int h = 0; h < kTaskHeads; ++h) sum[h] = fmaf(q[h * args.head_dim + d], value, sum[h]);
    }
#pragma unroll
    for (int h = 0; h < kTaskHeads; ++h) {
      for (int lanes = kPartialSums / 2; lanes > 0; lanes /= 2) {
        sum[h] += __shfl_xor_sync(kFullWarp, sum[h], lanes);
      }
      if (part == h && k < num_keys) scores[h * scores_stride + k] = args.scale * sum[h];
    }
  }
}

// Turns the scores of one head into numerators in place and returns the denominator to all lanes.
// By a warp; lane i < 16 adds keys i, i + 16...
__device__ float SoftmaxByWarp(const DeviceAttention& args, float* scores, int num_keys,
                               float sink) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  float max = -INFINITY;
  for (int k = lane; k < num_keys; k += kWarpLanes) max = fmaxf(max, scores[k]);
  max = WarpMax(max);
  __syncwarp();
  float sum = 0.0f;
  for (int k = lane; lane < kPartialSums && k < num_keys; k += kPartialSums) {
    const float p = Exp(scores[k] - max);
    sum += p;
    scores[k] = args.is_reference ? RoundBf16(p) : p;
  }
  for (int lanes = kPartialSums / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, lanes);
  }
  sum = __shfl_sync(kFullWarp, sum, 0);
  return sum + Exp(sink - max);
}

// out[h][d] = sum over keys of p * value / denominator, a thread a channel.
__device__ void AddValues(const DeviceAttention& args, const DeviceRow& row, const int32_t* order,
                          int num_keys, const float* scores, int64_t scores_stride,
                          const float* denominator, int num_heads, int64_t out_offset) {
  for (int d = static_cast<int>(threadIdx.x); d < args.head_dim; d += kThreads) {
    float sum[kTaskHeads] = {};
    for (int k = 0; k < num_keys; ++k) {
      const float value = KeyValue(KeyOf(args, row, order, k), args.nope, d);
#pragma unroll
      for (int h = 0; h < kTaskHeads; ++h) {
        sum[h] = fmaf(scores[h * scores_stride + k], value, sum[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kTaskHeads; ++h) {
      if (h >= num_heads) break;
      float value = sum[h] / denominator[h];
      if (args.is_reference) value = RoundBf16(value);
      const int64_t at = out_offset + h * args.head_dim + d;
      if (args.is_out_bf16) {
        static_cast<uint16_t*>(args.out)[at] = Bf16Bits(value);
      } else {
        static_cast<float*>(args.out)[at] = value;
      }
    }
  }
}

// Grid: blocks that share the tasks (a row and kTaskHeads heads). Block: kThreads. Shared memory:
// kTaskHeads * head_dim floats. `scratch_scores` is [blocks][kTaskHeads][max_keys], and
// `scratch_order` [blocks][max_selected], or null.
__global__ __launch_bounds__(kThreads) void AttendRows(DeviceAttention args, int64_t max_keys,
                                                       float* scratch_scores,
                                                       int32_t* scratch_order) {
  __shared__ int count;
  __shared__ float denominator[kTaskHeads];
  float* q = reinterpret_cast<float*>(DynamicShared());
  float* scores = scratch_scores + int64_t{blockIdx.x} * kTaskHeads * max_keys;
  int32_t* order =
      scratch_order == nullptr ? nullptr : scratch_order + int64_t{blockIdx.x} * args.max_selected;
  const int groups = (args.num_heads + kTaskHeads - 1) / kTaskHeads;
  for (int64_t task = blockIdx.x; task < args.batch.rows * groups; task += gridDim.x) {
    const int64_t r = task / groups;
    const int sequence = args.batch.row_sequence[r];
    if (sequence < 0) continue;
    const DeviceRow row = RowOf(args, r, sequence);
    const int first_head = static_cast<int>(task % groups) * kTaskHeads;
    const int heads =
        args.num_heads - first_head < kTaskHeads ? args.num_heads - first_head : kTaskHeads;
    const int64_t q_offset = r * args.q_stride + int64_t{first_head} * args.head_dim;
    for (int i = static_cast<int>(threadIdx.x); i < kTaskHeads * args.head_dim; i += kThreads) {
      float value = 0.0f;
      if (i < heads * args.head_dim) {
        value = args.is_q_bf16 ? Bf16Value(static_cast<const uint16_t*>(args.q)[q_offset + i])
                               : static_cast<const float*>(args.q)[q_offset + i];
      }
      q[i] = value;
    }
    int num_keys = row.num_window;
    if (order != nullptr) {
      num_keys += SortSelected(args, r, order, &count);
    } else if (args.ratio != 0) {
      num_keys += (row.position + 1) / args.ratio;
    }
    __syncthreads();
    Score(args, row, order, num_keys, q, scores, max_keys);
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
    if (warp < kTaskHeads) {
      const float sink = warp < heads ? args.sink[first_head + warp] : 0.0f;
      const float sum = SoftmaxByWarp(args, scores + warp * max_keys, num_keys, sink);
      if (threadIdx.x % kWarpLanes == 0) denominator[warp] = sum;
    }
    __syncthreads();
    AddValues(args, row, order, num_keys, scores, max_keys, denominator, heads,
              r * args.out_stride + int64_t{first_head} * args.head_dim);
    __syncthreads();
  }
}

// Grid: sequences x rows to commit. Block: kThreads, a warp a block of kKvNopeBlock channels.
__global__ __launch_bounds__(kThreads) void CommitRows(DeviceAttention args) {
  const DeviceSequence& sequence = args.batch.sequences[blockIdx.x];
  const int count = sequence.num_rows < args.window ? sequence.num_rows : args.window;
  if (static_cast<int>(blockIdx.y) >= count) return;
  const int i = sequence.num_rows - count + static_cast<int>(blockIdx.y);
  const int64_t slot = (int64_t{sequence.start_position} + i) % args.window;
  const float* row = args.chunk_kv + (int64_t{sequence.first_row} + i) * args.kv_stride;
  std::byte* data = EntryData(args.window_plane, sequence.state, slot);
  if (args.window_plane.format == EntryFormat::kKvF32) {
    for (int d = static_cast<int>(threadIdx.x); d < args.head_dim; d += kThreads) {
      reinterpret_cast<float*>(data)[d] = row[d];
    }
    return;
  }
  std::byte* scale = EntryScale(args.window_plane, sequence.state, slot);
  const int num_blocks = args.nope / kKvNopeBlock;
  if (threadIdx.x >= static_cast<unsigned>(num_blocks) && threadIdx.x < 8) {
    scale[threadIdx.x] = std::byte{0};
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  for (int b = warp; b < args.head_dim / kKvNopeBlock; b += kThreads / kWarpLanes) {
    EncodeKvBlock(row, args.nope, b, data, scale);
  }
}

}  // namespace

absl::Status CommitWindowCuda(const AttentionArgs& args, const Exec& exec) {
  const DeviceBatch& batch = *args.device_batch;
  const int64_t rows = std::min(batch.max_rows_per_sequence, args.window);
  if (batch.num_sequences == 0 || rows == 0) return absl::OkStatus();
  const dim3 grid(static_cast<unsigned>(batch.num_sequences), static_cast<unsigned>(rows));
  return Launch("CommitRows", {.grid = grid, .block = dim3(kThreads)}, exec, CommitRows,
                ToDevice(args));
}

absl::Status LaunchAttentionCuda(const AttentionArgs& args, const Exec& exec) {
  const int64_t rows = args.q.rows;
  if (rows == 0) return absl::OkStatus();
  const int64_t tasks = rows * CeilDiv(args.num_heads, kTaskHeads);
  const int64_t blocks = std::min<int64_t>(tasks, int64_t{kBlocksPerSm} * exec.num_sms);
  const int64_t max_keys = CeilDiv(MaxKeys(args), kPartialSums) * int64_t{kPartialSums};
  Workspace::Scope scope(exec.workspace);
  float* scores = scope.Take<float>(blocks * kTaskHeads * max_keys);
  int32_t* order =
      args.selected != nullptr ? scope.Take<int32_t>(blocks * args.max_selected) : nullptr;
  const LaunchShape shape = {
      .grid = dim3(static_cast<unsigned>(blocks)),
      .block = dim3(kThreads),
      .shared_bytes = static_cast<size_t>(kTaskHeads * args.head_dim) * sizeof(float)};
  ISTHMUS_RETURN_IF_ERROR(
      Launch("AttendRows", shape, exec, AttendRows, ToDevice(args), max_keys, scores, order));
  return CommitWindowCuda(args, exec);
}

}  // namespace isthmus::kernels
