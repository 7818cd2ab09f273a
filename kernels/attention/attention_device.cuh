// SPDX-License-Identifier: Apache-2.0
// What the CUDA paths of attention share: their arguments as a kernel takes them, the place of a
// key, and the commit of a chunk's last rows to the window ring. Internal to this folder.
#pragma once

#include <algorithm>

#include "kernels/attention/attention_variants.h"
#include "kernels/core/kv_entry.cuh"
#include "kernels/core/launch.cuh"

namespace isthmus::kernels {

// All pointers are device memory.
struct DeviceAttention {
  const void* q = nullptr;            // [rows, heads * head_dim], f32 or bf16
  const float* chunk_kv = nullptr;    // [rows, head_dim]
  void* out = nullptr;                // [rows, heads * head_dim], f32 or bf16; may be q
  const float* sink = nullptr;        // [heads]
  const int32_t* selected = nullptr;  // [rows, max_selected], or null
  int64_t q_stride = 0;
  int64_t kv_stride = 0;
  int64_t out_stride = 0;
  bool is_q_bf16 = false;
  bool is_out_bf16 = false;
  bool is_reference = false;
  int num_heads = 0;
  int head_dim = 0;
  int nope = 0;  // Channels before the rotary ones.
  int window = 0;
  int ratio = 0;
  int max_selected = 0;
  int entry_kind = kCsaKv;
  float scale = 0.0f;
  EntryPlane window_plane;
  EntryPlane entry_plane;
  DeviceBatch batch;
};

inline DeviceAttention ToDevice(const AttentionArgs& args) {
  DeviceAttention out;
  out.q = args.q.data;
  out.chunk_kv = args.chunk_kv.f32(0);
  out.out = args.out.data;
  out.sink = args.sink.f32();
  out.selected = args.selected;
  out.q_stride = args.q.row_stride;
  out.kv_stride = args.chunk_kv.row_stride;
  out.out_stride = args.out.row_stride;
  out.is_q_bf16 = args.q.dtype == DType::kBf16;
  out.is_out_bf16 = args.out.dtype == DType::kBf16;
  out.is_reference = args.arithmetic == Arithmetic::kReference;
  out.num_heads = static_cast<int>(args.num_heads);
  out.head_dim = static_cast<int>(args.head_dim);
  out.nope = static_cast<int>(args.head_dim - args.rope_dim);
  out.window = static_cast<int>(args.window);
  out.ratio = static_cast<int>(args.ratio);
  out.max_selected = static_cast<int>(args.max_selected);
  out.entry_kind = args.entry_kind;
  out.scale = args.scale;
  out.window_plane = args.window_plane;
  out.entry_plane = args.entry_plane;
  out.batch = *args.device_batch;
  return out;
}

// The largest number of keys that a row of the batch may have, from the batch's bounds; a selected
// list counts whole.
inline int64_t MaxKeys(const AttentionArgs& args) {
  const int64_t tokens = args.device_batch->max_tokens;
  const int64_t entries = args.selected != nullptr ? args.max_selected
                          : args.ratio != 0        ? tokens / args.ratio
                                                   : 0;
  return std::min(args.window, std::max<int64_t>(tokens, 1)) + entries;
}

// One row of the batch.
struct DeviceRow {
  const DeviceSequence* sequence = nullptr;
  int position = 0;
  int num_window = 0;  // Keys of the window, which come first.
};

__device__ __forceinline__ DeviceRow RowOf(const DeviceAttention& args, int64_t row, int sequence) {
  DeviceRow out;
  out.sequence = args.batch.sequences + sequence;
  out.position = args.batch.row_position[row];
  out.num_window = out.position + 1 < args.window ? out.position + 1 : args.window;
  return out;
}

// Writes the last `window` rows of each sequence's chunk to its ring. Enqueued after the attention
// itself: a longer chunk overwrites what its own rows still read.
absl::Status CommitWindowCuda(const AttentionArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
