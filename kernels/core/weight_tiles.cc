// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/weight_tiles.h"

#include "services/base/check.h"

namespace isthmus::kernels {

namespace {

// Writes a code where the tile has zeros.
void AddFp4(WeightLayout layout, int r, int k, unsigned code, uint8_t* tile) {
  if (layout == WeightLayout::kMmaTiles) {
    uint8_t& pair = tile[ByteInTile(WeightFormat::kMxfp4, r, k)];
    pair = static_cast<uint8_t>(pair | code << (r >= 8 ? 4 : 0));
    return;
  }
  const F16CodePlace place = F16CodeInTile(r, k);
  const unsigned half = (code >> 3) << place.sign | (code & 7) << place.magnitude;
  tile[place.byte] = static_cast<uint8_t>(tile[place.byte] | (half & 0xff));
  tile[place.byte + 1] = static_cast<uint8_t>(tile[place.byte + 1] | half >> 8);
}

}  // namespace

WeightView TileWeight(const WeightView& w, std::byte* tiles_out, WeightLayout layout) {
  ISTHMUS_CHECK(w.layout == WeightLayout::kRowMajor && IsTiled(layout));
  std::memset(tiles_out, 0, static_cast<size_t>(TiledBytes(w)));
  WeightView out = w;
  out.layout = IsFp4(w.format) ? layout : WeightLayout::kMmaTiles;
  out.elements = tiles_out;
  if (IsFp4(w.format)) out.scales = nullptr;
  const auto* from = static_cast<const uint8_t*>(w.elements);
  auto* to = reinterpret_cast<uint8_t*>(tiles_out);
  const int64_t width = w.format == WeightFormat::kF32    ? 4
                        : w.format == WeightFormat::kBf16 ? 2
                                                          : 1;
  const int64_t group = ScaleGroup(w.format);
  for (int64_t n = 0; n < w.rows; ++n) {
    const int64_t r = n % kPanelRows;
    for (int64_t k = 0; k < w.cols; ++k) {
      uint8_t* tile = to + (TileOf(out, n, k) - static_cast<const uint8_t*>(out.elements));
      if (!IsFp4(w.format)) {
        std::memcpy(tile + ByteInTile(w.format, r, k % TileCols(w.format)),
                    from + (n * w.cols + k) * width, static_cast<size_t>(width));
        continue;
      }
      const unsigned code = from[n * (w.cols / 2) + k / 2] >> (4 * (k % 2)) & 15;
      AddFp4(out.layout, static_cast<int>(r), static_cast<int>(k % 64), code, tile);
      if (k % group == 0) {
        tile[ScaleInTile(w.format, r, k % TileCols(w.format))] =
            w.scales[n * ScaleColumns(w) + ScaleColumn(w, k)];
      }
    }
  }
  return out;
}

}  // namespace isthmus::kernels
