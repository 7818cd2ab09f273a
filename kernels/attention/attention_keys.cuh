// SPDX-License-Identifier: Apache-2.0
// How attention's tensor-core kernel finds the keys of a row and brings them to shared memory, a
// tile at a time and a warp its own slice (attention_mma.cuh). Lane l of each warp follows key l of
// a tile through KeyQueue: what it is, then its page's address, then its bytes, each one tile ahead
// of the next and all of it with asynchronous copies, so that no warp waits for a chain of loads
// and none of it takes registers.
#pragma once

#include "kernels/attention/attention_mma.cuh"

namespace isthmus::kernels::attention_mma {

// What a key is: an entry (0 and up), nothing, the row that a decode step adds, or, downwards, a
// slot of the ring and then a row of the sequence's chunk.
inline constexpr int kNoKey = -1;
inline constexpr int kAddedRow = -2;
inline constexpr int kFirstSlot = -3;

// The calling lane's key of a tile.
__device__ __forceinline__ int& KindIn(KeyQueue& queue, int tile) {
  return queue.kind[tile % kKindTiles][threadIdx.x];
}

// First step: what the lane's key of `tile` is.
__device__ __forceinline__ void FetchKind(const DeviceAttention& args, const RowKeys& keys,
                                          KeyQueue& queue, int tile) {
  const int k = tile * kTile + FreshLane();
  int& kind = KindIn(queue, tile);
  if (k >= keys.num_keys) {
    kind = kNoKey;
  } else if (k >= keys.num_window) {
    const int j = k - keys.num_window;
    if (keys.selected != nullptr) {
      CopyAsyncSmall<4>(&kind, keys.selected + j);
    } else {
      kind = j;
    }
  } else {
    const int position = keys.first_position + k;
    const int chunk_row = position - keys.sequence->start_position;
    kind = chunk_row < 0                   ? kFirstSlot - position % args.window
           : keys.chunk_entries != nullptr ? kFirstSlot - args.window - chunk_row
                                           : kAddedRow;
  }
}

// Second step, when the first has arrived: the address that the key's bytes are counted from.
__device__ __forceinline__ void FetchPage(const DeviceAttention& args, const RowKeys& keys,
                                          KeyQueue& queue, int tile) {
  const int kind = KindIn(queue, tile);
  const std::byte*& page = queue.page[tile % 2][threadIdx.x];
  if (kind >= 0) {
    const unsigned number =
        static_cast<unsigned>(kind) / static_cast<unsigned>(args.entry_plane.entries);
    CopyAsyncSmall<8>(&page, keys.sequence->pages[args.entry_kind] + number);
  } else if (kFirstSlot - kind >= args.window) {
    const int64_t row = int64_t{keys.sequence->first_row} + kFirstSlot - kind - args.window;
    page = reinterpret_cast<const std::byte*>(keys.chunk_entries + row * kChunkEntryBytes);
  } else {
    page = keys.sequence->state;
  }
}

// A bit for each key of the tile that is one.
__device__ __forceinline__ uint32_t ValidKeys(KeyQueue& queue, int tile) {
  return __ballot_sync(kFullWarp, KindIn(queue, tile) != kNoKey ? 1 : 0);
}

// Where the lane's key lies, when the second step has arrived; null when there is nothing to copy.
struct Place {
  const std::byte* data = nullptr;
  const std::byte* scale = nullptr;
};

__device__ __forceinline__ Place PlaceOf(const DeviceAttention& args, KeyQueue& queue, int tile) {
  const int kind = KindIn(queue, tile);
  const std::byte* page = queue.page[tile % 2][threadIdx.x];
  if (kind < 0 && kind > kFirstSlot) return {};
  const int slot = kFirstSlot - kind;
  if (kind < 0 && slot >= args.window) return {page, page + kEntryBytes};
  const EntryPlane& plane = kind >= 0 ? args.entry_plane : args.window_plane;
  const unsigned entry =
      kind >= 0 ? static_cast<unsigned>(kind) % static_cast<unsigned>(args.entry_plane.entries)
                : static_cast<unsigned>(slot);
  return {page + plane.data_offset + int64_t{entry} * kEntryBytes,
          page + plane.scale_offset + int64_t{entry} * kScaleBytes};
}

// Third step: the warp's slice of a tile, and the scales of the lane's key. Keys without a place
// become zero.
__device__ __forceinline__ void FetchSlice(const DeviceAttention& args, KeyQueue& queue, int tile,
                                           unsigned char* to) {
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const Place place = PlaceOf(args, queue, tile);
  const auto source = reinterpret_cast<uintptr_t>(place.data != nullptr ? place.data : args.q);
  const int bytes = place.data != nullptr ? 16 : 0;
  CopyAsyncSmall<8>(queue.scales[tile % 2][threadIdx.x],
                    place.data != nullptr ? place.scale : args.q, bytes / 2);
  const auto copy = [&](int key, int chunk, int offset) {
    const auto from = __shfl_sync(kFullWarp, static_cast<unsigned long long>(source), key);
    const int valid = __shfl_sync(kFullWarp, bytes, key);
    CopyAsync16(to + offset, reinterpret_cast<const unsigned char*>(from) + 16 * chunk, valid);
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
}

// The exponents of the scales of the warp's two blocks of the lane's key; those of 1 when there is
// no key, or no scale.
struct Exponents {
  int of[2] = {0, 0};
};
__device__ __forceinline__ Exponents ExponentsOf(const std::byte* scales) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int both = reinterpret_cast<const uint16_t*>(scales)[warp];
  return {{(both & 0xff) - 127, warp == kBf16Warp ? 0 : (both >> 8) - 127}};
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

// Puts the warp's slice of the added row where a tile has key `key`.
__device__ __forceinline__ void CopyAddedRow(const AddedRow& row, int key, unsigned char* tile) {
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int chunk = kSliceChunks * warp + lane;
  if (lane < (warp == kBf16Warp ? kSliceChunks + 4 : kSliceChunks)) {
    unsigned char* to = tile + key / 8 * kEightBytes + TileOffset(key % 8, chunk);
    *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4*>(row.data)[chunk];
  }
}

}  // namespace isthmus::kernels::attention_mma
