// SPDX-License-Identifier: Apache-2.0
// The compressor: values by hand, refusals and golden vectors.
#include "kernels/compressor/compressor.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/compressor/compressor_sequence.h"
#include "kernels/compressor/compressor_variants.h"
#include "kernels/core/quantise.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/golden_file.h"

namespace isthmus::kernels {
namespace {

using testing::SameBits;
using Sequence = testing::CompressorSequence;

// ---- By hand. u holds one value in the first half of an entry's channels and another in the
// second; 1 and 7 have the root mean square 5, so the norm gives 0.2 and 1.4. No rotation.

class CompressorByHandTest
    : public ::testing::TestWithParam<absl::Status (*)(const CompressorArgs&, const Exec&)> {
 protected:
  static void Plain(Sequence& sequence) {
    std::fill(sequence.g.begin(), sequence.g.end(), 0.0f);
    std::fill(sequence.ape.begin(), sequence.ape.end(), 0.0f);
    std::fill(sequence.norm_weight.begin(), sequence.norm_weight.end(), 1.0f);
    std::fill(sequence.frequency.begin(), sequence.frequency.end(), 0.0f);
  }
  // Channels [first, first + 128) of the row at `t`: `a` in the first half, `b` in the second.
  static void SetRow(Sequence& sequence, int64_t t, int64_t first, float a, float b) {
    float* row = sequence.u.data() + t * sequence.width() + first;
    std::fill(row, row + 64, a);
    std::fill(row + 64, row + 128, b);
  }
};

TEST_P(CompressorByHandTest, TheFirstEntryUsesOnlyItsOwnWindow) {
  Sequence sequence({}, 4, 1);
  Plain(sequence);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t t = 0; t < 4; ++t) {
    SetRow(sequence, t, 0, nan, nan);  // Read by the second entry only.
    SetRow(sequence, t, 128, static_cast<float>(t) - 0.5f, 2.0f * static_cast<float>(t) + 4.0f);
  }
  std::vector<float> out(128);
  CompressorArgs args = sequence.Args(0, 4, out.data());
  args.epsilon = 0.0f;
  ASSERT_TRUE(GetParam()(args, Exec{}).ok());
  EXPECT_FLOAT_EQ(out[0], 0.2f);    // Mean of -0.5 .. 2.5 is 1.
  EXPECT_FLOAT_EQ(out[127], 1.4f);  // Mean of 4 .. 10 is 7.
}

TEST_P(CompressorByHandTest, TheSecondEntryOverlapsTheWindowBefore) {
  Sequence sequence({}, 8, 1);
  Plain(sequence);
  for (int64_t t = 0; t < 8; ++t) {
    SetRow(sequence, t, 0, t < 4 ? 2.0f : 1e6f, t < 4 ? 10.0f : 1e6f);
    SetRow(sequence, t, 128, t < 4 ? 1e6f : 0.0f, t < 4 ? 1e6f : 4.0f);
  }
  std::vector<float> out(2 * 128);
  CompressorArgs args = sequence.Args(0, 8, out.data());
  args.epsilon = 0.0f;
  ASSERT_TRUE(GetParam()(args, Exec{}).ok());
  EXPECT_FLOAT_EQ(out[128], 0.2f);        // Mean of four 2 and four 0.
  EXPECT_FLOAT_EQ(out[128 + 127], 1.4f);  // Mean of four 10 and four 4.
}

TEST_P(CompressorByHandTest, ApeFollowsThePositionInsideTheWindow) {
  Sequence sequence({}, 4, 1);
  Plain(sequence);
  for (int64_t t = 0; t < 4; ++t) SetRow(sequence, t, 128, t == 2 ? 1.0f : -3.0f, 7.0f);
  std::fill_n(sequence.ape.begin() + 2 * 256, 256, 200.0f);
  std::vector<float> out(128);
  CompressorArgs args = sequence.Args(0, 4, out.data());
  args.epsilon = 0.0f;
  ASSERT_TRUE(GetParam()(args, Exec{}).ok());
  EXPECT_FLOAT_EQ(out[0], 0.2f);  // Only the row of position 2 has weight.
  EXPECT_FLOAT_EQ(out[127], 1.4f);
}

TEST_P(CompressorByHandTest, RotatesByTheFirstPositionOfTheCurrentWindow) {
  Sequence sequence({.ratio = 128}, 256, 1);
  Plain(sequence);
  for (int64_t t = 0; t < 256; ++t) SetRow(sequence, t, 0, 1.0f, 7.0f);
  sequence.frequency[1] = 3.14159265f / 128.0f;  // Half a turn at position 128, none at 0.
  std::vector<float> out(2 * 128);
  CompressorArgs args = sequence.Args(0, 256, out.data());
  args.epsilon = 0.0f;
  ASSERT_TRUE(GetParam()(args, Exec{}).ok());
  EXPECT_FLOAT_EQ(out[66], 1.4f);
  EXPECT_NEAR(out[128 + 66], -1.4f, 1e-5f);
  EXPECT_NEAR(out[128 + 67], -1.4f, 1e-5f);
  EXPECT_FLOAT_EQ(out[128 + 65], 1.4f);
}

INSTANTIATE_TEST_SUITE_P(All, CompressorByHandTest,
                         ::testing::Values(&Compressor, &CompressorDefinition, &CompressorNaive));

TEST(CompressorTest, PoolsWithTheSoftmaxOfTheGate) {
  const std::vector<float> u0(16, 8.0f), u1(16, 16.0f), g0(16, 1.0f), g1(16, 1.0f + std::log(3.0f));
  const PoolRow rows[] = {{u0.data(), g0.data()}, {u1.data(), g1.data()}};
  std::vector<float> out(16);
  PoolRowsCpu(rows, 16, out.data());
  EXPECT_FLOAT_EQ(out[15], 14.0f);  // (8 + 3 * 16) / 4
}

TEST(CompressorTest, KeepsTheRowsThatLaterEntriesReadWithApeAdded) {
  Sequence sequence({}, 10, 3);
  ASSERT_TRUE(Compressor(sequence.Args(0, 10, nullptr), Exec{}).ok());
  for (int64_t p = 4; p < 10; ++p) {  // 4 * floor(10 / 4) - 4
    const std::vector<float> row = sequence.StateRow(p);
    for (size_t c = 0; c < 256; ++c) {
      const auto at = static_cast<size_t>(p) * 256 + c;
      EXPECT_EQ(row[c], sequence.u[at]);
      EXPECT_EQ(row[256 + c], sequence.g[at] + sequence.ape[static_cast<size_t>(p % 4) * 256 + c]);
    }
  }
  // Slots 2 and 3 would be positions 2 and 3 or 10 and 11: never written.
  EXPECT_TRUE(std::isnan(sequence.StateRow(2)[0]));
  EXPECT_TRUE(std::isnan(sequence.StateRow(3)[0]));
}

TEST(CompressorTest, AShortSequenceDoesNotReadWhatAnotherLeftInItsSlot) {
  Sequence fresh({}, 8, 3);
  Sequence reused({}, 8, 3);
  const EntryPlane plane = reused.state_plane();
  std::fill_n(reinterpret_cast<float*>(plane.data(reused.cache().state(), 0)), 8 * 2 * 256, 1e9f);
  std::vector<float> a(2 * 128), b(2 * 128);
  for (int64_t t = 0; t < 8; ++t) {
    ASSERT_TRUE(Compressor(fresh.Args(t, t + 1, t < 4 ? a.data() : &a[128]), Exec{}).ok());
    ASSERT_TRUE(Compressor(reused.Args(t, t + 1, t < 4 ? b.data() : &b[128]), Exec{}).ok());
  }
  for (float value : a) EXPECT_TRUE(std::isfinite(value));
  EXPECT_TRUE(SameBits(b, a));
}

// ---- Refusals.

class CompressorRefusalTest : public ::testing::Test {
 protected:
  CompressorRefusalTest() : sequence_({}, 8, 7), args_(sequence_.Args(0, 8, nullptr)) {}
  void ExpectRefused(const char* part) {
    const absl::Status status = Compressor(args_, Exec{});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find(part), std::string::npos) << status;
  }

  Sequence sequence_;
  CompressorArgs args_;
};

TEST_F(CompressorRefusalTest, AcceptsTheArgumentsThatTheOthersSpoil) {
  EXPECT_TRUE(Compressor(args_, Exec{}).ok());
}
TEST_F(CompressorRefusalTest, RefusesAnotherRatio) {
  args_.ratio = 8;
  ExpectRefused("ratio is 8");
}
TEST_F(CompressorRefusalTest, RefusesAGateOfAnotherWidth) {
  args_.g.cols = 128;
  ExpectRefused("compressor: g is [8, 128]");
}
TEST_F(CompressorRefusalTest, RefusesAnApeOfAnotherRatio) {
  args_.ape.rows = 128;
  ExpectRefused("compressor: ape is [128, 256]");
}
TEST_F(CompressorRefusalTest, RefusesANormOfAnotherSize) {
  args_.norm_weight.size = 64;
  ExpectRefused("norm_weight has 64 elements, dim is 128");
}
TEST_F(CompressorRefusalTest, RefusesTooFewFrequencies) {
  args_.frequency = args_.frequency.subspan(1);
  ExpectRefused("frequencies 31");
}
TEST_F(CompressorRefusalTest, RefusesEntriesOfTheOtherArithmetic) {
  args_.arithmetic = Arithmetic::kReference;
  ExpectRefused("entry_plane has format");
}
TEST_F(CompressorRefusalTest, RefusesAStateRingOfAnotherSize) {
  args_.state_plane.entries = 4;
  ExpectRefused("4 rows of 2048 bytes, needs 8 of 2048");
}
TEST_F(CompressorRefusalTest, RefusesASequenceWithoutPages) {
  SequenceKv view = args_.sequences[0];
  view.pages[kCsaKv] = {};
  args_.sequences = {&view, 1};
  ExpectRefused("pages for 0 entries, needs 2");
}
TEST_F(CompressorRefusalTest, RefusesAnotherArchitecture) {
  const Exec exec = {.arch = 5};  // Older than any CUDA device.
  EXPECT_EQ(Compressor(args_, exec).code(), absl::StatusCode::kInvalidArgument);
  const DeviceBatch batch = {.rows = args_.u.rows, .num_sequences = 1};
  args_.device_batch = &batch;
  args_.sequences = {};
  EXPECT_EQ(Compressor(args_, exec).code(), absl::StatusCode::kUnimplemented);
}

// ---- Golden vectors.

// x [rows, k] times w [cols, k] transposed.
std::vector<float> Product(const std::vector<float>& x, const std::vector<float>& w, int64_t k) {
  const auto inner = static_cast<size_t>(k);
  std::vector<float> out;
  for (size_t r = 0; r < x.size() / inner; ++r) {
    for (size_t c = 0; c < w.size() / inner; ++c) {
      double sum = 0.0;
      for (size_t i = 0; i < inner; ++i) sum += double{x[r * inner + i]} * w[c * inner + i];
      out.push_back(static_cast<float>(sum));
    }
  }
  return out;
}

void AddApe(std::vector<float>& g, const std::vector<float>& ape) {
  for (size_t i = 0; i < g.size(); ++i) g[i] += ape[i % ape.size()];
}

TEST(CompressorTest, PoolingMatchesTheGoldenVector) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_compressor.safetensors");
  const auto dims = file.dims();  // tokens, hidden, dim, ratio
  const auto x = file.at("x").F32();
  const auto u = Product(x, file.at("wkv").F32(), dims[1]);
  auto g = Product(x, file.at("wgate").F32(), dims[1]);
  AddApe(g, file.at("ape").F32());
  std::vector<float> out(static_cast<size_t>(dims[0] / dims[3] * dims[2]));
  for (int64_t j = 0; j < dims[0] / dims[3]; ++j) {
    std::vector<PoolRow> rows;
    for (int64_t t = j * dims[3]; t < (j + 1) * dims[3]; ++t) {
      rows.push_back({u.data() + t * dims[2], g.data() + t * dims[2]});
    }
    PoolRowsCpu(rows, dims[2], out.data() + j * dims[2]);
  }
  EXPECT_TRUE(testing::WithinRelativeL2(out, file.at("pooled").F32(), 1e-5));
}

TEST(CompressorTest, OverlappingPoolingMatchesTheGoldenVector) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_compressor_overlap.safetensors");
  const auto dims = file.dims();  // tokens, dim, ratio
  const int64_t d = dims[1], ratio = dims[2];
  const auto u = file.at("kv").F32();
  auto g = file.at("score").F32();
  AddApe(g, file.at("ape").F32());
  std::vector<float> out(static_cast<size_t>(dims[0] / ratio * d));
  for (int64_t j = 0; j < dims[0] / ratio; ++j) {
    std::vector<PoolRow> rows;
    for (int64_t t = FirstPooledPosition(j, ratio); t < (j + 1) * ratio; ++t) {
      const int64_t first = t * 2 * d + (t >= j * ratio ? d : 0);
      rows.push_back({u.data() + first, g.data() + first});
    }
    PoolRowsCpu(rows, d, out.data() + j * d);
  }
  EXPECT_TRUE(testing::WithinRelativeL2(out, file.at("pooled").F32(), 1e-5));
}

TEST(CompressorTest, MatchesTheGoldenVectorOfTheWholeOperation) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_compressor_full.safetensors");
  const auto dims = file.dims();  // tokens, hidden, dim, ratio, rope
  ASSERT_EQ(dims[2], 128);
  ASSERT_EQ(dims[3], 4);
  ASSERT_EQ(dims[4], 64);
  Sequence sequence({}, dims[0], 1);
  const auto x = file.at("x").F32();
  sequence.u = Product(x, file.at("wkv").F32(), dims[1]);
  sequence.g = Product(x, file.at("wgate").F32(), dims[1]);
  sequence.ape = file.at("ape").F32();
  sequence.norm_weight = file.at("norm_w").F32();
  const auto cos = file.at("cos").F32();
  const auto sin = file.at("sin").F32();
  // The file's angles belong to no position, so the operation leaves that to us.
  std::fill(sequence.frequency.begin(), sequence.frequency.end(), 0.0f);
  std::vector<float> out(2 * 128);
  ASSERT_TRUE(Compressor(sequence.Args(0, 8, out.data()), Exec{}).ok());
  for (size_t j = 0; j < 2; ++j) {
    for (size_t i = 0; i < 32; ++i) {
      float* pair = &out[j * 128 + 64 + 2 * i];
      const float a = pair[0];
      const float b = pair[1];
      pair[0] = a * cos[j * 32 + i] - b * sin[j * 32 + i];
      pair[1] = a * sin[j * 32 + i] + b * cos[j * 32 + i];
    }
    RoundTripFp8Row(&out[j * 128], 64, 64, &out[j * 128]);
  }
  EXPECT_TRUE(testing::WithinRelativeL2(out, file.at("out").F32(), 1e-5));
}

}  // namespace
}  // namespace isthmus::kernels
