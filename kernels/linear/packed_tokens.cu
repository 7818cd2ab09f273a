// SPDX-License-Identifier: Apache-2.0
// The small launch before the tensor-core kernels of linear: packs tokens, quantised or split on
// the way. Bound by latency for few tokens, else by memory: tokens * K * 4 bytes in, at most as
// many out. Also the plan of those kernels' work, which the same file of arguments describes.
#include "kernels/linear/packed_tokens.cuh"

#include "kernels/linear/linear_stream.cuh"

namespace isthmus::kernels {
namespace {

// Word of e4m3 codes of inputs k .. k + 3, and the scale of the warp's whole unit. Null x: zeros.
__device__ __forceinline__ uint32_t PackE4m3(const float* x, int64_t k, int64_t cols,
                                             float* scale) {
  float value[4];
  float amax = 0.0f;
  for (int i = 0; i < 4; ++i) {
    value[i] = x != nullptr && k + i < cols ? x[k + i] : 0.0f;
    amax = fmaxf(amax, fabsf(value[i]));  // Passes over NaN.
  }
  const int exponent = Fp8ScaleExponent(WarpMax(amax));
  *scale = PowerOfTwo(exponent);
  const float inverse = 1.0f / *scale;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= uint32_t{Fp8E4m3Code(value[i] * inverse)} << (8 * i);
  return word;
}

// Words of inputs k, k + 1: rounded to bf16, and what that leaves.
__device__ __forceinline__ uint2 PackBf16(const float* x, int64_t k, int64_t cols) {
  uint2 words = make_uint2(0, 0);
  for (int i = 0; i < 2; ++i) {
    const float value = x != nullptr && k + i < cols ? x[k + i] : 0.0f;
    const uint16_t high = Bf16Bits(value);
    const float rest = value - Bf16Value(high);
    const uint16_t low = fabsf(rest) < INFINITY ? Bf16Bits(rest) : uint16_t{0};
    words.x |= uint32_t{high} << (16 * i);
    words.y |= uint32_t{low} << (16 * i);
  }
  return words;
}

// Words of inputs k .. k + 3 in f16, as multiples of the scale of the warp's whole unit: two words
// (x, y) rounded to 11 bits, and (z, w) what that leaves. The largest magnitude of the unit is at
// most 2^14, so that what f16 cannot hold is below 2^-38 of it.
__device__ __forceinline__ uint4 PackF16(const float* x, int64_t k, int64_t cols, float* scale) {
  float value[4];
  float amax = 1e-30f;
  for (int i = 0; i < 4; ++i) {
    value[i] = x != nullptr && k + i < cols ? x[k + i] : 0.0f;
    amax = fmaxf(amax, fabsf(value[i]));  // Passes over NaN.
  }
  const int exponent = CeilLog2(WarpMax(amax)) - 14;
  *scale = PowerOfTwo(exponent);
  const float inverse = PowerOfTwo(-exponent);
  float high[4];
  float low[4];
  for (int i = 0; i < 4; ++i) {
    const float v = value[i] * inverse;
    const float spread = v * 8193.0f;  // 2^13 + 1: leaves the upper 11 of 24 bits.
    const float rounded = spread - (spread - v);
    const bool is_finite = fabsf(v) < INFINITY;
    high[i] = is_finite ? rounded : v;
    low[i] = is_finite ? v - rounded : 0.0f;
  }
  return make_uint4(F16Pair(high[0], high[1]), F16Pair(high[2], high[3]), F16Pair(low[0], low[1]),
                    F16Pair(low[2], low[3]));
}

constexpr int kPackWarps = 8;

// Grid: [units, inputs, blocks of tokens]. Block: kPackWarps warps, each of which packs a token at
// a time.
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

  uint32_t low_bits = 0;
  for (int i = warp; i < 8 * tiles; i += kPackWarps) {
    const float* x =
        first + i < args.tokens ? args.x[input] + (first + i) * args.x_stride[input] : nullptr;
    const int place =
        WordInUnit(kProduct, tiles, lane / 8, i / 8, i % 8 * 4 + lane % 4, lane % 8 / 4);
    float scale = 0.0f;
    if constexpr (kProduct == Product::kE4m3) {
      words[place] = PackE4m3(x, k, args.cols, &scale);
    } else if constexpr (kProduct == Product::kE4m3ByF16) {
      const uint4 four = PackF16(x, k, args.cols, &scale);
      *reinterpret_cast<uint2*>(words + place) = make_uint2(four.x, four.y);
      *reinterpret_cast<uint2*>(low_words + place) = make_uint2(four.z, four.w);
      low_bits |= (four.z | four.w) & 0x7fff7fffu;
    } else {
      const uint2 both = PackBf16(x, k, args.cols);
      words[place] = both.x;
      low_words[place] = both.y;
      low_bits |= both.y & 0x7fff7fffu;
    }
    if (HasScales(kProduct) && lane == 0) scales[i] = scale;
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
