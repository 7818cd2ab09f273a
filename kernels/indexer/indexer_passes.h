// SPDX-License-Identifier: Apache-2.0
// How the indexer runs on a GPU: passes over rows of the batch, each a score step and a select
// step, for either of which there may be a patch. Internal to this folder.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/core/device_batch.h"
#include "kernels/core/exec.h"
#include "kernels/indexer/indexer.h"

namespace isthmus::kernels {

inline constexpr int64_t kMaxPassRows = 65535;  // Of a grid's second dimension.

// One pass, as kernels take it.
struct IndexerPass {
  DeviceBatch batch;
  EntryPlane plane;
  int page_bits = -1;        // Where a page holds 2^page_bits keys.
  const float* q = nullptr;  // [all rows, num_heads * dim], rows q_stride apart
  const float* w = nullptr;  // [all rows, num_heads], rows w_stride apart
  int64_t q_stride = 0;
  int64_t w_stride = 0;
  int64_t num_heads = 0;
  int64_t dim = 0;
  int64_t topk = 0;
  bool is_reference = false;
  bool has_dump = false;  // The scores are the caller's: all are wanted, -infinity beyond.
  int64_t bound = 0;      // No row sees more keys.
  int64_t first_row = 0;
  int64_t rows = 0;         // Of this pass.
  float* scores = nullptr;  // [rows, stride]; null when nobody needs them
  int64_t stride = 0;
  int32_t* selected = nullptr;  // [rows, topk]
};

// A step enqueues its part of a pass. A score step writes the scores that NeedsScores asks for;
// keys beyond a row's own stay as they are. A select step writes `selected`, ascending, and in a
// dump -infinity beyond each row's keys.
using IndexerStep = absl::Status (*)(const IndexerPass& pass, const Exec& exec);

// In indexer_cuda.cu, with the trusted steps. `select` is null when `score` selects, too, which it
// may where FitsOnePass.
absl::Status RunIndexerPasses(const IndexerArgs& args, const Exec& exec, IndexerStep score,
                              IndexerStep select);
bool FitsOnePass(const IndexerArgs& args);
// One step alone, over the caller's scores, without a dump's care for what lies beyond a row's
// keys.
absl::Status RunIndexerStep(const IndexerArgs& args, const Exec& exec, IndexerStep step);
absl::Status ScoreByThreads(const IndexerPass& pass, const Exec& exec);
absl::Status SelectByBits(const IndexerPass& pass, const Exec& exec);

// So few keys that a block has a tile or two of a row.
inline bool FewKeysPerSm(int64_t rows, int64_t keys, const Exec& exec) {
  return rows * keys <= int64_t{exec.num_sms} * 256;
}

// Patches. ScoreAndSelectByMma is for FewKeysPerSm.
absl::Status ScoreByMma(const IndexerPass& pass, const Exec& exec);
absl::Status SelectByRadix(const IndexerPass& pass, const Exec& exec);
absl::Status ScoreAndSelectByMma(const IndexerPass& pass, const Exec& exec);

}  // namespace isthmus::kernels
