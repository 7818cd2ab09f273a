// SPDX-License-Identifier: Apache-2.0
// How attention's prefill kernel (attention_prefill.cu) finds a row's keys and turns them into
// a tile of bf16 in shared memory. A key goes four steps, each some tiles ahead of the next, so
// that no step waits for memory: what it is (kind), its page's address, where it lies (Source), its
// bytes as stored (raw). Then the threads that copied the bytes widen them, scale and all, which is
// exact: a code has four significant bits.
//
// Letters: p a piece of 16 stored bytes of a key, of those that a thread takes; j a chunk of eight
// bf16 channels in the tile.
#pragma once

#include "kernels/attention/attention_device.cuh"
#include "kernels/core/async_copy.cuh"
#include "kernels/core/pairs.cuh"

namespace isthmus::kernels::attention_prefill {

inline constexpr int kHeadDim = 512;
inline constexpr int kNope = 448;
inline constexpr int kEntryBytes = 576;
inline constexpr int kScaleBytes = 8;
inline constexpr int kChunkEntryBytes = kEntryBytes + 16;  // A row of this step: data, then scales.
inline constexpr int kTile = 32;                           // Keys.
inline constexpr int kPieces = kEntryBytes / 16;
inline constexpr int kNopePieces = kNope / 16;
inline constexpr int kChunks = kHeadDim / 8;
inline constexpr int kPiecesAtOnce = 8;  // Threads of a key, a piece each.
inline constexpr int kKeysOfWarp = kWarpLanes / kPiecesAtOnce;

// Tiles from a step to the use of the key; what one tile's work has fetched is there at the next.
inline constexpr int kKindsAhead = 3;
inline constexpr int kPagesAhead = 2;
inline constexpr int kKindTiles = 4;  // A kind serves until its tile is done.

// What a key is: an entry (0 and up), nothing, or, downwards, a slot of the ring and then a row of
// the sequence's chunk.
inline constexpr int kNoKey = -1;
inline constexpr int kFirstSlot = -2;

struct Source {
  const std::byte* data;  // Null: no key.
  const std::byte* scale;
};

struct KeyQueue {
  Source source[kTile];
  const std::byte* page[kTile];
  alignas(16) unsigned char raw[kTile][kEntryBytes];
  alignas(8) unsigned char scales[kTile][kScaleBytes];
  int kind[kKindTiles][kTile];
};

// A row and its keys: the window in order of position, then entries.
struct RowKeys {
  const DeviceSequence* sequence;
  const int32_t* selected;             // Of this row, or null.
  const unsigned char* chunk_entries;  // [rows][kChunkEntryBytes]
  int first_position;                  // Of the window.
  int num_window;
  int num_keys;
};

// The kind of the lane's key of `tile`, to arrive in the queue.
__device__ __forceinline__ void FetchKind(const DeviceAttention& args, const RowKeys& keys,
                                          KeyQueue& queue, int tile) {
  const int lane = FreshLane();
  const int k = tile * kTile + lane;
  int& kind = queue.kind[tile % kKindTiles][lane];
  if (k >= keys.num_keys) {
    kind = kNoKey;
  } else if (k < keys.num_window) {
    const int position = keys.first_position + k;
    const int chunk_row = position - keys.sequence->start_position;
    kind = kFirstSlot - (chunk_row < 0 ? position % args.window : args.window + chunk_row);
  } else if (keys.selected != nullptr) {
    CopyAsyncSmall<4>(&kind, keys.selected + k - keys.num_window);
  } else {
    kind = k - keys.num_window;
  }
}

// The address that the lane's key is counted from, when its kind has arrived.
__device__ __forceinline__ void FetchPage(const DeviceAttention& args, const RowKeys& keys,
                                          KeyQueue& queue, int tile) {
  const int lane = FreshLane();
  const int kind = queue.kind[tile % kKindTiles][lane];
  const std::byte*& page = queue.page[lane];
  const int chunk_row = kFirstSlot - kind - args.window;
  if (kind >= 0) {
    const unsigned number =
        static_cast<unsigned>(kind) / static_cast<unsigned>(args.entry_plane.entries);
    CopyAsyncSmall<8>(&page, keys.sequence->pages[args.entry_kind] + number);
  } else if (chunk_row >= 0) {
    const int64_t row = int64_t{keys.sequence->first_row} + chunk_row;
    page = reinterpret_cast<const std::byte*>(keys.chunk_entries + row * kChunkEntryBytes);
  } else {
    page = keys.sequence->state;
  }
}

// Where the lane's key lies, when its page has arrived.
__device__ __forceinline__ void FindSource(const DeviceAttention& args, KeyQueue& queue, int tile) {
  const int lane = FreshLane();
  const int kind = queue.kind[tile % kKindTiles][lane];
  const std::byte* page = queue.page[lane];
  Source source = {nullptr, nullptr};
  const int slot = kFirstSlot - kind;
  if (kind < 0 && slot >= args.window) {
    source = {page, page + kEntryBytes};
  } else if (kind != kNoKey) {
    const EntryPlane& plane = kind >= 0 ? args.entry_plane : args.window_plane;
    const unsigned entry =
        kind >= 0 ? static_cast<unsigned>(kind) % static_cast<unsigned>(args.entry_plane.entries)
                  : static_cast<unsigned>(slot);
    source = {page + plane.data_offset + int64_t{entry} * kEntryBytes,
              page + plane.scale_offset + int64_t{entry} * kScaleBytes};
  }
  queue.source[lane] = source;
}

// Starts the copies of the thread's pieces of the keys that have sources; thread kPiecesAtOnce *
// key + p of `kThreads`.
// Keys that are none become zero.
template <int kThreads>
__device__ __forceinline__ void FetchRaw(const DeviceAttention& args, KeyQueue& queue) {
  // Read anew: places that are kept over the loop over tiles cost registers.
  const int lane = FreshLane();
  const int p = lane % kPiecesAtOnce;
  const int of_warp = static_cast<int>(threadIdx.x) / kWarpLanes * kKeysOfWarp;
#pragma unroll
  for (int i = 0; i < kTile * kPiecesAtOnce / kThreads; ++i) {
    const int key = of_warp + lane / kPiecesAtOnce + i * kThreads / kPiecesAtOnce;
    const Source source = queue.source[key];
    const bool is_key = source.data != nullptr;
    const void* none = args.q;
    unsigned char* raw = queue.raw[key] + 16 * p;
    const std::byte* from = source.data + 16 * p;
    if (p == 0) {
      CopyAsyncSmall<8>(queue.scales[key], is_key ? source.scale : none, is_key ? 8 : 0);
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; piece += kPiecesAtOnce) {
      if (piece + p >= kPieces) break;
      CopyAsync16(raw + 16 * piece, is_key ? from + 16 * piece : none, is_key ? 16 : 0);
    }
  }
}

// Chunks j of a tile's key: those of a slice of 128 channels lie together, sixteen of them, so that
// the first eight are the low halves of eight pieces and the others the high ones. Pieces of bf16
// are a chunk each. The first channel of chunk 16 * slice + j:
__device__ __forceinline__ int ChunkChannel(int slice, int j) {
  const int p = j % kPiecesAtOnce;
  const int half = j / kPiecesAtOnce;
  return slice == 3 && p >= 4 ? kNope + 32 * half + 8 * (p - 4) : 128 * slice + 16 * p + 8 * half;
}

// Eight keys that a matrix load reads lie in different banks.
__device__ __forceinline__ uint4* ChunkAt(uint4 (*tile)[kChunks], int key, int j) {
  return &tile[key][j ^ (key & 7)];
}

// The bf16 values of two e4m3 codes given as f16, times 2^112 * `factor`, a pair of powers of two.
__device__ __forceinline__ uint32_t WidenPair(uint32_t f16, uint32_t factor) {
  return MultiplyBf16Pair((f16 & 0x80008000u) | (f16 >> 3 & 0x0fff0fffu), factor);
}

__device__ __forceinline__ uint32_t PowerPair(int exponent_bits) {
  return static_cast<uint32_t>(exponent_bits) << 23 | static_cast<uint32_t>(exponent_bits) << 7;
}

// Sixteen codes to two chunks.
__device__ __forceinline__ void WidenPiece(const uint4& codes, int scale, uint4* low, uint4* high) {
  constexpr int kMostScale = 142;  // 2^(142 + 112 - 127) is the largest power of two in bf16.
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const uint32_t factor = PowerPair(min(scale, kMostScale) + 112);
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t first, second;
    F16PairsOfE4m3(words[i], first, second);
    pairs[2 * i] = WidenPair(first, factor);
    pairs[2 * i + 1] = WidenPair(second, factor);
  }
  if (scale > kMostScale) {
    const uint32_t rest = PowerPair(scale - kMostScale + 127);
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = MultiplyBf16Pair(pairs[i], rest);
  }
  *low = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  *high = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// The thread's pieces, those of FetchRaw, to the tile of bf16. After its copies have arrived and a
// __syncwarp.
template <int kThreads>
__device__ __forceinline__ void WidenKeys(const KeyQueue& queue, uint4 (*tile)[kChunks]) {
  // Read anew: places that are kept over the loop over tiles cost registers.
  const int lane = FreshLane();
  const int p = lane % kPiecesAtOnce;
  const int of_warp = static_cast<int>(threadIdx.x) / kWarpLanes * kKeysOfWarp;
#pragma unroll
  for (int i = 0; i < kTile * kPiecesAtOnce / kThreads; ++i) {
    const int key = of_warp + lane / kPiecesAtOnce + i * kThreads / kPiecesAtOnce;
    const unsigned char* raw = queue.raw[key] + 16 * p;
    const unsigned char* scales = queue.scales[key] + p / 4;
#pragma unroll
    for (int slice = 0; slice < 4; ++slice) {
      const uint4 piece = *reinterpret_cast<const uint4*>(raw + 128 * slice);
      uint4* low = ChunkAt(tile, key, 16 * slice + p);
      uint4* high = ChunkAt(tile, key, 16 * slice + 8 + p);
      if (slice < 3 || p < 4) {
        WidenPiece(piece, scales[2 * slice], low, high);
      } else {  // bf16: this piece, and of the last four the one that thread p - 4 has copied.
        *low = piece;
      }
    }
    if (p < 4) {
      *ChunkAt(tile, key, 16 * 3 + 12 + p) = *reinterpret_cast<const uint4*>(raw + 128 * 4);
    }
  }
}

}  // namespace isthmus::kernels::attention_prefill
