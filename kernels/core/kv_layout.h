// SPDX-License-Identifier: Apache-2.0
// The geometry of the cache, written once, as data: a list of cache kinds and where each layer's
// entries lie inside a page or a state slot. Kernels index by it; everything above sees pages,
// slots and the fingerprint (ARCHITECTURE.md, decisions 3 and 4; model specification 4).
//
// A page holds the entries of `page_tokens` tokens of one paged kind for all layers of that kind,
// layer after layer. Inside a layer's part the entries are planar as in specification 4.2: the
// data bytes of all entries first, then their scale bytes. A state slot holds every fixed-size
// cache of one sequence, kind after kind, layer after layer; windows are planar too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/core/arithmetic.h"

namespace isthmus::kernels {

enum class EntryFormat : uint8_t {
  kKvFp8,     // head_dim - 64 fp8_e4m3 + 64 bf16 | scales: one ue8m0 per 64 fp8, padded to 8
  kKvF32,     // head_dim f32
  kKeyFp4,    // index_head_dim / 2 bytes of fp4 pairs | scales: one ue8m0 per 32
  kKeyF32,    // index_head_dim f32
  kStateRow,  // u[width] then g[width], f32 (g has ape added); width = (ratio 4: 2) * dim
  kKeyFp8,    // index_head_dim fp8_e4m3 | scale: one f32, a power of two
  kKeyBf16,   // index_head_dim bf16
};

// The name of a format of index keys: fp4, fp8, bf16 or f32; empty for other formats.
absl::string_view IndexKeyFormatName(EntryFormat format);

// Those that an arithmetic can store: f32 in math, which quantises no keys; the others in
// reference, where fp4 is what the model's author rounds to and fp8 and bf16 round less.
bool HasIndexKeyFormat(Arithmetic arithmetic, EntryFormat format);

// "default", which is unset, or a name as above. InvalidArgument: another name, or a format that
// `arithmetic` does not store.
absl::StatusOr<std::optional<EntryFormat>> ParseIndexKeyFormat(absl::string_view name,
                                                               Arithmetic arithmetic);

// The kinds, in the order of KvLayout::kinds. Kinds up to kNumPagedKinds grow with the sequence.
enum CacheKindIndex : int {  // NOLINT(performance-enum-size): an int, as every index is.
  kCsaKv = 0,                // One KV entry per 4 tokens, layers of ratio 4.
  kHcaKv = 1,                // One KV entry per 128 tokens, layers of ratio 128.
  kIndexKey = 2,             // One index key per 4 tokens, layers of ratio 4.
  kNumPagedKinds = 3,
  kWindow = 3,  // Ring of `window` KV entries per sequence, all layers; slot = position mod window.
  kCsaState = 4,    // Ring of 8 compressor rows, slot = position mod 8, layers of ratio 4.
  kIndexState = 5,  // The same for the indexer's compressor.
  kHcaState = 6,    // Ring of 128 compressor rows, slot = position mod 128, layers of ratio 128.
  kNumCacheKinds = 7,
};

struct CacheKind {
  std::string name;
  EntryFormat format = EntryFormat::kKvF32;
  std::vector<int> layers;   // Model layers that have this kind, ascending.
  int tokens_per_entry = 0;  // 0: fixed size per sequence, in the state slot.
  int entry_data_bytes = 0;
  int entry_scale_bytes = 0;
  int entries = 0;     // Per page and layer; for fixed kinds per sequence and layer.
  int64_t offset = 0;  // Of the kind inside a state slot; 0 for paged kinds.

  int64_t layer_bytes() const { return int64_t{entries} * (entry_data_bytes + entry_scale_bytes); }
  // Bytes of one page (paged kinds) or of the kind's part of a state slot.
  int64_t bytes() const { return layer_bytes() * static_cast<int64_t>(layers.size()); }
};

// What the geometry is computed from.
struct KvGeometry {
  std::vector<int> compress_ratios;  // Per layer: 0, 4 or 128.
  int head_dim = 512;
  int rope_dim = 64;
  int index_head_dim = 128;
  int window = 128;
  int page_tokens = 256;  // A multiple of 128.
  Arithmetic arithmetic = Arithmetic::kReference;
  // Unset: the arithmetic's own, kKeyFp4 or kKeyF32.
  std::optional<EntryFormat> index_key_format = std::nullopt;
};

// Where the entries of one layer and kind lie, relative to a page or a state slot.
struct EntryPlane {
  EntryFormat format = EntryFormat::kKvF32;
  int64_t data_offset = 0;
  int64_t scale_offset = 0;
  int32_t data_bytes = 0;   // Per entry.
  int32_t scale_bytes = 0;  // Per entry.
  int32_t entries = 0;      // Per page, or in the ring.

  std::byte* data(std::byte* base, int64_t entry) const {
    return base + data_offset + entry * data_bytes;
  }
  std::byte* scale(std::byte* base, int64_t entry) const {
    return base + scale_offset + entry * scale_bytes;
  }
};

struct KvLayout {
  KvGeometry geometry;
  std::array<CacheKind, kNumCacheKinds> kinds;
  int64_t state_slot_bytes = 0;
  // Hash of everything above and of the format version. Two workers with different fingerprints
  // never exchange a byte.
  uint64_t fingerprint = 0;

  // InvalidArgument names the bad value: page_tokens not a multiple of 128, a ratio other than 0,
  // 4 and 128, dimensions that do not fill whole scale blocks.
  static absl::StatusOr<KvLayout> Create(const KvGeometry& geometry);

  // The plane of `layer` in `kind`; check-fails when that layer has no such kind.
  EntryPlane Plane(CacheKindIndex kind, int layer) const;

  // Pages of a paged kind that `num_tokens` tokens need.
  int64_t PagesFor(CacheKindIndex kind, int64_t num_tokens) const;
};

// One sequence's part of a batch, as kernels see it. Built per step by the owner of the pages.
struct SequenceKv {
  int64_t first_row = 0;       // In the batch's row dimension.
  int64_t num_rows = 0;        // New tokens of this step.
  int64_t start_position = 0;  // Absolute position of the first new token.
  // Base addresses of the sequence's pages per paged kind, in token order; enough for
  // start_position + num_rows tokens.
  std::array<std::span<std::byte* const>, kNumPagedKinds> pages;
  std::byte* state = nullptr;  // The state slot.
};

// Entries of one (sequence, layer, paged kind): entry e lies in page e / plane.entries.
struct PagedEntries {
  std::span<std::byte* const> pages;
  EntryPlane plane;

  std::byte* data(int64_t e) const {
    return plane.data(pages[static_cast<size_t>(e / plane.entries)], e % plane.entries);
  }
  std::byte* scale(int64_t e) const {
    return plane.scale(pages[static_cast<size_t>(e / plane.entries)], e % plane.entries);
  }
};

}  // namespace isthmus::kernels
