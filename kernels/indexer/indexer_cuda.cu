// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of the indexer, any architecture: the query's transform, scores, and the
// selection, each as its definition reads. Scores are bound by arithmetic (a multiply-add per key,
// head and channel on the CUDA cores, in the order of sums of the CPU path, so that both give the
// same bits); the selection reads each score once per bit of its rank.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/core/index_key.h"
#include "kernels/core/workspace.h"
#include "kernels/indexer/indexer_passes.h"
#include "kernels/indexer/indexer_rows.cuh"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int kKeysPerBlock = 64;
constexpr int kSelectThreads = 256;
constexpr int kQueryWarps = 4;
// Scores of one pass. 128 MiB hold 4096 rows of a prompt that is 32K tokens long, and any decode
// batch of 128 rows at a million tokens, so that only longer prefill chunks take several passes.
constexpr int64_t kMaxScoreFloats = int64_t{32} << 20;

// A thread scores one key: it decodes the key into its column of shared memory, which nobody else
// reads, and walks the heads. Grid: [any, rows of the pass]. Block: kKeysPerBlock. Shared memory:
// [dim][kKeysPerBlock] floats.
__global__ __launch_bounds__(kKeysPerBlock) void ScoreKeys(const IndexerPass pass) {
  auto* key = reinterpret_cast<float*>(DynamicShared()) + threadIdx.x;
  const int64_t row = pass.first_row + blockIdx.y;
  const IndexerRow r = RowOf(pass.batch, row);
  if (r.sequence == nullptr || !NeedsScores(r.visible, pass.topk, pass.has_dump)) return;
  const float* q = pass.q + row * pass.q_stride;
  const float* w = pass.w + row * pass.w_stride;
  float* out = pass.scores + int64_t{blockIdx.y} * pass.stride;

  const int64_t step = int64_t{gridDim.x} * kKeysPerBlock;
  for (int64_t j = int64_t{blockIdx.x} * kKeysPerBlock + threadIdx.x; j < r.visible; j += step) {
    std::byte* page = PageOf(*r.sequence, kIndexKey, pass.plane, j);
    const std::byte* data = EntryData(pass.plane, page, j % pass.plane.entries);
    const std::byte* scale = EntryScale(pass.plane, page, j % pass.plane.entries);
    for (int64_t d = 0; d < pass.dim; ++d) {
      key[d * kKeysPerBlock] = IndexKeyValue(pass.plane.format, data, scale, d);
    }
    float score = 0.0f;
    for (int64_t h = 0; h < pass.num_heads; ++h) {
      float dot = 0.0f;
      for (int64_t d = 0; d < pass.dim; ++d) {
        dot = fmaf(q[h * pass.dim + d], key[d * kKeysPerBlock], dot);
      }
      if (pass.is_reference) dot = RoundBf16(dot);
      const float term = (dot < 0.0f ? 0.0f : dot) * w[h];  // A NaN stays one.
      score += pass.is_reference ? RoundBf16(term) : term;
    }
    out[j] = pass.is_reference ? RoundBf16(score) : score;
  }
}

// The sum over the block. `shared` is a word per warp; the block may call again at once.
__device__ __forceinline__ unsigned BlockSum(unsigned value, unsigned* shared) {
  const unsigned sum = __reduce_add_sync(kFullWarp, value);
  if (threadIdx.x % kWarpLanes == 0) shared[threadIdx.x / kWarpLanes] = sum;
  __syncthreads();
  unsigned total = 0;
  for (int i = 0; i < kSelectThreads / kWarpLanes; ++i) total += shared[i];
  __syncthreads();
  return total;
}

// How many threads of the block before this one say yes, and how many in all.
__device__ __forceinline__ unsigned CountBefore(bool yes, unsigned* shared, unsigned* total) {
  const unsigned lanes = __ballot_sync(kFullWarp, yes ? 1 : 0);
  const unsigned warp = threadIdx.x / kWarpLanes;
  if (threadIdx.x % kWarpLanes == 0) shared[warp] = static_cast<unsigned>(__popc(lanes));
  __syncthreads();
  unsigned before = static_cast<unsigned>(__popc(lanes & ((1u << threadIdx.x % kWarpLanes) - 1u)));
  *total = 0;
  for (unsigned i = 0; i < kSelectThreads / kWarpLanes; ++i) {
    if (i < warp) before += shared[i];
    *total += shared[i];
  }
  __syncthreads();
  return before;
}

// The largest rank in the selection, found from its top bit down by counting, and how many entries
// of that rank belong to it: those of smallest index.
struct Threshold {
  uint32_t rank = 0;
  unsigned ties = 0;
};
__device__ __forceinline__ Threshold FindThreshold(const float* scores, int64_t visible,
                                                   int64_t topk, unsigned* shared) {
  Threshold found = {.rank = 0, .ties = static_cast<unsigned>(topk)};
  for (int bit = 31; bit >= 0; --bit) {
    unsigned count = 0;  // Entries that share the bits found so far and have a 0 here.
    for (int64_t j = threadIdx.x; j < visible; j += kSelectThreads) {
      count += ScoreRank(scores[j]) >> bit == found.rank >> bit ? 1 : 0;
    }
    count = BlockSum(count, shared);
    if (count < found.ties) {
      found.ties -= count;
      found.rank |= 1u << bit;
    }
  }
  return found;
}

// Writes the selection of a row in ascending order. Grid: rows of the pass. Block: kSelectThreads.
// Shared memory: a word per warp, static.
__global__ __launch_bounds__(kSelectThreads) void SelectEntries(const IndexerPass pass) {
  __shared__ unsigned shared[kSelectThreads / kWarpLanes];
  const IndexerRow r = RowOf(pass.batch, pass.first_row + blockIdx.x);
  if (r.sequence == nullptr) return;
  const int64_t topk = pass.topk;
  float* scores = pass.scores + int64_t{blockIdx.x} * pass.stride;
  int32_t* out = pass.selected + int64_t{blockIdx.x} * topk;
  if (r.visible <= topk) {
    for (int64_t k = threadIdx.x; k < topk; k += kSelectThreads) {
      out[k] = k < r.visible ? static_cast<int32_t>(k) : -1;
    }
  } else {
    const Threshold last = FindThreshold(scores, r.visible, topk, shared);
    unsigned taken = 0;
    unsigned ties = 0;
    for (int64_t first = 0; first < r.visible; first += kSelectThreads) {
      const int64_t j = first + threadIdx.x;
      const uint32_t rank = j < r.visible ? ScoreRank(scores[j]) : 0;
      const bool is_tie = j < r.visible && rank == last.rank;
      unsigned count = 0;
      const unsigned ties_before = ties + CountBefore(is_tie, shared, &count);
      ties += count;
      const bool is_in = j < r.visible && (rank < last.rank || (is_tie && ties_before < last.ties));
      const unsigned place = taken + CountBefore(is_in, shared, &count);
      taken += count;
      if (is_in) out[place] = static_cast<int32_t>(j);
    }
  }
  if (!pass.has_dump) return;
  for (int64_t j = r.visible + threadIdx.x; j < pass.stride; j += kSelectThreads) {
    scores[j] = -std::numeric_limits<float>::infinity();
  }
}

// Orders the selection of a row for a dump: larger score first, then smaller index. An entry's
// place is the number of entries before it. Grid: rows of the pass. Block: kSelectThreads.
__global__ __launch_bounds__(kSelectThreads) void OrderEntries(
    const IndexerPass pass,
    int32_t* __restrict__ selected) {  // [rows of the pass, topk]
  const IndexerRow r = RowOf(pass.batch, pass.first_row + blockIdx.x);
  if (r.sequence == nullptr) return;
  const float* scores = pass.scores + int64_t{blockIdx.x} * pass.stride;
  const int32_t* in = pass.selected + int64_t{blockIdx.x} * pass.topk;
  int32_t* out = selected + int64_t{blockIdx.x} * pass.topk;
  const int64_t count = r.visible < pass.topk ? r.visible : pass.topk;
  for (int64_t k = threadIdx.x; k < pass.topk; k += kSelectThreads) {
    if (k >= count) {
      out[k] = -1;
      continue;
    }
    const uint32_t rank = ScoreRank(scores[in[k]]);
    int64_t place = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t other = ScoreRank(scores[in[i]]);
      place += other < rank || (other == rank && i < k) ? 1 : 0;
    }
    out[place] = in[k];
  }
}

// One warp transforms and rounds one head, whose channels lie in shared memory. Grid: heads of all
// rows / kQueryWarps. Block: [32, kQueryWarps]. Shared memory: [kQueryWarps][dim] floats.
__global__ void TransformQuery(float* q,  // [rows, num_heads * dim], rows `stride` apart
                               int64_t rows, int64_t num_heads, int64_t dim, int64_t stride,
                               float factor) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t head = int64_t{blockIdx.x} * kQueryWarps + threadIdx.y;
  if (head >= rows * num_heads) return;  // Whole warps leave together.
  float* x = reinterpret_cast<float*>(DynamicShared()) + threadIdx.y * dim;
  float* out = q + head / num_heads * stride + head % num_heads * dim;
  const int64_t lane = threadIdx.x;
  for (int64_t d = lane; d < dim; d += kWarpLanes) x[d] = out[d];
  __syncwarp();
  for (int64_t distance = 1; distance < dim; distance *= 2) {
    for (int64_t pair = lane; pair < dim / 2; pair += kWarpLanes) {
      const int64_t d = pair / distance * 2 * distance + pair % distance;
      const float a = x[d];
      const float b = x[d + distance];
      x[d] = a + b;
      x[d + distance] = a - b;
    }
    __syncwarp();
  }
  for (int64_t block = 0; block < dim; block += kIndexKeyBlock) {
    const int64_t d = block + lane;
    const float value = d < dim ? RoundBf16(x[d] * factor) : 0.0f;
    const float scale = PowerOfTwo(Fp4ScaleExponent(WarpMax(fabsf(value))));
    const float inverse = 1.0f / scale;
    if (d < dim) out[d] = Fp4E2m1Value(Fp4E2m1Code(value * inverse)) * scale;
  }
}

LaunchShape BlockPerRow(const IndexerPass& pass) {
  return {.grid = dim3(static_cast<unsigned>(pass.rows)), .block = dim3(kSelectThreads)};
}

int PageBits(int64_t entries) {
  const auto value = static_cast<uint64_t>(entries);
  return std::has_single_bit(value) ? std::countr_zero(value) : -1;
}

}  // namespace

absl::Status ScoreByThreads(const IndexerPass& pass, const Exec& exec) {
  // Blocks walk keys with a stride, so that a bound far above the lengths costs little.
  const int64_t most = std::max<int64_t>(1, 32 * int64_t{exec.num_sms} / pass.rows);
  const int64_t blocks = std::min<int64_t>(most, CeilDiv(pass.bound, kKeysPerBlock));
  return Launch("ScoreKeys",
                {.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(pass.rows)),
                 .block = dim3(kKeysPerBlock),
                 .shared_bytes = static_cast<size_t>(pass.dim * kKeysPerBlock) * sizeof(float)},
                exec, ScoreKeys, pass);
}

absl::Status SelectByBits(const IndexerPass& pass, const Exec& exec) {
  return Launch("SelectEntries", BlockPerRow(pass), exec, SelectEntries, pass);
}

namespace {

// What all passes share. Rows of scores begin at 16 bytes.
IndexerPass PassOf(const IndexerArgs& args) {
  const int64_t bound = VisibleKeys(args.device_batch->max_tokens - 1);
  const bool has_dump = args.scores != nullptr;
  return {.batch = *args.device_batch,
          .plane = args.key_plane,
          .page_bits = PageBits(args.key_plane.entries),
          .q = static_cast<const float*>(args.q.data),
          .w = static_cast<const float*>(args.w.data),
          .q_stride = args.q.row_stride,
          .w_stride = args.w.row_stride,
          .num_heads = args.num_heads,
          .dim = args.dim,
          .topk = args.topk,
          .is_reference = args.arithmetic == Arithmetic::kReference,
          .has_dump = has_dump,
          .bound = bound,
          .stride = has_dump ? args.scores_stride : (bound + 3) / 4 * 4};
}

}  // namespace

absl::Status RunIndexerPasses(const IndexerArgs& args, const Exec& exec, IndexerStep score,
                              IndexerStep select) {
  const int64_t rows = args.q.rows;
  if (rows == 0) return absl::OkStatus();
  IndexerPass pass = PassOf(args);
  const bool has_dump = pass.has_dump;
  const int64_t row_floats = (pass.bound + 3) / 4 * 4;
  const int64_t most = std::max<int64_t>(1, kMaxScoreFloats / std::max<int64_t>(1, row_floats));
  const int64_t rows_per_pass = std::min({rows, most, kMaxPassRows});
  const bool has_scores = NeedsScores(pass.bound, args.topk, has_dump);
  Workspace::Scope scope(exec.workspace);
  float* scratch = nullptr;
  if (has_scores && !has_dump) scratch = scope.Take<float>(rows_per_pass * row_floats);
  auto* entries = has_dump ? scope.Take<int32_t>(rows_per_pass * args.topk) : nullptr;
  for (int64_t first = 0; first < rows; first += rows_per_pass) {
    pass.first_row = first;
    pass.rows = std::min(rows_per_pass, rows - first);
    pass.scores = has_dump ? args.scores + first * args.scores_stride : scratch;
    int32_t* selected = args.selected + first * args.topk;
    pass.selected = has_dump ? entries : selected;
    if (has_scores) ISTHMUS_RETURN_IF_ERROR(score(pass, exec));
    if (select != nullptr) ISTHMUS_RETURN_IF_ERROR(select(pass, exec));
    if (has_dump) {
      ISTHMUS_RETURN_IF_ERROR(
          Launch("OrderEntries", BlockPerRow(pass), exec, OrderEntries, pass, selected));
    }
  }
  return absl::OkStatus();
}

absl::Status RunIndexerStep(const IndexerArgs& args, const Exec& exec, IndexerStep step) {
  IndexerPass pass = PassOf(args);
  pass.has_dump = false;
  pass.rows = args.q.rows;
  pass.scores = args.scores;
  pass.selected = args.selected;
  return step(pass, exec);
}

bool FitsOnePass(const IndexerArgs& args) {
  const int64_t bound = VisibleKeys(args.device_batch->max_tokens - 1);
  return args.scores == nullptr && NeedsScores(bound, args.topk, false) &&
         args.q.rows * (bound + 3) <= kMaxScoreFloats;
}

absl::Status LaunchIndexerCuda(const IndexerArgs& args, const Exec& exec) {
  return RunIndexerPasses(args, exec, ScoreByThreads, SelectByBits);
}

absl::Status LaunchIndexQueryCuda(const MatrixView& q, int64_t num_heads, int64_t dim,
                                  const Exec& exec) {
  if (q.rows == 0) return absl::OkStatus();
  return Launch("TransformQuery",
                {.grid = dim3(CeilDiv(q.rows * num_heads, kQueryWarps)),
                 .block = dim3(kWarpLanes, kQueryWarps),
                 .shared_bytes = static_cast<size_t>(kQueryWarps * dim) * sizeof(float),
                 .overlaps_predecessor = true},
                exec, TransformQuery, q.f32(0), q.rows, num_heads, dim, q.row_stride,
                1.0f / std::sqrt(static_cast<float>(dim)));
}

}  // namespace isthmus::kernels
