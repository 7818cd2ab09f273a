// SPDX-License-Identifier: Apache-2.0
// The parts of a dump that are read out of the cache itself: bytes of entries, windows and
// compressor rows, as golden/tiny-random-nvfp4/README.md names and orders them.
#pragma once

#include "kernels/core/kv_layout.h"
#include "services/diag/dump.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::diag {

DumpTensor F32Tensor(std::vector<int64_t> shape, const float* values);
DumpTensor I32Tensor(std::vector<int64_t> shape, const int32_t* values);

// layerN.kv_bytes from layerN.kv, which must be in `dump`. Only formats of bytes have them.
void AddKvBytes(const kernels::KvLayout& layout, Dump& dump);

// layerN.compressed_bytes and layerN.index_key_bytes: the entries that completed from token
// `first_token` on, data and scale bytes of each entry together.
void AddEntryBytes(const kernels::KvLayout& layout, const kv::SequenceCache& cache,
                   int64_t first_token, Dump& dump);

// layerN.window_bytes [window, entry bytes] by slot, window_pos [window] (-1: never written), and
// the compressor rows that future entries will still read: layerN.{main,index}_state_{u,g} with
// the position of their first row in *_state_base.
void AddStateSlot(const kernels::KvLayout& layout, const kv::SequenceCache& cache, Dump& dump);

}  // namespace isthmus::diag
