// SPDX-License-Identifier: Apache-2.0
// The parts of a dump that are read out of the cache itself: bytes of entries, windows and
// compressor rows, as golden/tiny-random-nvfp4/README.md names and orders them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/kv_layout.h"
#include "services/diag/dump.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::diag {

// What a sequence has cached, in host memory wherever its pages lie.
class CacheCopy {
 public:
  // A GPU has done all its work on the pages.
  static absl::StatusOr<CacheCopy> Of(const kernels::KvLayout& layout,
                                      const kv::SequenceCache& cache, int device);

  const kernels::SequenceKv& view() const { return view_; }
  int64_t num_tokens() const { return num_tokens_; }

 private:
  kernels::SequenceKv view_;
  int64_t num_tokens_ = 0;
  std::vector<std::vector<std::byte>> bytes_;  // Moving a vector keeps its bytes in place.
  std::array<std::vector<std::byte*>, kernels::kNumPagedKinds> pages_;
};

DumpTensor F32Tensor(std::vector<int64_t> shape, const float* values);
DumpTensor I32Tensor(std::vector<int64_t> shape, const int32_t* values);

// layerN.kv_bytes from layerN.kv, which must be in `dump`. Only formats of bytes have them.
void AddKvBytes(const kernels::KvLayout& layout, Dump& dump);

// layerN.compressed_bytes and layerN.index_key_bytes: the entries that completed from token
// `first_token` on, data and scale bytes of each entry together.
void AddEntryBytes(const kernels::KvLayout& layout, const CacheCopy& cache, int64_t first_token,
                   Dump& dump);

// layerN.window_bytes [window, entry bytes] by slot, window_pos [window] (-1: never written), and
// the compressor rows that future entries will still read: layerN.{main,index}_state_{u,g} with
// the position of their first row in *_state_base.
void AddStateSlot(const kernels::KvLayout& layout, const CacheCopy& cache, Dump& dump);

}  // namespace isthmus::diag
