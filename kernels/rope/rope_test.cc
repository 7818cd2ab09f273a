// SPDX-License-Identifier: Apache-2.0
// Frequencies against the author's bits; the rotation by hand, by unit vectors and by its bound.
#include "kernels/rope/rope.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/rope/rope_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/golden_file.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/simd_targets.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const RopeVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path") << " of architecture "
       << variant.arches.begin;
}

namespace {

using kernels::testing::NormalValues;
using kernels::testing::SameBits;
using kernels::testing::WithinBound;
using ::testing::HasSubstr;

constexpr RopeTableParams kSlidingTable = {};
constexpr RopeTableParams kCompressedTable = {.theta = 160000.0, .original_positions = 65536};

struct Shape {
  int64_t head_dim = 512;
  bool inverse = false;
  Arithmetic arithmetic = Arithmetic::kMath;
};

// `x` rotated at `positions`.
std::vector<float> Rotated(std::vector<float> x, const std::vector<int64_t>& positions,
                           const std::vector<float>& frequency, const Shape& shape,
                           const Exec& exec = {}) {
  const auto tokens = static_cast<int64_t>(positions.size());
  const RopeArgs args = {.x = F32Matrix(x.data(), tokens, static_cast<int64_t>(x.size()) / tokens),
                         .head_dim = shape.head_dim,
                         .positions = positions,
                         .frequency = frequency,
                         .inverse = shape.inverse,
                         .arithmetic = shape.arithmetic};
  const absl::Status status = Rope(args, exec);
  EXPECT_TRUE(status.ok()) << status;
  return x;
}

// ---- Frequencies.

// The f32 values of an independent numpy implementation of the author's table.
constexpr uint32_t kSlidingBits[] = {
    0x3f800000, 0x3f3ff911, 0x3f0ff59a, 0x3ed7e89b, 0x3ea1e89b, 0x3e72d423, 0x3e361887, 0x3e088d77,
    0x3dcccccd, 0x3d99940d, 0x3d6655c2, 0x3d2cba15, 0x3d0186e3, 0x3cc2434f, 0x3c91ad39, 0x3c5a7bf2,
    0x3c23d70a, 0x3bf5b9b0, 0x3bb8449c, 0x3b8a2e77, 0x3b4f3e38, 0x3b1b690d, 0x3ae91528, 0x3aaec98e,
    0x3a83126f, 0x3a44948c, 0x3a136a16, 0x39dd1725, 0x39a5cb60, 0x3978a815, 0x393a7753, 0x390bd472};
constexpr uint32_t kCompressedBits[] = {
    0x3f800000, 0x3f300a3a, 0x3ef21c1f, 0x3ea67d01, 0x3e64f92e, 0x3e1d7475, 0x3dd88cb4, 0x3d94e963,
    0x3d4ccccd, 0x3d0cd4fb, 0x3cc1b019, 0x3c8530ce, 0x3c372dbf, 0x3bfbed88, 0x3bad3d5e, 0x3b6e4237,
    0x3b147ae1, 0x3ab714e0, 0x3a5ebdb6, 0x3a0530ce, 0x399bb3af, 0x39305978, 0x38be904d, 0x383e9b5f,
    0x37a3d70c, 0x36b443d0, 0x3677eba6, 0x362a7be8, 0x35ea77ff, 0x35a13bdc, 0x355dbf30, 0x35187c4d};
// Specification 3.3, f64 values to the digits printed there.
constexpr double kCompressedValues[] = {1,
                                        0.687656022,
                                        0.472870805,
                                        0.325172456,
                                        0.223606798,
                                        0.153764561,
                                        0.105737126,
                                        0.0727107717,
                                        0.05,
                                        0.0343828011,
                                        0.0236435402,
                                        0.0162586228,
                                        0.0111803399,
                                        0.00768822805,
                                        0.00528685632,
                                        0.00363553858,
                                        0.002265625,
                                        0.00139680129,
                                        0.000849689727,
                                        0.000508081963,
                                        0.000296977778,
                                        0.000168179989,
                                        9.0867843e-05,
                                        4.54442323e-05,
                                        1.953125e-05,
                                        5.37231267e-06,
                                        3.69430316e-06,
                                        2.54040981e-06,
                                        1.74692811e-06,
                                        1.20128563e-06,
                                        8.260713e-07,
                                        5.68052904e-07};

std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

TEST(RopeFrequenciesTest, GivesTheAuthorsBitsForSlidingLayers) {
  EXPECT_THAT(Bits(RopeFrequencies(kSlidingTable)), ::testing::ElementsAreArray(kSlidingBits));
}

TEST(RopeFrequenciesTest, GivesTheAuthorsBitsForCompressedLayers) {
  EXPECT_THAT(Bits(RopeFrequencies(kCompressedTable)),
              ::testing::ElementsAreArray(kCompressedBits));
}

TEST(RopeFrequenciesTest, MatchesTheListOfTheSpecification) {
  const std::vector<float> frequency = RopeFrequencies(kCompressedTable);
  ASSERT_EQ(frequency.size(), std::size(kCompressedValues));
  for (size_t i = 0; i < frequency.size(); ++i) {
    // The list was made in f64; the author's f32 operations leave a few ulp (specification 11).
    EXPECT_NEAR(frequency[i] / kCompressedValues[i], 1.0, 3e-6) << "pair " << i;
  }
}

TEST(RopeFrequenciesTest, IsAPowerOfThetaWithoutYarn) {
  for (const double theta : {10000.0, 160000.0, 500000.0}) {
    for (const int rope_dim : {2, 8, 64, 96, 128}) {
      const std::vector<float> frequency = RopeFrequencies({.rope_dim = rope_dim, .theta = theta});
      ASSERT_EQ(static_cast<int>(frequency.size()), rope_dim / 2);
      for (int i = 0; i < rope_dim / 2; ++i) {
        const double expected = std::pow(theta, -2.0 * i / rope_dim);
        // The exponent 2i / rope_dim in f32 moves the value by up to 2^-24 * ln(theta).
        EXPECT_NEAR(frequency[i] / expected, 1.0, 2e-6) << theta << ", " << rope_dim << ", " << i;
      }
    }
  }
}

TEST(RopeFrequenciesTest, DividesOnlySlowPairsByTheFactor) {
  const std::vector<float> plain = RopeFrequencies({.theta = 160000.0});
  const std::vector<float> yarn = RopeFrequencies(kCompressedTable);
  for (int i = 0; i <= 15; ++i) EXPECT_EQ(yarn[i], plain[i]) << "pair " << i;
  for (int i = 25; i < 32; ++i) EXPECT_EQ(yarn[i], plain[i] / 16.0f) << "pair " << i;
  for (int i = 16; i < 25; ++i) {
    EXPECT_LT(yarn[i], plain[i]) << "pair " << i;
    EXPECT_GT(yarn[i], plain[i] / 16.0f) << "pair " << i;
  }
}

// ---- Rotation.

TEST(RopeTest, RotatesInterleavedPairsAtTheEndOfEachHead) {
  // Two heads of 6, the last 4 rotated; frequency 0 leaves the second pair alone.
  const float half_pi = 1.5707963f;
  const std::vector<float> x = {9, 8, 1, 2, 3, 4, 7, 6, 5, 10, 11, 12};
  const std::vector<float> y = Rotated(x, {1}, {half_pi, 0.0f}, {.head_dim = 6});
  EXPECT_EQ(std::vector<float>(y.begin(), y.begin() + 2), (std::vector<float>{9, 8}));
  EXPECT_NEAR(y[2], -2.0f, 1e-6);  // (1, 2) by 90 degrees is (-2, 1).
  EXPECT_NEAR(y[3], 1.0f, 1e-6);
  EXPECT_EQ(y[4], 3.0f);
  EXPECT_EQ(y[5], 4.0f);
  EXPECT_EQ(y[6], 7.0f);
  EXPECT_NEAR(y[8], -10.0f, 1e-5);
  EXPECT_NEAR(y[9], 5.0f, 1e-5);
  EXPECT_EQ(y[11], 12.0f);
}

TEST(RopeTest, TurnsTheOtherWayWhenInverse) {
  const std::vector<float> y = Rotated({1, 2}, {1}, {1.5707963f}, {.head_dim = 2, .inverse = true});
  EXPECT_NEAR(y[0], 2.0f, 1e-6);
  EXPECT_NEAR(y[1], -1.0f, 1e-6);
}

TEST(RopeTest, LeavesPositionZeroAlone) {
  const std::vector<float> x = NormalValues(1, 2 * 512);
  EXPECT_TRUE(SameBits(Rotated(x, {0, 0}, RopeFrequencies(kCompressedTable), {}), x));
}

TEST(RopeTest, RoundsOnlyTheRotatedPartToBf16) {
  const std::vector<float> x = NormalValues(2, 2 * 128);
  const std::vector<float> frequency = RopeFrequencies(kSlidingTable);
  const std::vector<float> exact = Rotated(x, {77}, frequency, {.head_dim = 128});
  const std::vector<float> rounded =
      Rotated(x, {77}, frequency, {.head_dim = 128, .arithmetic = Arithmetic::kReference});
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(rounded[i], i % 128 < 64 ? x[i] : RoundBf16(exact[i])) << i;
  }
}

TEST(RopeTest, InverseUndoesTheRotation) {
  const std::vector<float> x = NormalValues(3, 3 * 512);
  const std::vector<int64_t> positions = {1, 4097, 1048575};
  const std::vector<float> frequency = RopeFrequencies(kCompressedTable);
  const std::vector<float> there = Rotated(x, positions, frequency, {});
  const std::vector<float> back = Rotated(there, positions, frequency, {.inverse = true});
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(back[i], x[i], 2e-6) << i;
}

TEST(RopeTest, WritesOnlyTheColumnsOfStridedRows) {
  std::vector<float> wide = NormalValues(4, 2 * 100);
  const std::vector<float> before = wide;
  const std::vector<int64_t> positions = {5, 6};
  const std::vector<float> frequency = RopeFrequencies({.rope_dim = 20});
  const MatrixView x = {wide.data(), DType::kF32, 2, 24, 100};
  ASSERT_TRUE(
      Rope({.x = x, .head_dim = 24, .positions = positions, .frequency = frequency}, Exec{}).ok());
  for (int64_t i = 0; i < 200; ++i) {
    const bool rotated = i % 100 >= 4 && i % 100 < 24;
    EXPECT_EQ(wide[i] == before[i], !rotated) << i;
  }
}

TEST(RopeTest, TakesNoTokens) {
  const std::vector<float> frequency = {1.0f};
  EXPECT_TRUE(
      Rope({.x = F32Matrix(nullptr, 0, 4), .head_dim = 4, .positions = {}, .frequency = frequency},
           Exec{})
          .ok());
}

// ---- Refusals.

struct SmallCase {
  std::vector<float> x = std::vector<float>(8);
  std::vector<int64_t> positions = {1, 2};
  std::vector<float> frequency = {1.0f};
  RopeArgs args = {.x = F32Matrix(x.data(), 2, 4),
                   .head_dim = 2,
                   .positions = positions,
                   .frequency = frequency};
};

void ExpectRefused(const RopeArgs& args, const char* reason) {
  const absl::Status status = Rope(args, Exec{});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(reason));
  EXPECT_EQ(RopeDefinition(args, Exec{}), status);
}

TEST(RopeTest, RefusesHeadsThatDoNotFillARow) {
  SmallCase c;
  c.args.head_dim = 3;
  ExpectRefused(c.args, "4 columns, head_dim is 3");
}

TEST(RopeTest, RefusesMorePairsThanAHeadHolds) {
  SmallCase c;
  c.frequency = {1.0f, 0.5f};
  c.args.frequency = c.frequency;
  ExpectRefused(c.args, "2 frequencies");
  c.args.frequency = {};
  ExpectRefused(c.args, "0 frequencies");
}

TEST(RopeTest, RefusesMorePairsThanItsTableHolds) {
  SmallCase c;
  c.x.resize(2 * 256);
  c.frequency.resize(65);
  c.args.x = F32Matrix(c.x.data(), 2, 256);
  c.args.head_dim = 256;
  c.args.frequency = c.frequency;
  ExpectRefused(c.args, "65 frequencies");
}

TEST(RopeTest, RefusesPositionsForAnotherNumberOfTokens) {
  SmallCase c;
  c.args.positions = c.args.positions.first(1);
  ExpectRefused(c.args, "x has 2 tokens, positions 1");
}

TEST(RopeTest, RefusesPositionsOutOfRangeBeforeItWrites) {
  SmallCase c;
  c.x.assign(8, 1.0f);
  c.positions[1] = -1;
  ExpectRefused(c.args, "position of token 1 is -1");
  c.positions[1] = int64_t{1} << 31;
  ExpectRefused(c.args, "position of token 1 is 2147483648");
  EXPECT_EQ(c.x, std::vector<float>(8, 1.0f));
}

TEST(RopeTest, RefusesTypesAndStridesOutsideTheContract) {
  SmallCase c;
  c.args.x.row_stride = 3;
  ExpectRefused(c.args, "row stride 3");
  c.args.x.dtype = DType::kBf16;
  ExpectRefused(c.args, "x must be f32");
}

TEST(RopeTest, SaysWhenAnArchitectureHasNoVariant) {
  SmallCase c;
  EXPECT_EQ(Rope(c.args, Exec{.arch = 1}).code(), absl::StatusCode::kUnimplemented);
}

// ---- Golden vectors, invariance and bounds.

TEST(RopeGoldenTest, MatchesTheUnitVectors) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_rope.safetensors");
  const std::vector<float> x = file.at("x").F32();
  const std::vector<float> sine = file.at("sin").F32();
  const std::vector<float> cosine = file.at("cos").F32();
  const std::vector<float> forward = file.at("y_fwd").F32();
  const std::vector<float> inverse = file.at("y_inv").F32();
  for (int64_t t = 0; t < 32; ++t) {
    // The file gives angles by their sine and cosine: they become frequencies at position 1.
    std::vector<float> frequency;
    for (int64_t i = 0; i < 32; ++i) {
      frequency.push_back(
          static_cast<float>(std::atan2(double{sine[t * 32 + i]}, double{cosine[t * 32 + i]})));
    }
    const std::vector<float> row(x.begin() + t * 64, x.begin() + (t + 1) * 64);
    const std::vector<float> there = Rotated(row, {1}, frequency, {.head_dim = 64});
    const std::vector<float> back = Rotated(row, {1}, frequency, {.head_dim = 64, .inverse = true});
    for (int64_t d = 0; d < 64; ++d) {
      EXPECT_NEAR(there[d], forward[t * 64 + d], 1e-6) << t << ", " << d;
      EXPECT_NEAR(back[d], inverse[t * 64 + d], 1e-6) << t << ", " << d;
    }
  }
}

std::vector<int64_t> Positions(int64_t tokens) {
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < tokens; ++t) positions.push_back(t * t * 9973 % 1048576);
  return positions;
}

TEST(RopeTest, DependsNeitherOnTheBatchNorOnTheThreads) {
  const int64_t tokens = 13;
  const int64_t columns = 8 * 512;
  const std::vector<float> x = NormalValues(5, tokens * columns);
  const std::vector<int64_t> positions = Positions(tokens);
  const std::vector<float> frequency = RopeFrequencies(kCompressedTable);
  const Shape shape = {.arithmetic = Arithmetic::kReference};
  const std::vector<float> alone = Rotated(x, positions, frequency, shape);
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    EXPECT_TRUE(SameBits(Rotated(x, positions, frequency, shape, Exec{.threads = &pool}), alone));
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const std::vector<float> row(x.begin() + t * columns, x.begin() + (t + 1) * columns);
    EXPECT_TRUE(SameBits(Rotated(row, {positions[t]}, frequency, shape),
                         std::span(alone).subspan(t * columns, columns)));
  }
}

using RopeTargetTest = kernels::testing::SimdTargetTest;

TEST_P(RopeTargetTest, GivesTheBitsOfTheBestTarget) {
  for (const int rope_dim : {2, 14, 16, 36, 64, 128}) {
    const std::vector<float> x = NormalValues(6, 5 * 3 * 128);
    const std::vector<float> frequency = RopeFrequencies({.rope_dim = rope_dim});
    const Shape shape = {.head_dim = 128, .arithmetic = Arithmetic::kReference};
    const std::vector<float> here = Rotated(x, Positions(5), frequency, shape);
    kernels::testing::ForceTarget(0);
    const std::vector<float> best = Rotated(x, Positions(5), frequency, shape);
    kernels::testing::ForceTarget(GetParam());
    EXPECT_TRUE(SameBits(here, best)) << "rope_dim " << rope_dim;
  }
}
ISTHMUS_INSTANTIATE_SIMD_TARGETS(RopeTargetTest);

// The definition's loops in f32.
void Naive(const RopeArgs& args) {
  const auto pairs = static_cast<int64_t>(args.frequency.size());
  for (int64_t t = 0; t < args.x.rows; ++t) {
    for (int64_t head = args.head_dim; head <= args.x.cols; head += args.head_dim) {
      float* x = args.x.f32(t) + head - 2 * pairs;
      for (int64_t i = 0; i < pairs; ++i) {
        const float angle = static_cast<float>(args.positions[t]) * args.frequency[i];
        const auto sine = static_cast<float>(std::sin(double{angle}));
        const auto cosine = static_cast<float>(std::cos(double{angle}));
        const float a = x[2 * i];
        const float b = x[2 * i + 1];
        x[2 * i] = a * cosine - b * sine;
        x[2 * i + 1] = a * sine + b * cosine;
      }
    }
  }
}

// Runs once per table entry: a new variant is tested by being listed.
class RopeVariantTest : public ::testing::TestWithParam<RopeVariant> {};

TEST_P(RopeVariantTest, StaysWithinItsBound) {
  const RopeVariant& variant = GetParam();
  const int64_t tokens = 11;
  const int64_t columns = 64 * 512;  // The query: 64 heads.
  const std::vector<int64_t> positions = Positions(tokens);
  const std::vector<float> x = NormalValues(7, tokens * columns);
  for (const RopeTableParams& table : {kSlidingTable, kCompressedTable}) {
    const std::vector<float> frequency = RopeFrequencies(table);
    kernels::testing::GuardedFloats out(tokens * columns);
    std::copy(x.begin(), x.end(), out.data());
    std::vector<float> exact = x;
    std::vector<float> naive = x;
    RopeArgs args = {.x = F32Matrix(out.data(), tokens, columns),
                     .head_dim = 512,
                     .positions = positions,
                     .frequency = frequency,
                     .arithmetic = Arithmetic::kMath};
    ASSERT_TRUE(variant.launch(args, Exec{}).ok());
    args.x = F32Matrix(exact.data(), tokens, columns);
    ASSERT_TRUE(RopeDefinition(args, Exec{}).ok());
    args.x = F32Matrix(naive.data(), tokens, columns);
    Naive(args);
    const NumericBound bound = variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
    EXPECT_TRUE(WithinBound(out.values(), naive, exact, bound)) << "theta " << table.theta;
    EXPECT_TRUE(out.Intact());
  }
}

INSTANTIATE_TEST_SUITE_P(Table, RopeVariantTest,
                         ::testing::ValuesIn(kernels::testing::CpuVariants(RopeVariants())));

}  // namespace
}  // namespace isthmus::kernels
