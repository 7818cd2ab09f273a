// SPDX-License-Identifier: Apache-2.0
// Patch linear.swap_ab for at most eight tokens, and for more of a small matrix, where no row's
// bits must be those that it has alone: one launch without a join between blocks. Bound by reading
// the weights once: N * K bytes (fp8) or 2 N * K (bf16) at the rate of DRAM, and for small matrices
// by latency.
//
// A block owns whole rows of tiles. Its eight warps share K: warp w multiplies the groups w, w + 8,
// ..., packs the tokens of its groups itself, in the registers that mma.sync takes them from, and
// streams its weights through a ring of its own, so that warps meet only to add their sums. The
// ring fills before the predecessor has ended.
#include "kernels/linear/few_tokens.cuh"
#include "kernels/linear/linear_variants.h"

namespace isthmus::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kDepth = 5;  // Groups of a row of tiles on their way to a warp.
constexpr int kTile = static_cast<int>(kPanelRows);
constexpr int kBlockTiles = 128 / kTile;  // Rows of tiles with one scale a group.
constexpr int kSumsOfRow = kTile * 8;
constexpr size_t kRingBytes = size_t{kWarps} * kDepth * kTileUnitBytes;
// Of a multiprocessor, for the registers: its shared memory has place for the successor, or not.
#if defined(ISTHMUS_HAS_SM120A)
[[maybe_unused]] constexpr int kBlocksTogether = 1;
#else
[[maybe_unused]] constexpr int kBlocksTogether = 2;
#endif

// Groups whose tokens are loaded together: as many as the registers last for, with two blocks a
// multiprocessor, of which one is the successor's.
template <Product kProduct>
constexpr int kAhead = kProduct == Product::kBf16 ? 2 : 1;

// Rows of tiles of a pass, which share the tokens' operands.
template <Product kProduct>
constexpr int kRows = kProduct == Product::kE4m3ByF16 ? 2 : 4;
constexpr int kMostRows = 4;
constexpr size_t kSharedBytes = kRingBytes + size_t{kWarps} * kMostRows * kSumsOfRow * 4;
static_assert(kSharedBytes + 1024 <= kMaxSharedBytes);

struct FewTokensArgs {
  LinearTask tasks[kMaxTasks];
  int first_line[kMaxTasks + 1];  // Of a task, among the rows of tiles of all tasks.
  const float* x[kMaxTasks];      // [tokens, K], rows x_stride apart; by LinearTask::input
  int64_t x_stride[kMaxTasks];
  int cols;  // K
  int num_tasks;
  int tokens;
  int groups;         // Along K: four k steps each.
  int tiles_in_row;   // k steps along K.
  int pass_rows;      // kRows.
  int scale_columns;  // fp8.
  bool is_aligned;    // Runs of four inputs are 16 aligned bytes, and end with K.
};

// Of the eight that the block multiplies.
__device__ __forceinline__ int FirstToken() { return static_cast<int>(blockIdx.y) * 8; }

// Rows of tiles [row, row + count) of a task.
struct Pass {
  int task;
  int row;
  int count;
};
__device__ __forceinline__ Pass PassAt(const FewTokensArgs& args, int line, int line_end) {
  Pass pass = {};
  while (pass.task + 1 < args.num_tasks && args.first_line[pass.task + 1] <= line) ++pass.task;
  pass.row = line - args.first_line[pass.task];
  pass.count = min(args.pass_rows, min(line_end, args.first_line[pass.task + 1]) - line);
  return pass;
}

// A warp's weights: its groups of the rows of a pass, group by group, then of the next pass.
class WeightRing {
 public:
  __device__ __forceinline__ WeightRing(const FewTokensArgs& args, unsigned char* slots,
                                        Mbarrier* full, int line, int line_end, int warp, int lane)
      : args_(args), slots_(slots), full_(full), line_end_(line_end), warp_(warp), lane_(lane) {
    next_ = {line, PassAt(args, line, line_end), warp, 0};
    if (warp >= args.groups) next_.line = line_end;
    if (lane == 0) {
      for (int i = 0; i < kDepth; ++i) BarrierInit(full + i, 1);
      FenceBarrierInit();
    }
    __syncwarp();
    for (int i = 0; i < kDepth; ++i) Fetch(i);
  }
  // Waits for the next group of a row of tiles: [four steps][lane][16 bytes].
  __device__ __forceinline__ const unsigned char* Wait() {
    BarrierWait(full_ + slot_, parity_);
    return slots_ + slot_ * kTileUnitBytes;
  }
  // What Wait returned is no longer read.
  __device__ __forceinline__ void Release() {
    __syncwarp();
    Fetch(slot_);
    if (++slot_ == kDepth) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  struct Place {
    int line;
    Pass pass;
    int group;
    int row;  // Of the pass.
  };
  __device__ __forceinline__ void Fetch(int slot) {
    if (next_.line >= line_end_) return;
    if (lane_ == 0) {
      const LinearTask& task = args_.tasks[next_.pass.task];
      const int steps = min(kUnitSteps, args_.tiles_in_row - next_.group * kUnitSteps);
      const int64_t tile = int64_t{next_.pass.row + next_.row} * args_.tiles_in_row +
                           int64_t{next_.group} * kUnitSteps;
      const auto bytes = static_cast<unsigned>(steps * kTileCodeBytes);
      BarrierArriveExpect(full_ + slot, bytes);
      unsigned char* to = slots_ + slot * kTileUnitBytes;
      const uint8_t* from = task.tiles + tile * kTileCodeBytes;
      if (gridDim.y == 1) {
        BulkCopyOnce(to, from, bytes, full_ + slot);
      } else {  // Other blocks read them from the L2.
        BulkCopy(to, from, bytes, full_ + slot);
      }
    }
    if (++next_.row < next_.pass.count) return;
    next_.row = 0;
    next_.group += kWarps;
    if (next_.group < args_.groups) return;
    next_.group = warp_;
    next_.line += next_.pass.count;
    if (next_.line < line_end_) next_.pass = PassAt(args_, next_.line, line_end_);
  }

  const FewTokensArgs& args_;
  unsigned char* slots_;  // [kDepth][kTileUnitBytes]
  Mbarrier* full_;        // [kDepth]
  int line_end_, warp_, lane_;
  Place next_ = {};
  int slot_ = 0;
  unsigned parity_ = 0;
};

// Adds the sums of all warps, in their order, and writes the pass's outputs. By all threads.
template <int kPassRows>
__device__ __forceinline__ void WritePass(const FewTokensArgs& args, const Pass& pass, float* sums,
                                          int warp, int lane, const float (&total)[kPassRows][4]) {
  __syncthreads();  // The sums of the pass before this one have been read.
#pragma unroll
  for (int i = 0; i < kPassRows * 4; ++i) {
    sums[(warp * kPassRows * 4 + i) * kWarpLanes + lane] = total[i / 4][i % 4];
  }
  __syncthreads();
  const LinearTask& task = args.tasks[pass.task];
  const int used = min(kWarps, args.groups);
  for (int i = static_cast<int>(threadIdx.x); i < pass.count * kSumsOfRow; i += kThreads) {
    const int c = i / kWarpLanes % 4;
    const int token = FirstToken() + i % 4 * 2 + c % 2;
    const int n = (pass.row + i / kSumsOfRow) * kTile + i % kWarpLanes / 4 + (c >= 2 ? 8 : 0);
    if (token >= args.tokens || n >= task.rows) continue;
    float sum = sums[i];
    for (int w = 1; w < used; ++w) sum += sums[w * kPassRows * kSumsOfRow + i];
    task.out[token * task.out_stride + n] = task.round ? RoundBf16(sum) : sum;
  }
}

// A warp's place in its sequence of groups.
struct GroupCursor {
  int line;
  Pass pass;
  int group;
};

// The tokens of kAhead groups from a cursor on, and the codes of their weights' scales: of the
// pass's first row of tiles, and of those beyond the next multiple of 128 outputs.
template <Product kProduct>
struct RawGroups {
  RawTokens<kProduct> tokens[kAhead<kProduct>];
  uint8_t code[kAhead<kProduct>][2];

  __device__ __forceinline__ void LoadScales(const FewTokensArgs& args, const GroupCursor& at) {
    if constexpr (!HasScales(kProduct)) return;
    const LinearTask& task = args.tasks[at.pass.task];
    const int first = task.first_row + at.pass.row * kTile;
    const int last = first + (at.pass.count - 1) * kTile;
#pragma unroll
    for (int i = 0; i < kAhead<kProduct>; ++i) {
      const int group = min(at.group + i * kWarps, args.groups - 1);
      code[i][0] = __ldg(task.scales + int64_t{first / 128} * args.scale_columns + group);
      code[i][1] = __ldg(task.scales + int64_t{last / 128} * args.scale_columns + group);
    }
  }
  __device__ __forceinline__ void LoadTokens(const FewTokensArgs& args, const GroupCursor& at,
                                             int lane) {
    const int input = args.tasks[at.pass.task].input;
    const int token = FirstToken() + lane / 4;
    const float* x = token < args.tokens ? args.x[input] + token * args.x_stride[input] : nullptr;
#pragma unroll
    for (int i = 0; i < kAhead<kProduct>; ++i) {
      tokens[i].Load(x, args.cols, args.is_aligned, at.group + i * kWarps, lane);
    }
  }
};

// The work of block `block` of `blocks`: an equal share of the rows of tiles of all tasks.
template <Product kProduct>
__device__ __forceinline__ void MultiplyLines(const FewTokensArgs& args, int64_t block,
                                              int64_t blocks) {
  __shared__ Mbarrier full[kWarps][kDepth];
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  unsigned char* slots = DynamicShared() + warp * kDepth * kTileUnitBytes;
  auto* sums = reinterpret_cast<float*>(DynamicShared() + kRingBytes);
  const int64_t lines = args.first_line[args.num_tasks];
  const auto line = static_cast<int>(block * lines / blocks);
  const auto line_end = static_cast<int>((block + 1) * lines / blocks);
  WeightRing ring(args, slots, full[warp], line, line_end, warp, lane);
  LetSuccessorStart();

  constexpr int kStride = kAhead<kProduct> * kWarps;
  GroupCursor next = {line, PassAt(args, line, line_end), warp};
  RawGroups<kProduct> raw;
  if (warp < args.groups) raw.LoadScales(args, next);
  WaitForPredecessor();
  raw.LoadTokens(args, next, lane);
  while (next.line < line_end) {
    const Pass pass = next.pass;
    // The first row of tiles of the pass that is in the scales' next block of rows, or none.
    const int beyond =
        kBlockTiles - (args.tasks[pass.task].first_row / kTile + pass.row) % kBlockTiles;
    float total[kRows<kProduct>][4] = {};
    for (int group = warp; group < args.groups; group += kStride) {
      PackedGroup<kProduct> packed[kAhead<kProduct>];
      float scale[kAhead<kProduct>][2];
#pragma unroll
      for (int i = 0; i < kAhead<kProduct>; ++i) {
        packed[i].Pack(raw.tokens[i], lane);
        for (const int j : {0, 1})
          scale[i][j] = Ue8m0Value(HasScales(kProduct) ? raw.code[i][j] : 127);
      }
      next.group += kStride;
      if (next.group >= args.groups) {
        next.group = warp;
        next.line += pass.count;
        if (next.line < line_end) next.pass = PassAt(args, next.line, line_end);
      }
      if (next.line < line_end) {  // On their way while this pass multiplies.
        raw.LoadScales(args, next);
        raw.LoadTokens(args, next, lane);
      }
#pragma unroll
      for (int i = 0; i < kAhead<kProduct>; ++i) {
        const int at = group + i * kWarps;
        if (at >= args.groups) break;
        const int steps = min(kUnitSteps, args.tiles_in_row - at * kUnitSteps);
#pragma unroll
        for (int row = 0; row < kRows<kProduct>; ++row) {
          if (row >= pass.count) break;
          AddGroup<kProduct>(ring.Wait(), steps, lane, packed[i],
                             row < beyond ? scale[i][0] : scale[i][1], total[row]);
          ring.Release();
        }
      }
    }
    if (warp >= args.groups) {  // It has no share of K.
      next.line += pass.count;
      if (next.line < line_end) next.pass = PassAt(args, next.line, line_end);
    }
    WritePass(args, pass, sums, warp, lane, total);
  }
}

// Grid: [at most a block a multiprocessor, and a row of tiles for each; eights of tokens]. Block:
// kThreads. Shared memory: kSharedBytes, rings and then sums, [kWarps][kRows][4][32].
template <Product kProduct>
__global__ __launch_bounds__(kThreads, kBlocksTogether) void FewTokens(
    const __grid_constant__ FewTokensArgs args) {
  MultiplyLines<kProduct>(args, blockIdx.x, gridDim.x);
}

// Linears of two formats: the first `blocks_of_first` blocks of the grid have those of the first.
struct TwoFormatsArgs {
  FewTokensArgs first, second;
  int blocks_of_first;
};
// Grid, block, shared memory: those of FewTokens.
template <Product kFirst, Product kSecond>
__global__ __launch_bounds__(kThreads, kBlocksTogether) void FewTokensOfTwoFormats(
    const __grid_constant__ TwoFormatsArgs args) {
  const auto block = static_cast<int>(blockIdx.x);
  const int rest = static_cast<int>(gridDim.x) - args.blocks_of_first;
  if (block < args.blocks_of_first) {
    MultiplyLines<kFirst>(args.first, block, args.blocks_of_first);
  } else {
    MultiplyLines<kSecond>(args.second, block - args.blocks_of_first, rest);
  }
}

LaunchShape ShapeOf(int blocks, int tokens) {
  return {.grid = dim3(static_cast<unsigned>(blocks), CeilDiv(tokens, 8)),
          .block = dim3(kThreads),
          .shared_bytes = kSharedBytes,
          .overlaps_predecessor = true};
}
int LinesOf(const FewTokensArgs& args) { return args.first_line[args.num_tasks]; }

template <Product kProduct>
absl::Status LaunchProduct(FewTokensArgs args, const Exec& exec) {
  args.pass_rows = kRows<kProduct>;
  return Launch("LinearFewTokens", ShapeOf(std::min(exec.num_sms, LinesOf(args)), args.tokens),
                exec, FewTokens<kProduct>, args);
}

template <Product kFirst, Product kSecond>
absl::Status LaunchTwo(const FewTokensArgs& first, const FewTokensArgs& second, const Exec& exec) {
  TwoFormatsArgs args = {first, second, 0};
  args.first.pass_rows = kRows<kFirst>;
  args.second.pass_rows = kRows<kSecond>;
  const auto tiles_of = [](const FewTokensArgs& a) { return int64_t{LinesOf(a)} * a.tiles_in_row; };
  const int64_t tiles = tiles_of(first) + tiles_of(second);
  const int blocks = std::min(exec.num_sms, LinesOf(first) + LinesOf(second));
  const auto share = static_cast<int>((blocks * tiles_of(first) + tiles / 2) / tiles);
  const int least = std::max(1, blocks - LinesOf(second));
  args.blocks_of_first = std::clamp(share, least, std::min(blocks - 1, LinesOf(first)));
  return Launch("LinearFewTokensOfTwoFormats", ShapeOf(blocks, first.tokens), exec,
                FewTokensOfTwoFormats<kFirst, kSecond>, args);
}

FewTokensArgs ArgsOf(std::span<const LinearArgs> linears, const Exec& exec) {
  const StreamPlan plan = PlanStream(linears, 1, exec);
  FewTokensArgs args = {};
  args.cols = static_cast<int>(plan.pack.cols);
  args.num_tasks = plan.stream.num_tasks;
  args.tokens = plan.stream.tokens;
  args.groups = plan.stream.row_units;
  args.tiles_in_row = plan.stream.tiles_in_row;
  args.scale_columns = plan.stream.scale_columns;
  args.is_aligned = args.cols % 4 == 0;
  for (int i = 0; i < args.num_tasks; ++i) {
    args.tasks[i] = plan.stream.tasks[i];
    args.first_line[i + 1] = args.first_line[i] + args.tasks[i].row_tiles;
  }
  for (int i = 0; i < plan.inputs; ++i) {
    args.x[i] = plan.pack.x[i];
    args.x_stride[i] = plan.pack.x_stride[i];
    args.is_aligned = args.is_aligned && reinterpret_cast<uintptr_t>(args.x[i]) % 16 == 0 &&
                      args.x_stride[i] % 4 == 0;
  }
  return args;
}

}  // namespace

bool FitsFewTokens(std::span<const LinearArgs> linears) {
  // What eights of tokens read of weights from the L2: beyond it the units of more tokens win.
  constexpr int64_t kMostBytes = int64_t{24} << 20;
  const int64_t tokens = linears[0].x.rows;
  if (tokens <= kFewTokens) return true;
  int64_t bytes = 0;
  for (const LinearArgs& linear : linears) bytes += TiledBytes(linear.weight);
  return tokens <= kSwapAbTokens && bytes * CeilDiv(tokens, 8) <= kMostBytes;
}

absl::Status LaunchLinearManyFewTokens(std::span<const LinearArgs> linears, const Exec& exec) {
  const FewTokensArgs args = ArgsOf(linears, exec);
  switch (ProductOf(linears[0])) {
    case Product::kE4m3:
      return LaunchProduct<Product::kE4m3>(args, exec);
    case Product::kE4m3ByF16:
      return LaunchProduct<Product::kE4m3ByF16>(args, exec);
    default:
      return LaunchProduct<Product::kBf16>(args, exec);
  }
}

bool FitsTwoFormats(std::span<const LinearArgs> first, std::span<const LinearArgs> second) {
  return first[0].x.rows == second[0].x.rows && first[0].x.rows <= kFewTokens &&
         ProductOf(first[0]) == Product::kE4m3 && ProductOf(second[0]) == Product::kBf16;
}

absl::Status LaunchLinearTwoFormats(std::span<const LinearArgs> first,
                                    std::span<const LinearArgs> second, const Exec& exec) {
  return LaunchTwo<Product::kE4m3, Product::kBf16>(ArgsOf(first, exec), ArgsOf(second, exec), exec);
}

}  // namespace isthmus::kernels
