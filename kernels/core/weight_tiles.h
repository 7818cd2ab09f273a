// SPDX-License-Identifier: Apache-2.0
// WeightLayout::kMmaTiles: a weight matrix [N, K] as tensor cores read it, weights on the M axis.
//
// Tiles of 16 outputs x 8 (f32), 16 (bf16), 32 (fp8) or 64 (fp4) inputs, [ceil(N / 16)][ceil(K /
// TileCols)], TileBytes apart; outputs and inputs beyond the matrix are zero bytes. A tile is 32
// lanes x 16 bytes: lane 4 g + t holds its words of the A fragment, so that one 16-byte load a lane
// feeds an mma.sync m16n8 of k8 (tf32), k16 (bf16), k32 (fp8). With row r = g or g + 8:
//
//   f32   word (r >= 8) + 2 (k >= 4),   t = k mod 4
//   bf16  word (r >= 8) + 2 (k >= 8),   t = (k mod 8) / 2,  half k mod 2
//   fp8   word (r >= 8) + 2 (k >= 16),  t = (k mod 16) / 4, byte k mod 4
//   fp4   two k32 steps, s = k / 32, j = k mod 32: word 2 s + (j >= 16), t = (j mod 16) / 4, byte
//         j mod 4; row g in the low nibble, row g + 8 in the high one. So of word 2 s + h, the low
//         nibbles become register 2 h of the step's fragment and the high ones register 2 h + 1.
//
// An fp4 code (seem) placed in a byte as s00eem00 is the e4m3 number of its value times 2^-6, zeros
// and subnormals included: two masks and shifts, no table.
//
// kMmaTilesF16 is for tensor cores that multiply f16, and the same but for the eight codes of a
// word, so that each register of the fragment takes few operations. Half j mod 2 of the word holds
//
//   row g,     j mod 4 < 2: sign bit 15, eem bits 11-9      row g,     j mod 4 >= 2: 14 and 5-3
//   row g + 8, j mod 4 < 2: sign bit 12, eem bits 8-6       row g + 8, j mod 4 >= 2: 13 and 2-0
//
// Moved to where those of the first are, they are the f16 of 2^-14 their values, subnormals
// included; the four registers, in the order of this table's columns, are inputs 4 t to 4 t + 3 of
// a step of 16.
//
// fp4 scales follow the 512 bytes of codes inside the tile, so that a run of tiles is one copy:
//   kMxfp4  byte 4 g + 2 (r >= 8) + k / 32   (ue8m0)
//   kNvfp4  byte 8 g + 4 (r >= 8) + k / 16   (e4m3)
// fp8 scales stay in the file's layout, [blocks of rows][blocks of columns], behind `scales`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/core/exec.h"
#include "kernels/core/formats.h"
#include "kernels/core/weight.h"

namespace isthmus::kernels {

inline constexpr int64_t kTileCodeBytes = 512;

ISTHMUS_HOST_DEVICE inline int64_t TilesInRow(const WeightView& w) {
  return (w.cols + TileCols(w.format) - 1) / TileCols(w.format);
}
ISTHMUS_HOST_DEVICE inline int64_t TiledBytes(const WeightView& w) {
  return (w.rows + kPanelRows - 1) / kPanelRows * TilesInRow(w) * TileBytes(w.format);
}

// Of row r and input k inside a tile: the byte, counted from the tile's start.
ISTHMUS_HOST_DEVICE inline int64_t ByteInTile(WeightFormat format, int64_t r, int64_t k) {
  const int64_t g = r % 8;
  const int64_t high = r / 8;
  int64_t t = 0;
  int64_t word = 0;
  int64_t byte = 0;
  if (format == WeightFormat::kF32) {
    t = k % 4;
    word = high + 2 * (k / 4);
  } else if (format == WeightFormat::kBf16) {
    t = k % 8 / 2;
    word = high + 2 * (k / 8);
    byte = 2 * (k % 2);
  } else if (format == WeightFormat::kFp8Block128) {
    t = k % 16 / 4;
    word = high + 2 * (k / 16);
    byte = k % 4;
  } else {
    t = k % 16 / 4;
    word = k / 16;
    byte = k % 4;
  }
  return (4 * g + t) * 16 + 4 * word + byte;
}
// Where kMmaTilesF16 has the code of row r and input k: which half of the lane's words, counted
// from the tile's start in bytes, and the places of its sign and of the lowest bit of eem.
struct F16CodePlace {
  int byte, sign, magnitude;
};
ISTHMUS_HOST_DEVICE inline F16CodePlace F16CodeInTile(int r, int k) {
  const int field = r / 8 + k % 4 / 2 * 2;
  const int sign = field == 0 ? 15 : field == 1 ? 12 : field == 2 ? 14 : 13;
  return {(4 * (r % 8) + k % 16 / 4) * 16 + k / 16 * 4 + k % 2 * 2, sign, 9 - 3 * field};
}
// The fp4 code of row r and input k of a tile in either layout.
ISTHMUS_HOST_DEVICE inline uint8_t Fp4InTile(WeightLayout layout, const uint8_t* tile, int r,
                                             int k) {
  if (layout == WeightLayout::kMmaTiles) {
    return tile[ByteInTile(WeightFormat::kMxfp4, r, k)] >> (r >= 8 ? 4 : 0) & 15;
  }
  const F16CodePlace place = F16CodeInTile(r, k);
  const unsigned half = *reinterpret_cast<const uint16_t*>(tile + place.byte);
  return static_cast<uint8_t>((half >> place.sign & 1) << 3 | (half >> place.magnitude & 7));
}
// Of an fp4 tile: the scale's byte.
ISTHMUS_HOST_DEVICE inline int64_t ScaleInTile(WeightFormat format, int64_t r, int64_t k) {
  if (format == WeightFormat::kMxfp4) return kTileCodeBytes + 4 * (r % 8) + 2 * (r / 8) + k / 32;
  return kTileCodeBytes + 8 * (r % 8) + 4 * (r / 8) + k / 16;
}
ISTHMUS_HOST_DEVICE inline const uint8_t* TileOf(const WeightView& w, int64_t n, int64_t k) {
  const int64_t tile = n / kPanelRows * TilesInRow(w) + k / TileCols(w.format);
  return static_cast<const uint8_t*>(w.elements) + tile * TileBytes(w.format);
}

// The element (n, k) without its scale, and its scale (1 where the format has none; without
// global_scale). Row-major and tiled layouts. For trusted kernels and for checks: slow.
ISTHMUS_HOST_DEVICE inline float WeightElement(const WeightView& w, int64_t n, int64_t k) {
  const bool tiled = IsTiled(w.layout);
  const auto* bytes = static_cast<const uint8_t*>(w.elements);
  if (IsFp4(w.format)) {
    if (!tiled) {
      return Fp4E2m1Value(static_cast<uint8_t>(bytes[n * (w.cols / 2) + k / 2] >> (4 * (k % 2))));
    }
    const auto r = static_cast<int>(n % kPanelRows);
    return Fp4E2m1Value(Fp4InTile(w.layout, TileOf(w, n, k), r, static_cast<int>(k % 64)));
  }
  const int64_t width = w.format == WeightFormat::kF32    ? 4
                        : w.format == WeightFormat::kBf16 ? 2
                                                          : 1;
  const uint8_t* p =
      tiled ? TileOf(w, n, k) + ByteInTile(w.format, n % kPanelRows, k % TileCols(w.format))
            : bytes + (n * w.cols + k) * width;
  if (w.format == WeightFormat::kF32) return *reinterpret_cast<const float*>(p);
  if (w.format == WeightFormat::kBf16) return Bf16Value(*reinterpret_cast<const uint16_t*>(p));
  return Fp8E4m3Value(*p);
}
ISTHMUS_HOST_DEVICE inline float WeightScale(const WeightView& w, int64_t n, int64_t k) {
  if (w.format == WeightFormat::kFp8Block128) {
    return Ue8m0Value(w.scales[(w.first_row + n) / 128 * ScaleColumns(w) + ScaleColumn(w, k)]);
  }
  if (!IsFp4(w.format)) return 1.0f;
  const uint8_t scale =
      IsTiled(w.layout)
          ? TileOf(w, n, k)[ScaleInTile(w.format, n % kPanelRows, k % TileCols(w.format))]
          : w.scales[n * ScaleColumns(w) + ScaleColumn(w, k)];
  return w.format == WeightFormat::kMxfp4 ? Ue8m0Value(scale) : Fp8E4m3Value(scale);
}

// How the GPUs of an architecture want the tiles of a format.
inline WeightLayout TileLayout(WeightFormat format, int arch) {
  return IsFp4(format) && arch < kArchSm120 ? WeightLayout::kMmaTilesF16 : WeightLayout::kMmaTiles;
}

// Writes the tiles of `row_major` (host memory) to `tiles_out` (TiledBytes, aligned to 16) and
// returns their view; fp8 scales stay those of `row_major`. The view owns nothing. `layout` is that
// of fp4: tiles of other formats are always kMmaTiles.
WeightView TileWeight(const WeightView& row_major, std::byte* tiles_out,
                      WeightLayout layout = WeightLayout::kMmaTiles);

}  // namespace isthmus::kernels
