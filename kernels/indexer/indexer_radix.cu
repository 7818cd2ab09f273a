// SPDX-License-Identifier: Apache-2.0
// The selection of the indexer by radix. Patch indexer.radix_top_k. A block per row; the first 8192
// scores stay in registers, further ones are read again for each digit. Bound by latency: a row of
// 8192 scores is 32 KB out of the L2, then two or three rounds of counting in shared memory.
#include <limits>

#include "kernels/indexer/indexer_passes.h"
#include "kernels/indexer/indexer_rows.cuh"
#include "kernels/indexer/radix_select.cuh"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kHeldRanks = 8;

// Grid: rows of the pass. Block: kThreads. Shared memory: RadixShared, static.
__global__ __launch_bounds__(kThreads) void SelectRowByRadix(const IndexerPass pass) {
  __shared__ RadixShared shared;
  LetSuccessorStart();
  // What a step's kernels only read is there before the first of them starts.
  const IndexerRow r = RowOf(pass.batch, pass.first_row + blockIdx.x);
  ClearCounts<kThreads>(pass.is_reference, shared);
  WaitForPredecessor();  // All blocks: whoever waits for this kernel waits for those before it,
                         // too.
  if (r.sequence == nullptr) return;
  float* scores = pass.scores + int64_t{blockIdx.x} * pass.stride;
  int32_t* out = pass.selected + int64_t{blockIdx.x} * pass.topk;
  if (r.visible <= pass.topk) {
    for (int64_t k = threadIdx.x; k < pass.topk; k += kThreads) {
      out[k] = k < r.visible ? static_cast<int32_t>(k) : -1;
    }
  } else {
    RadixSelect<kThreads, kHeldRanks>(scores, static_cast<int>(r.visible), pass.topk,
                                      pass.is_reference, shared, out);
  }
  if (!pass.has_dump) return;
  for (int64_t j = r.visible + threadIdx.x; j < pass.stride; j += kThreads) {
    scores[j] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

absl::Status SelectByRadix(const IndexerPass& pass, const Exec& exec) {
  return Launch("SelectRowByRadix",
                {.grid = dim3(static_cast<unsigned>(pass.rows)),
                 .block = dim3(kThreads),
                 .overlaps_predecessor = true},
                exec, SelectRowByRadix, pass);
}

}  // namespace isthmus::kernels
