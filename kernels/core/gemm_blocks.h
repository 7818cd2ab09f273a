// SPDX-License-Identifier: Apache-2.0
// Blocks of a weight as the loops of gemm-inl.h read them: one panel of 16 outputs by up to 128
// inputs. Panels are found where they lie; rows are transposed into scratch first, so that one loop
// serves both layouts. Internal to gemm.cc.
#pragma once

#include <cstdint>

#include "kernels/core/gemm.h"
#include "kernels/core/tensor.h"
#include "kernels/core/weight.h"

namespace isthmus::kernels {

inline constexpr int64_t kBlockK = 128;       // Inputs per block: one fp8 group, 8 KB of f32 panel.
inline constexpr int64_t kMaxGroups = 8;      // Groups per block: 128 / 16.
inline constexpr int64_t kStreamedRows = 32;  // Up to here as well as kFusedRows, given registers.
inline constexpr int64_t kFusedPanels = 4;    // Panels side by side then, to hide latency.
inline constexpr int64_t kTilePanels = 2;     // Panels of one register tile (AVX2 uses one).
inline constexpr int64_t kTilesPerBlock = 16;  // Tiles that share one decoded panel block.

struct PanelBlock {
  const uint8_t* elements = nullptr;  // [kn][16] units, as stored
  const uint8_t* scales = nullptr;    // [groups * scale_stride][16] bytes
};

// Scratch of one thread.
struct alignas(64) GemmScratch {
  float panels[kTilePanels][kBlockK * kPanelRows];     // Decoded elements [k][16].
  float scales[kTilePanels][kMaxGroups * kPanelRows];  // Decoded scales [group][16].
  float totals[kTilesPerBlock * kMaxTileRows * kTilePanels * kPanelRows];
  uint8_t elements[kFusedPanels][kBlockK * kPanelRows * 4];  // Transposed rows.
  uint8_t scale_bytes[kFusedPanels][kMaxGroups * kPanelRows];
};

// Stored scales per summed group.
inline int64_t ScaleStride(const WeightView& w) { return w.is_mxfp4_cast ? 2 : 1; }

// Inputs of the block that begins at k0: up to the next multiple of kBlockK of the stored matrix,
// so that a block has one fp8 scale wherever the view was cut.
inline int64_t BlockInputs(const WeightView& w, int64_t k0) {
  const int64_t whole = kBlockK - (w.first_col + k0) % kBlockK;
  return whole < w.cols - k0 ? whole : w.cols - k0;
}

// Block [k0, k0 + kn) of panel `panel`, kn = BlockInputs(w, k0). `slot` picks the scratch that rows
// are transposed into.
PanelBlock LocateBlock(const WeightView& w, int64_t panel, int64_t k0, int64_t kn, int64_t slot,
                       GemmScratch* scratch);

// One product, cut into items of about equal work. Any cut gives the same bits.
struct GemmPlan {
  MatrixView x;
  WeightView w;
  MatrixView out;
  bool rounds = false;        // To the bf16 grid, as sums are stored.
  float* packed_x = nullptr;  // [tiles][K][tile rows], zero rows at the end; fused: null.
  int64_t tile_rows = 0;
  int64_t panels = 0;
  int64_t panels_per_item = 1;
  int64_t panel_items = 0;
  int64_t row_blocks = 1;
  int64_t first_item = 0;  // Of this product among the items of all products.
  int64_t first_tile = 0;  // Among the tiles that are packed.
};

}  // namespace isthmus::kernels
