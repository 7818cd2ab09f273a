// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/kv_layout.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "services/base/check.h"

namespace isthmus::kernels {
namespace {

// Raised whenever the meaning of a byte of a page or slot changes.
constexpr uint64_t kFormatVersion = 1;

uint64_t Mix(uint64_t hash, uint64_t value) {
  // splitmix64 of the running hash and the value: order matters, collisions of small ints do not.
  uint64_t z = (hash ^ value) + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void SetFormat(CacheKind& kind, EntryFormat format, int dim, int rope_dim) {
  kind.format = format;
  switch (format) {
    case EntryFormat::kKvFp8:
      kind.entry_data_bytes = (dim - rope_dim) + 2 * rope_dim;
      kind.entry_scale_bytes = 8;
      break;
    case EntryFormat::kKeyFp4:
      kind.entry_data_bytes = dim / 2;
      kind.entry_scale_bytes = dim / 32;
      break;
    case EntryFormat::kKeyFp8:
      kind.entry_data_bytes = dim;
      kind.entry_scale_bytes = 4;
      break;
    case EntryFormat::kKeyBf16:
      kind.entry_data_bytes = 2 * dim;
      break;
    case EntryFormat::kKvF32:
    case EntryFormat::kKeyF32:
      kind.entry_data_bytes = 4 * dim;
      break;
    case EntryFormat::kStateRow:
      kind.entry_data_bytes = 2 * 4 * dim;
      break;
  }
}

constexpr EntryFormat kIndexKeyFormats[] = {EntryFormat::kKeyFp4, EntryFormat::kKeyFp8,
                                            EntryFormat::kKeyBf16, EntryFormat::kKeyF32};

absl::Status Validate(const KvGeometry& g) {
  if (g.page_tokens <= 0 || g.page_tokens % 128 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_tokens is ", g.page_tokens, ", must be a positive multiple of 128"));
  }
  if (g.rope_dim != 64 || g.head_dim <= 64 || (g.head_dim - g.rope_dim) % 64 != 0 ||
      (g.head_dim - g.rope_dim) / 64 > 8) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim ", g.head_dim, " and rope_dim ", g.rope_dim,
                     ": the rotary part must be 64 and the rest 1 to 8 blocks of 64"));
  }
  if (g.index_head_dim <= 0 || g.index_head_dim % 32 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("index_head_dim is ", g.index_head_dim, ", must be a multiple of 32"));
  }
  const EntryFormat key = g.index_key_format.value_or(EntryFormat::kKeyFp4);
  if (IndexKeyFormatName(key).empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("index_key_format is ", static_cast<int>(key), ", no format of index keys"));
  }
  if (g.window <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("window is ", g.window, ", must be positive"));
  }
  for (size_t i = 0; i < g.compress_ratios.size(); ++i) {
    const int r = g.compress_ratios[i];
    if (r != 0 && r != 4 && r != 128) {
      return absl::InvalidArgumentError(
          absl::StrCat("compress_ratios[", i, "] is ", r, ", must be 0, 4 or 128"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view IndexKeyFormatName(EntryFormat format) {
  switch (format) {
    case EntryFormat::kKeyFp4:
      return "fp4";
    case EntryFormat::kKeyFp8:
      return "fp8";
    case EntryFormat::kKeyBf16:
      return "bf16";
    case EntryFormat::kKeyF32:
      return "f32";
    case EntryFormat::kKvFp8:
    case EntryFormat::kKvF32:
    case EntryFormat::kStateRow:
      return "";
  }
  return "";
}

bool HasIndexKeyFormat(Arithmetic arithmetic, EntryFormat format) {
  const bool is_f32 = format == EntryFormat::kKeyF32;
  return !IndexKeyFormatName(format).empty() && is_f32 == (arithmetic == Arithmetic::kMath);
}

absl::StatusOr<std::optional<EntryFormat>> ParseIndexKeyFormat(absl::string_view name,
                                                               Arithmetic arithmetic) {
  if (name == "default") return std::optional<EntryFormat>();
  for (const EntryFormat format : kIndexKeyFormats) {
    if (IndexKeyFormatName(format) != name) continue;
    if (HasIndexKeyFormat(arithmetic, format)) return std::optional<EntryFormat>(format);
    const bool is_math = arithmetic == Arithmetic::kMath;
    return absl::InvalidArgumentError(
        absl::StrCat("is \"", name, "\", but arithmetic ", is_math ? "math" : "reference",
                     " stores index keys as ", is_math ? "f32" : "fp4, fp8 or bf16"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("is \"", name, "\", want default, fp4, fp8, bf16 or f32"));
}

absl::StatusOr<KvLayout> KvLayout::Create(const KvGeometry& geometry) {
  if (absl::Status status = Validate(geometry); !status.ok()) return status;
  KvLayout out;
  out.geometry = geometry;
  std::vector<int> all;
  std::vector<int> csa;
  std::vector<int> hca;
  for (int i = 0; i < static_cast<int>(geometry.compress_ratios.size()); ++i) {
    all.push_back(i);
    const int ratio = geometry.compress_ratios[static_cast<size_t>(i)];
    if (ratio == 4) csa.push_back(i);
    if (ratio == 128) hca.push_back(i);
  }
  const bool reference = geometry.arithmetic == Arithmetic::kReference;
  const EntryFormat kv = reference ? EntryFormat::kKvFp8 : EntryFormat::kKvF32;
  const EntryFormat key =
      geometry.index_key_format.value_or(reference ? EntryFormat::kKeyFp4 : EntryFormat::kKeyF32);
  const int d = geometry.head_dim;
  const int di = geometry.index_head_dim;

  const auto add = [&](CacheKindIndex index, const char* name, const std::vector<int>& layers,
                       int tokens_per_entry, EntryFormat format, int dim, int entries) {
    CacheKind& kind = out.kinds[index];
    kind.name = name;
    kind.layers = layers;
    kind.tokens_per_entry = tokens_per_entry;
    kind.entries = entries;
    SetFormat(kind, format, dim, geometry.rope_dim);
    if (tokens_per_entry == 0) {
      kind.offset = out.state_slot_bytes;
      out.state_slot_bytes += (kind.bytes() + 63) / 64 * 64;
    }
  };
  add(kCsaKv, "csa_kv", csa, 4, kv, d, geometry.page_tokens / 4);
  add(kHcaKv, "hca_kv", hca, 128, kv, d, geometry.page_tokens / 128);
  add(kIndexKey, "index_key", csa, 4, key, di, geometry.page_tokens / 4);
  add(kWindow, "window", all, 0, kv, d, geometry.window);
  add(kCsaState, "csa_state", csa, 0, EntryFormat::kStateRow, 2 * d, 8);
  add(kIndexState, "index_state", csa, 0, EntryFormat::kStateRow, 2 * di, 8);
  add(kHcaState, "hca_state", hca, 0, EntryFormat::kStateRow, d, 128);

  uint64_t hash = Mix(kFormatVersion, static_cast<uint64_t>(geometry.arithmetic));
  for (int value : {geometry.head_dim, geometry.rope_dim, geometry.index_head_dim, geometry.window,
                    geometry.page_tokens}) {
    hash = Mix(hash, static_cast<uint64_t>(value));
  }
  for (int ratio : geometry.compress_ratios) hash = Mix(hash, static_cast<uint64_t>(ratio));
  for (const CacheKind& kind : out.kinds) {
    for (int value : {static_cast<int>(kind.format), kind.tokens_per_entry, kind.entry_data_bytes,
                      kind.entry_scale_bytes, kind.entries}) {
      hash = Mix(hash, static_cast<uint64_t>(value));
    }
  }
  out.fingerprint = hash;
  return out;
}

EntryPlane KvLayout::Plane(CacheKindIndex kind_index, int layer) const {
  const CacheKind& kind = kinds[kind_index];
  const auto found = std::find(kind.layers.begin(), kind.layers.end(), layer);
  ISTHMUS_CHECK(found != kind.layers.end());
  const int64_t start = kind.offset + (found - kind.layers.begin()) * kind.layer_bytes();
  return {kind.format,
          start,
          start + int64_t{kind.entries} * kind.entry_data_bytes,
          kind.entry_data_bytes,
          kind.entry_scale_bytes,
          kind.entries};
}

int64_t KvLayout::PagesFor(CacheKindIndex kind, int64_t num_tokens) const {
  if (kinds[kind].layers.empty()) return 0;
  return (num_tokens + geometry.page_tokens - 1) / geometry.page_tokens;
}

}  // namespace isthmus::kernels
