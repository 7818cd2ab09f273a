// SPDX-License-Identifier: Apache-2.0
// How attention's tensor-core kernel finds the keys of a row and brings them to shared memory, a
// tile at a time and a warp its own slice (attention_mma.cuh). Lane l of each warp follows key l of
// a tile: what it is, then its page's address, then its bytes, each one tile ahead of the next, so
// that no warp waits for a chain of loads.
#pragma once

#include "kernels/attention/attention_mma.cuh"

namespace isthmus::kernels::attention_mma {

// What a key is: an entry (0 and up), nothing, the row that a decode step adds, or, downwards, a
// slot of the ring and then a row of the sequence's chunk.
inline constexpr int kNoKey = -1;
inline constexpr int kAddedRow = -2;
inline constexpr int kFirstSlot = -3;

__device__ __forceinline__ int KindOf(const DeviceAttention& args, const RowKeys& keys, int k) {
  if (k >= keys.num_keys) return kNoKey;
  if (k >= keys.num_window) {
    const int j = k - keys.num_window;
    return keys.selected != nullptr ? keys.selected[j] : j;
  }
  const int position = keys.first_position + k;
  const int chunk_row = position - keys.sequence->start_position;
  if (chunk_row < 0) return kFirstSlot - position % args.window;
  return keys.chunk_entries != nullptr ? kFirstSlot - args.window - chunk_row : kAddedRow;
}

// Where a key's bytes lie. No data: nowhere; then `scale` tells whether there is a key all the
// same.
struct Place {
  const std::byte* data = nullptr;
  int scale = 0;  // Relative to data.
};

__device__ __forceinline__ Place PlaceIn(const EntryPlane& plane, const std::byte* base,
                                         int entry) {
  return {base + plane.data_offset + int64_t{entry} * kEntryBytes,
          static_cast<int>(plane.scale_offset - plane.data_offset) +
              entry * (plane.scale_bytes - kEntryBytes)};
}

__device__ __forceinline__ Place PlaceOf(const DeviceAttention& args, const RowKeys& keys,
                                         int kind) {
  if (kind >= 0) {
    const auto entry = static_cast<unsigned>(kind);
    const auto per_page = static_cast<unsigned>(args.entry_plane.entries);
    return PlaceIn(args.entry_plane, keys.sequence->pages[args.entry_kind][entry / per_page],
                   static_cast<int>(entry % per_page));
  }
  if (kind > kFirstSlot) return {nullptr, kind == kAddedRow ? 1 : 0};
  const int slot = kFirstSlot - kind;
  if (slot < args.window) return PlaceIn(args.window_plane, keys.sequence->state, slot);
  const int64_t row = int64_t{keys.sequence->first_row} + slot - args.window;
  return {reinterpret_cast<const std::byte*>(keys.chunk_entries + row * kChunkEntryBytes),
          kEntryBytes};
}

// Starts the copies of the warp's slice of a tile, and of nothing for keys without a place, whose
// bytes become zero. One group.
__device__ __forceinline__ void CopySlice(const DeviceAttention& args, const Place& place,
                                          unsigned char* tile) {
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const auto source = reinterpret_cast<uintptr_t>(place.data != nullptr ? place.data : args.q);
  const int bytes = place.data != nullptr ? 16 : 0;
  const auto copy = [&](int key, int chunk, int offset) {
    const auto from = __shfl_sync(kFullWarp, static_cast<unsigned long long>(source), key);
    const int valid = __shfl_sync(kFullWarp, bytes, key);
    CopyAsync16(tile + offset, reinterpret_cast<const unsigned char*>(from) + 16 * chunk, valid);
  };
  const int chunk = kSliceChunks * warp + lane % 8;
  const int low = TileOffset(lane / 8, chunk);
  const int high = TileOffset(4 + lane / 8, chunk);
#pragma unroll
  for (int i = 0; i < kKeyTiles; ++i) {
    copy(8 * i + lane / 8, chunk, low + i * kEightBytes);
    copy(8 * i + 4 + lane / 8, chunk, high + i * kEightBytes);
  }
  if (warp == kBf16Warp) {
    const int last = kSliceChunks * kWarps + lane % 4;
    const int offset = TileOffset(lane / 4, last);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) copy(8 * i + lane / 4, last, offset + i * kEightBytes);
  }
  CommitCopies();
}

// The scale bytes of the warp's two blocks of the lane's key, above them a bit that there is a key.
inline constexpr uint32_t kHasKey = 0x10000;
__device__ __forceinline__ uint32_t LoadScales(const Place& place) {
  if (place.data == nullptr) return 0x7f7f | (place.scale != 0 ? kHasKey : 0);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  return *reinterpret_cast<const uint16_t*>(place.data + place.scale + 2 * warp) | kHasKey;
}

// Encodes the warp's slice of the row that a decode step adds, as the piece of an entry that it is,
// and, if it is this block's to `commit`, writes it to the ring.
__device__ __forceinline__ void EncodeAddedRow(const DeviceAttention& args,
                                               const DeviceSequence& sequence, bool commit,
                                               AddedRow* row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const float* x = args.chunk_kv + int64_t{sequence.first_row} * args.kv_stride;
  const int slot = sequence.start_position % args.window;
  std::byte* data = EntryData(args.window_plane, sequence.state, slot);
  std::byte* scale = EntryScale(args.window_plane, sequence.state, slot);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    EncodeKvBlock(x, kNope, 2 * warp + b, row->data, row->scale);
    if (commit) EncodeKvBlock(x, kNope, 2 * warp + b, data, scale);
  }
  if (warp == kBf16Warp && lane == 0) {
    row->scale[7] = std::byte{0};
    if (commit) scale[7] = std::byte{0};
  }
}

// Puts the warp's slice of the added row where a tile has key `key`. Returns what LoadScales would.
__device__ __forceinline__ uint32_t CopyAddedRow(const AddedRow& row, int key,
                                                 unsigned char* tile) {
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int chunk = kSliceChunks * warp + lane;
  if (lane < (warp == kBf16Warp ? kSliceChunks + 4 : kSliceChunks)) {
    unsigned char* to = tile + key / 8 * kEightBytes + TileOffset(key % 8, chunk);
    *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4*>(row.data)[chunk];
  }
  return reinterpret_cast<const uint16_t*>(row.scale)[warp] | kHasKey;
}

}  // namespace isthmus::kernels::attention_mma
