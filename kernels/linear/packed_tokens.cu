// SPDX-License-Identifier: Apache-2.0
// The small launch before the tensor-core kernels of linear: packs tokens, quantised or split on
// the way. Bound by latency for few tokens, else by memory: tokens * K * 4 bytes in, at most as
// many out. Also the plan of those kernels' work, which the same file of arguments describes.
#include "kernels/linear/packed_tokens.cuh"

#include "kernels/linear/linear_stream.cuh"

namespace isthmus::kernels {
namespace {

// The kCount inputs from k on. Null x: zeros.
template <int kCount>
__device__ __forceinline__ void LoadInputs(const float* x, int64_t k, int64_t cols,
                                           float (&value)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) value[i] = x != nullptr && k + i < cols ? x[k + i] : 0.0f;
}
// The largest magnitude among the warp's inputs, at least `floor`; passes over NaN.
__device__ __forceinline__ float LargestOf(const float (&value)[4], float floor) {
  float amax = floor;
#pragma unroll
  for (int i = 0; i < 4; ++i) amax = fmaxf(amax, fabsf(value[i]));
  return WarpMax(amax);
}

constexpr int kPackWarps = 8;
constexpr int kPackTogether = 8;  // Tokens that a warp loads at a time.

// Grid: [units, inputs, blocks of tokens]. Block: kPackWarps warps, each of which packs
// kPackTogether tokens at a time.
template <Product kProduct>
__global__ __launch_bounds__(kPackWarps* kWarpLanes) void PackTokens(
    const __grid_constant__ PackArgs args) {
  __shared__ unsigned any_low;
  LetSuccessorStart();
  if (threadIdx.x == 0) any_low = 0;
  __syncthreads();
  WaitForPredecessor();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int tiles = args.tiles;
  const int64_t unit = blockIdx.x;
  const int input = static_cast<int>(blockIdx.y);
  const int64_t first = int64_t{blockIdx.z} * 8 * tiles;
  const int64_t block = int64_t{blockIdx.y} * gridDim.z + blockIdx.z;
  uint8_t* out = args.units + (block * gridDim.x + unit) * UnitBytes(kProduct, tiles);
  auto* words = reinterpret_cast<uint32_t*>(out);
  auto* scales = reinterpret_cast<float*>(out + UnitWordBytes(kProduct, tiles));
  auto* low_words = reinterpret_cast<uint32_t*>(out + UnitHeadBytes(kProduct, tiles));
  const int64_t k = unit * UnitInputs(kProduct) + lane * (UnitInputs(kProduct) / kWarpLanes);

  constexpr int kRun = UnitInputs(kProduct) / kWarpLanes;
  float value[kPackTogether][kRun];
  uint32_t low_bits = 0;
  for (int begin = warp; begin < 8 * tiles; begin += kPackTogether * kPackWarps) {
#pragma unroll
    for (int j = 0; j < kPackTogether; ++j) {  // All on their way before the first is packed.
      const int64_t token = first + begin + j * kPackWarps;
      const bool is_there = begin + j * kPackWarps < 8 * tiles && token < args.tokens;
      LoadInputs(is_there ? args.x[input] + token * args.x_stride[input] : nullptr, k, args.cols,
                 value[j]);
    }
#pragma unroll
    for (int j = 0; j < kPackTogether; ++j) {
      const int i = begin + j * kPackWarps;
      if (i >= 8 * tiles) break;
      const int place =
          WordInUnit(kProduct, tiles, lane / 8, i / 8, i % 8 * 4 + lane % 4, lane % 8 / 4);
      float scale = 0.0f;
      if constexpr (kProduct == Product::kE4m3) {
        scale = PowerOfTwo(Fp8ScaleExponent(LargestOf(value[j], 0.0f)));
        words[place] = E4m3Word(value[j], 1.0f / scale);
      } else if constexpr (kProduct == Product::kE4m3ByF16) {
        const int exponent = F16UnitExponent(LargestOf(value[j], kF16AmaxFloor));
        scale = PowerOfTwo(exponent);
        const uint4 four = SplitF16(value[j], PowerOfTwo(-exponent));
        *reinterpret_cast<uint2*>(words + place) = make_uint2(four.x, four.y);
        *reinterpret_cast<uint2*>(low_words + place) = make_uint2(four.z, four.w);
        low_bits |= (four.z | four.w) & 0x7fff7fffu;
      } else {
        const uint2 both = SplitBf16(value[j]);
        words[place] = both.x;
        low_words[place] = both.y;
        low_bits |= both.y & 0x7fff7fffu;
      }
      if (HasScales(kProduct) && lane == 0) scales[i] = scale;
    }
  }
  if constexpr (HasLowParts(kProduct)) {
    if (__any_sync(kFullWarp, low_bits != 0) && lane == 0) atomicOr(&any_low, 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
      *reinterpret_cast<uint4*>(out + UnitFlagByte(kProduct, tiles)) = make_uint4(any_low, 0, 0, 0);
    }
  }
}

}  // namespace

Product ProductOf(const LinearArgs& args) {
  if (args.weight.format == WeightFormat::kBf16) return Product::kBf16;
  return args.quantise_input || args.input_is_quantised ? Product::kE4m3 : Product::kE4m3ByF16;
}

StreamPlan PlanStream(std::span<const LinearArgs> linears, int token_tiles, const Exec& exec) {
  StreamPlan plan;
  StreamArgs& stream = plan.stream;
  PackArgs& pack = plan.pack;
  stream = {};
  pack = {};
  int64_t blocks = 0;
  for (const LinearArgs& linear : linears) {
    const WeightView& w = linear.weight;
    int input = 0;
    while (input < plan.inputs &&
           (pack.x[input] != linear.x.f32(0) || pack.x_stride[input] != linear.x.row_stride)) {
      ++input;
    }
    if (input == plan.inputs) {
      pack.x[input] = linear.x.f32(0);
      pack.x_stride[input] = linear.x.row_stride;
      ++plan.inputs;
    }
    stream.tasks[stream.num_tasks++] = {static_cast<const uint8_t*>(w.elements),
                                        w.scales,
                                        linear.out.f32(0),
                                        linear.out.row_stride,
                                        static_cast<int>(w.rows),
                                        static_cast<int>(CeilDiv(w.rows, kPanelRows)),
                                        static_cast<int>(w.first_row),
                                        input,
                                        static_cast<int>(blocks),
                                        linear.round_output};
    blocks += CeilDiv(w.rows, kPanelRows * kUnitRowTiles);
  }
  const LinearArgs& first = linears[0];
  const WeightView& w = first.weight;
  stream.tokens = pack.tokens = static_cast<int>(first.x.rows);
  stream.token_blocks = static_cast<int>(CeilDiv(first.x.rows, int64_t{8} * token_tiles));
  stream.row_units = static_cast<int>(CeilDiv(w.cols, UnitInputs(ProductOf(first))));
  stream.tiles_in_row = static_cast<int>(TilesInRow(w));
  stream.scale_columns = static_cast<int>(ScaleColumns(w));
  stream.num_units = static_cast<int>(blocks) * stream.token_blocks * stream.row_units;
  stream.counters = exec.counters;
  pack.tiles = token_tiles;
  pack.cols = w.cols;
  return plan;
}

absl::Status LaunchPack(const StreamPlan& plan, Product product, const Exec& exec) {
  const LaunchShape shape = {
      .grid = dim3(static_cast<unsigned>(plan.stream.row_units), static_cast<unsigned>(plan.inputs),
                   static_cast<unsigned>(plan.stream.token_blocks)),
      .block = dim3(kPackWarps * kWarpLanes),
      .overlaps_predecessor = true};
  switch (product) {
    case Product::kE4m3:
      return Launch("PackTokens", shape, exec, PackTokens<Product::kE4m3>, plan.pack);
    case Product::kE4m3ByF16:
      return Launch("PackTokens", shape, exec, PackTokens<Product::kE4m3ByF16>, plan.pack);
    default:
      return Launch("PackTokens", shape, exec, PackTokens<Product::kBf16>, plan.pack);
  }
}

}  // namespace isthmus::kernels
