// SPDX-License-Identifier: Apache-2.0
// The bits of every output are those of the stated order, whatever M, tile, threads, layout and
// SIMD target.
#include "kernels/core/gemm.h"

#include <cmath>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/core/pack.h"
#include "kernels/core/workspace.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/simd_targets.h"

namespace isthmus::kernels {
namespace {

using testing::OwnedWeight;
using testing::SameBits;

constexpr WeightFormat kFormats[] = {WeightFormat::kF32, WeightFormat::kBf16,
                                     WeightFormat::kFp8Block128, WeightFormat::kMxfp4,
                                     WeightFormat::kNvfp4};

// The order of gemm.h in scalar code, from the stored bytes.
float ScalarScale(const WeightView& w, int64_t n, int64_t k) {
  switch (w.format) {
    case WeightFormat::kFp8Block128:
      return Ue8m0Value(w.scales[(w.first_row + n) / 128 * ((w.first_col + w.cols + 127) / 128) +
                                 (w.first_col + k) / 128]);
    case WeightFormat::kMxfp4:
      return Ue8m0Value(w.scales[n * (w.cols / 32) + k / 32]);
    case WeightFormat::kNvfp4:
      return Fp8E4m3Value(w.scales[n * (w.cols / 16) + k / 16]) * w.global_scale;
    default:
      return 1.0f;
  }
}
float ScalarElement(const WeightView& w, int64_t n, int64_t k) {
  const auto* bytes = static_cast<const uint8_t*>(w.elements);
  switch (w.format) {
    case WeightFormat::kF32:
      return static_cast<const float*>(w.elements)[n * w.cols + k];
    case WeightFormat::kBf16:
      return Bf16Value(static_cast<const uint16_t*>(w.elements)[n * w.cols + k]);
    case WeightFormat::kFp8Block128:
      return Fp8E4m3Value(bytes[n * w.cols + k]);
    default: {
      const uint8_t pair = bytes[(n * w.cols + k) / 2];
      return Fp4E2m1Value(static_cast<uint8_t>(k % 2 == 0 ? pair & 15 : pair >> 4));
    }
  }
}
std::vector<float> ScalarGemm(const std::vector<float>& x, int64_t rows, const WeightView& w) {
  int64_t group = 128;
  if (w.format == WeightFormat::kMxfp4) group = 32;
  if (w.format == WeightFormat::kNvfp4) group = w.is_mxfp4_cast ? 32 : 16;
  std::vector<float> out(static_cast<size_t>(rows * w.rows));
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < w.rows; ++n) {
      float total = 0.0f;
      for (int64_t begin = -w.first_col; begin < w.cols; begin += group) {
        float acc = 0.0f;
        const int64_t first = std::max<int64_t>(begin, 0);
        for (int64_t k = first; k < std::min(begin + group, w.cols); ++k) {
          acc = std::fma(x[static_cast<size_t>(m * w.cols + k)], ScalarElement(w, n, k), acc);
        }
        total = std::fma(acc, ScalarScale(w, n, first), total);
      }
      out[static_cast<size_t>(m * w.rows + n)] = total;
    }
  }
  return out;
}

std::vector<float> RunGemm(const std::vector<float>& x, int64_t rows, const WeightView& w,
                           const Exec& exec = {}) {
  std::vector<float> in = x;
  testing::GuardedFloats out(rows * w.rows);
  Gemm(F32Matrix(in.data(), rows, w.cols), w, F32Matrix(out.data(), rows, w.rows), exec);
  EXPECT_TRUE(out.Intact());
  return {out.values().begin(), out.values().end()};
}

struct Shape {
  int64_t rows, cols, outputs;
};

class GemmTargetTest : public testing::SimdTargetTest {};
ISTHMUS_INSTANTIATE_SIMD_TARGETS(GemmTargetTest);

TEST_P(GemmTargetTest, GivesTheBitsOfTheStatedOrderInBothLayouts) {
  const Shape shapes[] = {{1, 128, 16}, {1, 256, 200},  {2, 32, 33},    {3, 160, 70},
                          {4, 384, 31}, {5, 96, 48},    {7, 288, 17},   {8, 128, 1},
                          {13, 64, 40}, {16, 256, 50},  {22, 160, 33},  {32, 128, 40},
                          {33, 96, 48}, {100, 256, 50}, {131, 128, 48}, {200, 32, 16}};
  for (const WeightFormat format : kFormats) {
    for (const Shape& s : shapes) {
      const OwnedWeight w = testing::RandomWeight(uint64_t(s.rows), format, s.outputs, s.cols);
      const OwnedWeight panels = testing::Packed(w.view);
      const std::vector<float> x = testing::OutlierValues(9, s.rows * s.cols);
      const std::vector<float> expected = ScalarGemm(x, s.rows, w.view);
      EXPECT_TRUE(SameBits(RunGemm(x, s.rows, w.view), expected))
          << "rows " << s.rows << " K " << s.cols << " N " << s.outputs << " format "
          << static_cast<int>(format);
      EXPECT_TRUE(SameBits(RunGemm(x, s.rows, panels.view), expected))
          << "panels, rows " << s.rows << " K " << s.cols << " N " << s.outputs << " format "
          << static_cast<int>(format);
    }
  }
}

// K need not fill an fp8 block, a vector or anything else where the format has no groups.
TEST_P(GemmTargetTest, TakesAnyKWhereTheFormatHasNoGroups) {
  for (const WeightFormat format :
       {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block128}) {
    for (const int64_t cols : {1, 2, 3, 127, 129, 255}) {
      for (const int64_t rows : {1, 6}) {
        const OwnedWeight w = testing::RandomWeight(3, format, 19, cols);
        const std::vector<float> x = testing::NormalValues(4, rows * cols);
        EXPECT_TRUE(SameBits(RunGemm(x, rows, w.view), ScalarGemm(x, rows, w.view))) << cols;
        EXPECT_TRUE(
            SameBits(RunGemm(x, rows, testing::Packed(w.view).view), ScalarGemm(x, rows, w.view)))
            << cols;
      }
    }
  }
}

// Blocks of fp8 weights without a NaN are decoded another way than those with one.
TEST_P(GemmTargetTest, KeepsANanOfAWeightToItsOutput) {
  for (const uint8_t code : {uint8_t{0x7f}, uint8_t{0xff}}) {
    OwnedWeight w = testing::RandomWeight(31, WeightFormat::kFp8Block128, 70, 300);
    reinterpret_cast<uint8_t*>(w.elements.data())[20 * 300 + 150] = code;
    for (const int64_t rows : {1, 7, 20, 40}) {
      const std::vector<float> x = testing::NormalValues(32, rows * 300);
      const std::vector<float> got = RunGemm(x, rows, testing::Packed(w.view).view);
      const std::vector<float> expected = ScalarGemm(x, rows, w.view);
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(std::isnan(got[i]), i % 70 == 20) << i << " of " << rows << " rows";
        if (i % 70 == 20) continue;
        ASSERT_EQ(got[i], expected[i]) << i << " of " << rows << " rows";
      }
    }
  }
}

TEST_P(GemmTargetTest, GivesARowTheSameBitsInEveryBatchAndOnEveryThreadCount) {
  constexpr int64_t kRows = 70;
  for (const WeightFormat format : kFormats) {
    const OwnedWeight stored = testing::RandomWeight(5, format, 272, 256);
    const OwnedWeight w = testing::Packed(stored.view);
    const std::vector<float> x = testing::OutlierValues(6, kRows * 256);
    const std::vector<float> all = RunGemm(x, kRows, w.view);
    for (const int64_t batch : {1, 2, 3, 4, 5, 9, 16, 27, 32, 33}) {
      const std::vector<float> part(x.begin(), x.begin() + batch * 256);
      const std::vector<float> expected(all.begin(), all.begin() + batch * 272);
      EXPECT_TRUE(SameBits(RunGemm(part, batch, w.view), expected)) << batch;
    }
    for (const int count : {1, 2, 3, 8}) {
      ThreadPool threads(count);
      Workspace workspace;
      Exec exec;
      exec.threads = &threads;
      exec.workspace = &workspace;
      EXPECT_TRUE(SameBits(RunGemm(x, kRows, w.view, exec), all)) << count;
    }
  }
}

TEST(GemmTest, EveryTargetOfThisProcessorGivesTheSameBits) {
  for (const WeightFormat format : kFormats) {
    const OwnedWeight stored = testing::RandomWeight(11, format, 100, 512);
    const OwnedWeight w = testing::Packed(stored.view);
    for (const int64_t rows : {1, 4, 19, 50}) {
      const std::vector<float> x = testing::OutlierValues(12, rows * 512);
      std::vector<std::vector<float>> results;
      const int ran = testing::ForEachTarget([&] { results.push_back(RunGemm(x, rows, w.view)); });
      ASSERT_GE(ran, 1);
      for (const auto& r : results) EXPECT_TRUE(SameBits(r, results[0]));
    }
  }
}

// Two output groups of 64 rows share one 128-row block of scales (wo_a of a small model).
TEST_P(GemmTargetTest, FindsTheScaleBlockOfARowSlice) {
  const OwnedWeight w = testing::RandomWeight(21, WeightFormat::kFp8Block128, 320, 256);
  const OwnedWeight panels = testing::Packed(w.view);
  for (const int64_t rows : {1, 5}) {
    const std::vector<float> x = testing::NormalValues(22, rows * 256);
    const std::vector<float> whole = ScalarGemm(x, rows, w.view);
    for (const auto& [first, count] : {std::pair{0, 64}, {64, 64}, {128, 64}, {192, 128}}) {
      std::vector<float> expected;
      for (int64_t m = 0; m < rows; ++m) {
        const auto begin = whole.begin() + m * 320 + first;
        expected.insert(expected.end(), begin, begin + count);
      }
      EXPECT_TRUE(SameBits(RunGemm(x, rows, RowSlice(w.view, first, count)), expected)) << first;
      EXPECT_TRUE(SameBits(RunGemm(x, rows, RowSlice(panels.view, first, count)), expected))
          << first;
    }
    // A slice of rows may start anywhere, so a panel may lie in two blocks.
    std::vector<float> expected;
    for (int64_t m = 0; m < rows; ++m) {
      const auto begin = whole.begin() + m * 320 + 121;
      expected.insert(expected.end(), begin, begin + 30);
    }
    EXPECT_TRUE(SameBits(RunGemm(x, rows, RowSlice(w.view, 121, 30)), expected));
  }
}

// Columns [first, first + count) of an fp8 matrix of at most 128 rows, in memory of their own,
// under the scales of the blocks that they touch: what a rank of a tensor-parallel group holds.
OwnedWeight ColumnShare(const WeightView& w, int64_t first, int64_t count) {
  OwnedWeight out;
  out.elements.resize(static_cast<size_t>((w.rows * count + 7) / 8));
  auto* bytes = reinterpret_cast<uint8_t*>(out.elements.data());
  for (int64_t n = 0; n < w.rows; ++n) {
    const uint8_t* row = static_cast<const uint8_t*>(w.elements) + n * w.cols + first;
    std::copy_n(row, count, bytes + n * count);
  }
  out.scales.assign(w.scales + first / 128, w.scales + (first + count + 127) / 128);
  out.view = w;
  out.view.cols = count;
  out.view.first_col = first % 128;
  out.view.elements = out.elements.data();
  out.view.scales = out.scales.data();
  return out;
}

TEST_P(GemmTargetTest, FindsTheScaleBlockOfAShareOfTheColumns) {
  const OwnedWeight w = testing::RandomWeight(23, WeightFormat::kFp8Block128, 72, 576);
  for (const auto& [first, count] : {std::pair{0, 96}, {96, 96}, {64, 64}, {96, 288}, {224, 352}}) {
    const OwnedWeight share = ColumnShare(w.view, first, count);
    const OwnedWeight panels = testing::Packed(share.view);
    for (int64_t n = 0; n < 72; ++n) {
      for (int64_t k = 0; k < count; ++k) {
        ASSERT_EQ(WeightValue(share.view, n, k), WeightValue(w.view, n, first + k)) << first;
        ASSERT_EQ(WeightValue(panels.view, n, k), WeightValue(w.view, n, first + k)) << first;
      }
    }
    for (const int64_t rows : {1, 5, 20}) {
      const std::vector<float> x = testing::NormalValues(24, rows * count);
      const std::vector<float> expected = ScalarGemm(x, rows, share.view);
      EXPECT_TRUE(SameBits(RunGemm(x, rows, share.view), expected)) << first;
      EXPECT_TRUE(SameBits(RunGemm(x, rows, panels.view), expected)) << first;
    }
  }
}

// An NVFP4 matrix that is a cast of MXFP4 gives that matrix's bits (specification 6.3).
TEST_P(GemmTargetTest, GivesAnMxfp4CastTheBitsOfMxfp4) {
  OwnedWeight mx = testing::RandomWeight(31, WeightFormat::kMxfp4, 40, 128);
  OwnedWeight nv = testing::RandomWeight(31, WeightFormat::kNvfp4, 40, 128);
  nv.elements = mx.elements;
  nv.view.elements = nv.elements.data();
  nv.view.is_mxfp4_cast = true;
  nv.view.global_scale = 0x1p-11f;
  for (int64_t n = 0; n < 40; ++n) {
    for (int64_t g = 0; g < 4; ++g) {
      const int exponent = static_cast<int>(mx.scales[size_t(n * 4 + g)]) - 127;
      const uint8_t code = Fp8E4m3Code(PowerOfTwo(exponent + 11));
      ASSERT_EQ(Fp8E4m3Value(code) * 0x1p-11f, PowerOfTwo(exponent));
      nv.scales[size_t(n * 8 + 2 * g)] = nv.scales[size_t(n * 8 + 2 * g + 1)] = code;
    }
  }
  for (const int64_t rows : {1, 3, 20}) {
    const std::vector<float> x = testing::OutlierValues(32, rows * 128);
    const std::vector<float> expected = RunGemm(x, rows, mx.view);
    EXPECT_TRUE(SameBits(RunGemm(x, rows, nv.view), expected)) << rows;
    EXPECT_TRUE(SameBits(RunGemm(x, rows, testing::Packed(nv.view).view), expected)) << rows;
  }
}

TEST_P(GemmTargetTest, GivesManyProductsTheBitsOfEach) {
  const OwnedWeight a = testing::RandomWeight(41, WeightFormat::kMxfp4, 100, 128);
  const OwnedWeight b = testing::RandomWeight(42, WeightFormat::kMxfp4, 100, 128);
  const OwnedWeight c = testing::RandomWeight(43, WeightFormat::kF32, 7, 64);
  std::vector<float> x = testing::NormalValues(44, 40 * 128);
  std::vector<float> y = testing::NormalValues(45, 2 * 64);
  std::vector<float> out(2 * 40 * 100 + 2 * 7);
  float* second = out.data() + 40 * 100;
  float* third = second + 40 * 100;
  const GemmTask tasks[] = {
      {F32Matrix(x.data(), 40, 128), a.view, F32Matrix(out.data(), 40, 100)},
      {F32Matrix(x.data(), 40, 128), b.view, F32Matrix(second, 40, 100)},
      {F32Matrix(x.data(), 0, 128), b.view, F32Matrix(nullptr, 0, 100)},
      {F32Matrix(y.data(), 2, 64), c.view, F32Matrix(third, 2, 7)},
  };
  ThreadPool threads(3);
  Exec exec;
  exec.threads = &threads;
  GemmMany(tasks, exec);
  std::vector<float> expected;
  for (const auto& part : {RunGemm(x, 40, a.view), RunGemm(x, 40, b.view), RunGemm(y, 2, c.view)}) {
    expected.insert(expected.end(), part.begin(), part.end());
  }
  EXPECT_TRUE(SameBits(out, expected));
}

// Columns of wider matrices on both sides; what lies between the rows stays.
TEST_P(GemmTargetTest, LeavesThePartsBetweenStridedRowsAlone) {
  const OwnedWeight w = testing::RandomWeight(51, WeightFormat::kBf16, 21, 40);
  for (const int64_t rows : {2, 9}) {
    std::vector<float> wide_x = testing::NormalValues(52, rows * 64);
    testing::GuardedFloats wide_out(rows * 50);
    for (int64_t i = 0; i < rows * 50; ++i) wide_out.data()[i] = -7.0f;
    Gemm(F32Matrix(wide_x.data(), rows, 64).Columns(8, 40), w.view,
         F32Matrix(wide_out.data(), rows, 50).Columns(5, 21), Exec{});
    std::vector<float> x;
    for (int64_t m = 0; m < rows; ++m) {
      x.insert(x.end(), wide_x.begin() + m * 64 + 8, wide_x.begin() + m * 64 + 48);
    }
    const std::vector<float> expected = ScalarGemm(x, rows, w.view);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t n = 0; n < 50; ++n) {
        const bool inside = n >= 5 && n < 26;
        EXPECT_EQ(wide_out.data()[m * 50 + n], inside ? expected[size_t(m * 21 + n - 5)] : -7.0f);
      }
    }
    EXPECT_TRUE(wide_out.Intact());
  }
}

TEST_P(GemmTargetTest, CarriesNanAndInfinityToTheirRowsAndColumns) {
  const OwnedWeight w = testing::RandomWeight(61, WeightFormat::kFp8Block128, 32, 128);
  const_cast<uint8_t*>(static_cast<const uint8_t*>(w.view.elements))[5 * 128 + 3] = 0x7f;
  for (const int64_t rows : {2, 8}) {
    std::vector<float> x = testing::NormalValues(62, rows * 128);
    x[128 + 7] = std::numeric_limits<float>::infinity();
    const std::vector<float> got = RunGemm(x, rows, w.view);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t n = 0; n < 32; ++n) {
        const float v = got[size_t(m * 32 + n)];
        EXPECT_EQ(std::isfinite(v), m != 1 && n != 5) << m << ", " << n;
      }
    }
  }
}

TEST(GemmTest, KnowsTheValueOfAWeightInBothLayouts) {
  for (const WeightFormat format : kFormats) {
    const OwnedWeight w = testing::RandomWeight(71, format, 37, 160);
    const OwnedWeight panels = testing::Packed(w.view);
    for (int64_t n = 0; n < 37; ++n) {
      for (int64_t k = 0; k < 160; ++k) {
        const double value = WeightValue(w.view, n, k);
        ASSERT_EQ(value, WeightValue(panels.view, n, k));
        const double expected = double{ScalarElement(w.view, n, k)} * ScalarScale(w.view, n, k);
        ASSERT_NEAR(value, expected, 1e-7 * std::fabs(expected));
      }
    }
  }
}

TEST(GemmTest, AnEmptyKGivesZeros) {
  WeightView w;
  w.rows = 3;
  for (const int64_t rows : {1, 9}) {
    std::vector<float> out(size_t(rows * 3), 5.0f);
    float none = 0.0f;
    Gemm(F32Matrix(&none, rows, 0), w, F32Matrix(out.data(), rows, 3), Exec{});
    for (const float v : out) EXPECT_EQ(v, 0.0f);
  }
}

}  // namespace
}  // namespace isthmus::kernels
