// SPDX-License-Identifier: Apache-2.0
// How attention's tensor-core kernel finds the keys of a row and brings them to shared memory, a
// tile at a time (attention_mma.cuh). One warp follows the keys, a lane a key: what it is, then its
// page's address, each one tile ahead of the next, and leaves their places in shared memory; all
// warps copy.
#pragma once

#include "kernels/attention/attention_mma.cuh"

namespace isthmus::kernels::attention_mma {

// What a key is: an entry (0 and up), nothing, the row that a decode step adds, or, downwards, a
// slot of the ring and then a row of the sequence's chunk.
inline constexpr int kNoKey = -1;
inline constexpr int kAddedRow = -2;
inline constexpr int kFirstSlot = -3;

inline constexpr int kMaxSplits = kWarpLanes;  // A lane each, where they are added up.

// How blocks share the work: block = (row, split, group of heads).
struct SplitPlan {
  int max_splits = 1;         // Per row.
  float* values = nullptr;    // [row][max_splits][num_heads][kHeadDim], if max_splits > 1
  float2* weights = nullptr;  // [row][max_splits][num_heads]: maximum and sum
  const unsigned char* chunk_entries = nullptr;
  Divisor by_max_splits;
  Divisor by_ratio;
  Divisor by_window;
  Divisor by_page;  // By the entries of a page of the compressed cache.
};

// How many tiles each of at most `max_splits` splits of a row takes.
__device__ __forceinline__ int TilesPerSplit(const SplitPlan& plan, int tiles) {
  return Quotient(tiles + plan.max_splits - 1, plan.by_max_splits);
}

// Keys of a row at `position`, of which the window's come first.
__device__ __forceinline__ int NumWindow(const DeviceAttention& args, int position) {
  return position + 1 < args.window ? position + 1 : args.window;
}
__device__ __forceinline__ int NumKeys(const DeviceAttention& args, const SplitPlan& plan,
                                       int position) {
  const int entries = args.ratio == 0            ? 0
                      : args.selected != nullptr ? args.max_selected
                                                 : Quotient(position + 1, plan.by_ratio);
  return NumWindow(args, position) + entries;
}

// Reads only the batch, which no kernel writes.
__device__ __forceinline__ RowKeys KeysOf(const DeviceAttention& args, const SplitPlan& plan,
                                          int64_t row, int split) {
  RowKeys keys;
  const int sequence = args.batch.row_sequence[row];
  const int position = args.batch.row_position[row];
  if (sequence < 0) return keys;
  const DeviceSequence& of = args.batch.sequences[sequence];
  keys.row = row;
  keys.state = of.state;
  keys.pages = of.pages[args.entry_kind];
  keys.first_row = of.first_row;
  keys.start_position = of.start_position;
  keys.chunk_entries = plan.chunk_entries;
  keys.by_page = plan.by_page;
  if (args.selected != nullptr) keys.selected = args.selected + row * args.max_selected;
  keys.num_window = NumWindow(args, position);
  keys.first_position = position - keys.num_window + 1;
  keys.first_slot =
      keys.first_position - Quotient(keys.first_position, plan.by_window) * args.window;
  keys.num_keys = NumKeys(args, plan, position);
  const int tiles = (keys.num_keys + kTile - 1) / kTile;
  const int per_split = TilesPerSplit(plan, tiles);
  keys.tiles_per_split = per_split;
  keys.row_tiles = tiles;
  keys.split = split;
  keys.first_tile = split * per_split;
  const int left = tiles - keys.first_tile;
  keys.num_tiles = left < 0 ? 0 : left < per_split ? left : per_split;
  const int end = (keys.first_tile + keys.num_tiles) * kTile;
  if (end < keys.num_keys) keys.num_keys = end;
  return keys;
}

// The split's tile that has the row which a decode step adds, or a negative number.
__device__ __forceinline__ int AddedTile(const RowKeys& keys) {
  if (keys.chunk_entries != nullptr) return -1;
  const int tile = (keys.num_window - 1) / kTile - keys.first_tile;
  return tile < keys.num_tiles ? tile : -1;
}

// Key k of the window, in the ring.
__device__ __forceinline__ int SlotOf(const DeviceAttention& args, const RowKeys& keys, int k) {
  const int slot = keys.first_slot + k;
  return slot < args.window ? slot : slot - args.window;
}

// First step: what the lane's key of the split's tile `tile` is.
__device__ __forceinline__ int KindOf(const DeviceAttention& args, const RowKeys& keys, int tile) {
  const int k = (keys.first_tile + tile) * kTile + FreshLane();
  if (k >= keys.num_keys) return kNoKey;
  if (k >= keys.num_window) {
    const int j = k - keys.num_window;
    return keys.selected != nullptr ? keys.selected[j] : j;
  }
  const int position = keys.first_position + k;
  const int chunk_row = position - keys.start_position;
  return chunk_row < 0                   ? kFirstSlot - SlotOf(args, keys, k)
         : keys.chunk_entries != nullptr ? kFirstSlot - args.window - chunk_row
                                         : kAddedRow;
}

// Second step: the address that the key's bytes are counted from.
__device__ __forceinline__ const std::byte* PageOfKey(const DeviceAttention& args,
                                                      const RowKeys& keys, int kind) {
  if (kind >= 0) return keys.pages[Quotient(kind, keys.by_page)];
  if (kFirstSlot - kind < args.window) return keys.state;
  const int64_t row = int64_t{keys.first_row} + kFirstSlot - kind - args.window;
  return reinterpret_cast<const std::byte*>(keys.chunk_entries + row * kChunkEntryBytes);
}

__device__ __forceinline__ Place PlaceOf(const DeviceAttention& args, const RowKeys& keys, int kind,
                                         const std::byte* page) {
  if (kind == kNoKey) return {nullptr, nullptr};
  if (kind == kAddedRow) return {nullptr, page};
  const int slot = kFirstSlot - kind;
  if (kind < 0 && slot >= args.window) return {page, page + kEntryBytes};
  const EntryPlane& plane = kind >= 0 ? args.entry_plane : args.window_plane;
  const int entry = kind >= 0 ? kind - Quotient(kind, keys.by_page) * plane.entries : slot;
  return {page + plane.data_offset + int64_t{entry} * kEntryBytes,
          page + plane.scale_offset + int64_t{entry} * kScaleBytes};
}

// By all lanes of one warp: leaves the places of a tile's keys in `places`, and which are keys.
__device__ __forceinline__ void LeavePlaces(const DeviceAttention& args, const RowKeys& keys,
                                            int kind, const std::byte* page, Place (&places)[kTile],
                                            uint32_t* valid) {
  const int lane = FreshLane();
  places[lane] = PlaceOf(args, keys, kind, page);
  const uint32_t bits = __ballot_sync(kFullWarp, kind != kNoKey ? 1 : 0);
  if (lane == 0) *valid = bits;
}

// How far one warp has followed the keys.
struct KeyFollower {
  int kind = kNoKey;  // Of the next tile whose places it leaves, and of the one behind it.
  int next_kind = kNoKey;
  const std::byte* page = nullptr;
};

__device__ __forceinline__ void StartFollowing(const DeviceAttention& args, const RowKeys& keys,
                                               int tile, KeyFollower& follower) {
  follower.kind = KindOf(args, keys, tile);
  follower.next_kind = KindOf(args, keys, tile + 1);
  follower.page = PageOfKey(args, keys, follower.kind);
}

template <typename Shape>
__device__ __forceinline__ void FollowKeys(const DeviceAttention& args, const RowKeys& keys,
                                           int tile, Shared<Shape>& shared, KeyFollower& follower) {
  LeavePlaces(args, keys, follower.kind, follower.page, shared.place[tile % 2],
              &shared.valid[tile % 4]);
  follower.kind = follower.next_kind;
  follower.page = PageOfKey(args, keys, follower.kind);
  follower.next_kind = KindOf(args, keys, tile + 2);
}

// By all threads: copies of a tile's keys. Keys without a place become zero.
template <typename Shape>
__device__ __forceinline__ void FetchTile(const DeviceAttention& args, const Place (&places)[kTile],
                                          int stage, Shared<Shape>& shared) {
  constexpr int kThreadsPerKey = Shape::kThreads / kTile;
  constexpr int kChunks = kEntryBytes / 16;
  const int thread = ThreadOf<Shape>();
  const int key = thread / kThreadsPerKey;
  const int piece = thread % kThreadsPerKey;
  const Place place = places[key];
  const bool has_bytes = place.data != nullptr;
  if (!has_bytes && place.scale != nullptr) return;  // Its bytes come from elsewhere.
  const void* data = has_bytes ? static_cast<const void*>(place.data) : args.q;
  const int bytes = has_bytes ? 16 : 0;
  unsigned char* to = shared.tile[stage] + key / 8 * kEightBytes;
  const int step = has_bytes ? 16 : 0;
#pragma unroll
  for (int first = 0; first < kChunks; first += kThreadsPerKey) {
    const int chunk = first + piece;
    if (first + kThreadsPerKey > kChunks && chunk >= kChunks) break;
    CopyAsync16(to + TileOffset(key % 8, chunk),
                static_cast<const unsigned char*>(data) + step * chunk, bytes);
  }
  if (piece == kThreadsPerKey - 1) {  // It has fewer pieces than the first ones.
    CopyAsyncSmall<8>(shared.scales[stage][key],
                      has_bytes ? static_cast<const void*>(place.scale) : args.q, bytes / 2);
  }
}

// Block `block` of the row that a decode step adds, as the piece of an entry that it is: the lane's
// two channels, and the scale's byte.
struct AddedBlock {
  uint32_t words = 0;  // Two bf16 values, or two codes in the low half.
  std::byte scale = std::byte{0};
};
__device__ __forceinline__ AddedBlock EncodeBlock(float2 x, int block) {
  AddedBlock out;
  if (block == kNumBlocks - 1) {
    out.words = Bf16Pair(x.x, x.y);
    return out;
  }
  const float largest = fmaxf(fabsf(x.x), fabsf(x.y));
  const int exponent =
      Fp8ScaleExponent(__uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(largest))));
  const float inverse = PowerOfTwo(-exponent);
  out.words = E4m3Codes(x.x * inverse, x.y * inverse, 0.0f, 0.0f);
  out.scale = static_cast<std::byte>(exponent + 127);
  return out;
}
__device__ __forceinline__ void StoreBlock(const AddedBlock& block, bool is_bf16, void* data) {
  if (is_bf16) {
    *static_cast<uint32_t*>(data) = block.words;
  } else {
    *static_cast<uint16_t*>(data) = static_cast<uint16_t>(block.words);
  }
}

// The warp's blocks of the row that a decode step adds, two channels a lane.
template <typename Shape>
struct AddedRow {
  static constexpr int kBlocks = (kNumBlocks + Shape::kWarps - 1) / Shape::kWarps;
  float2 x[kBlocks];
};
template <typename Shape>
__device__ __forceinline__ void LoadAddedRow(const DeviceAttention& args, const RowKeys& keys,
                                             AddedRow<Shape>& row) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  if (AddedTile(keys) < 0) return;
  const float* x = args.chunk_kv + int64_t{keys.first_row} * args.kv_stride;
#pragma unroll
  for (int i = 0; i < AddedRow<Shape>::kBlocks; ++i) {
    const int block = warp + i * Shape::kWarps;
    if (block >= kNumBlocks) continue;
    row.x[i] = *reinterpret_cast<const float2*>(x + block * kKvNopeBlock + 2 * FreshLane());
  }
}

// Encodes it: to the tile where it is a key if that is on its way already, else to where
// CopyAddedRow finds it, and, if it is this block's to `commit`, to the ring.
template <typename Shape>
__device__ __forceinline__ void EncodeAddedRow(const DeviceAttention& args, const RowKeys& keys,
                                               const AddedRow<Shape>& row, bool commit,
                                               Shared<Shape>& shared) {
  const int lane = FreshLane();
  const int tile = AddedTile(keys);
  if (tile < 0) return;
  const int key = (keys.num_window - 1) % kTile;
  const int slot = SlotOf(args, keys, keys.num_window - 1);
  auto* state = const_cast<std::byte*>(keys.state);
#pragma unroll
  for (int i = 0; i < AddedRow<Shape>::kBlocks; ++i) {
    const int block = static_cast<int>(threadIdx.x) / kWarpLanes + i * Shape::kWarps;
    if (block >= kNumBlocks) continue;
    const bool is_bf16 = block == kNumBlocks - 1;
    const AddedBlock encoded = EncodeBlock(row.x[i], block);
    const int at = kKvNopeBlock * block + (is_bf16 ? 4 : 2) * lane;
    unsigned char* data = reinterpret_cast<unsigned char*>(shared.added_data) + at;
    std::byte* scale = shared.added_scale;
    if (tile < kStages) {
      data = shared.tile[tile] + key / 8 * kEightBytes + TileOffset(key % 8, at / 16) + at % 16;
      scale = shared.scales[tile][key];
    }
    StoreBlock(encoded, is_bf16, data);
    if (lane == 0) scale[block] = encoded.scale;
    if (!commit) continue;
    StoreBlock(encoded, is_bf16, EntryData(args.window_plane, state, slot) + at);
    if (lane == 0) EntryScale(args.window_plane, state, slot)[block] = encoded.scale;
  }
}

// Puts the encoded row into its tile.
template <typename Shape>
__device__ __forceinline__ void CopyAddedRow(const RowKeys& keys, int stage,
                                             Shared<Shape>& shared) {
  const int key = (keys.num_window - 1) % kTile;
  const int chunk = static_cast<int>(threadIdx.x);
  if (chunk < kEntryBytes / 16) {
    unsigned char* to = shared.tile[stage] + key / 8 * kEightBytes + TileOffset(key % 8, chunk);
    *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4*>(shared.added_data)[chunk];
  } else if (chunk == kEntryBytes / 16) {
    *reinterpret_cast<uint2*>(shared.scales[stage][key]) =
        *reinterpret_cast<const uint2*>(shared.added_scale);
  }
}

}  // namespace isthmus::kernels::attention_mma
