// SPDX-License-Identifier: Apache-2.0
// The compressor: bounds against the definition at the model's shapes, and the same bits whatever
// the chunks, batch, threads and SIMD target.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/compressor/compressor.h"
#include "kernels/compressor/compressor_sequence.h"
#include "kernels/compressor/compressor_variants.h"
#include "kernels/core/workspace.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/simd_targets.h"

namespace isthmus::kernels {
namespace {

using testing::SameBits;
using Sequence = testing::CompressorSequence;
using Shape = testing::CompressorShape;

// ---- Bounds at the model's shapes.

struct BoundCase {
  const char* name;
  Shape shape;
  int64_t tokens;
};
void PrintTo(const BoundCase& c, std::ostream* os) { *os << c.name; }

const BoundCase kBoundCases[] = {
    {"Ratio4Math", {512, 4, false, Arithmetic::kMath}, 64},
    {"Ratio128Math", {512, 128, false, Arithmetic::kMath}, 512},
    {"IndexMath", {128, 4, true, Arithmetic::kMath}, 128},
    {"Ratio4Reference", {512, 4, false, Arithmetic::kReference}, 256},
    {"Ratio128Reference", {512, 128, false, Arithmetic::kReference}, 2048},
    {"IndexReference", {128, 4, true, Arithmetic::kReference}, 512},
    {"IndexFp8", {128, 4, true, Arithmetic::kReference, EntryFormat::kKeyFp8}, 512},
    {"IndexBf16", {128, 4, true, Arithmetic::kReference, EntryFormat::kKeyBf16}, 512},
};

class CompressorBoundTest
    : public ::testing::TestWithParam<std::tuple<CompressorVariant, BoundCase>> {};

double ShareOfFlips(std::span<const float> got, std::span<const float> exact) {
  int64_t flips = 0;
  for (size_t i = 0; i < got.size(); ++i) flips += got[i] != exact[i] ? 1 : 0;
  return static_cast<double>(flips) / static_cast<double>(got.size());
}

TEST_P(CompressorBoundTest, StaysWithinItsBound) {
  const auto& [variant, c] = GetParam();
  Sequence sequence(c.shape, c.tokens, 11);
  const int64_t size = c.tokens / c.shape.ratio * c.shape.dim;
  std::vector<float> exact(static_cast<size_t>(size));
  std::vector<float> naive(exact);
  testing::GuardedFloats out(size);
  ASSERT_TRUE(CompressorDefinition(sequence.Args(0, c.tokens, exact.data()), Exec{}).ok());
  ASSERT_TRUE(CompressorNaive(sequence.Args(0, c.tokens, naive.data()), Exec{}).ok());
  ASSERT_TRUE(variant.launch(sequence.Args(0, c.tokens, out.data()), Exec{}).ok());
  EXPECT_TRUE(out.Intact());
  if (c.shape.arithmetic == Arithmetic::kMath) {
    const NumericBound bound = variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
    EXPECT_TRUE(testing::WithinBound(out.values(), naive, exact, bound));
    return;
  }
  // A quantiser ends the operation: few values may differ, and by one code. Neighbouring codes are
  // at most half the larger apart (fp8: an eighth), or one subnormal step.
  EXPECT_TRUE(testing::SameNonFinite(out.values(), exact));
  EXPECT_LE(ShareOfFlips(out.values(), exact), 2.0 * ShareOfFlips(naive, exact) + 2e-3);
  for (size_t i = 0; i < exact.size(); ++i) {
    const float got = out.values()[i];
    const float larger = std::max(std::fabs(got), std::fabs(exact[i]));
    const bool is_fp4 = sequence.entry_plane().format == EntryFormat::kKeyFp4;
    const float step = is_fp4 ? std::max(0.5f * larger, 0.6f) : 0.13f * larger;
    EXPECT_LE(std::fabs(got - exact[i]), step + 1e-3f) << "at " << i;
  }
}

// Those of GPUs are held to the CPU's bits in compressor_cuda_test.cc.
std::vector<CompressorVariant> CpuVariants() {
  std::vector<CompressorVariant> out;
  for (const CompressorVariant& variant : CompressorVariants()) {
    if (variant.arches.begin == kArchCpu) out.push_back(variant);
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Table, CompressorBoundTest,
                         ::testing::Combine(::testing::ValuesIn(CpuVariants()),
                                            ::testing::ValuesIn(kBoundCases)),
                         [](const auto& test) { return std::get<1>(test.param).name; });

// ---- The same bits.

struct BitsCase {
  const char* name;
  Shape shape;
  int64_t tokens;
};
void PrintTo(const BitsCase& c, std::ostream* os) { *os << c.name; }

const BitsCase kBitsCases[] = {
    {"Ratio4Math", {128, 4, false, Arithmetic::kMath}, 303},
    {"Ratio4Reference", {128, 4, false, Arithmetic::kReference}, 303},
    {"Ratio128Math", {128, 128, false, Arithmetic::kMath}, 401},
    {"Ratio128Reference", {128, 128, false, Arithmetic::kReference}, 401},
    {"IndexMath", {128, 4, true, Arithmetic::kMath}, 303},
    {"IndexReference", {128, 4, true, Arithmetic::kReference}, 303},
    {"IndexFp8", {128, 4, true, Arithmetic::kReference, EntryFormat::kKeyFp8}, 303},
    {"IndexBf16", {128, 4, true, Arithmetic::kReference, EntryFormat::kKeyBf16}, 303},
};

class CompressorBitsTest : public ::testing::TestWithParam<BitsCase> {
 protected:
  struct Result {
    std::vector<float> entries;
    std::vector<std::vector<uint64_t>> pages;
    std::vector<float> kept_rows;
  };
  static Result Finish(Sequence& sequence, std::vector<float> entries) {
    const BitsCase& c = GetParam();
    Result result = {std::move(entries), sequence.cache().page_words(sequence.kind()), {}};
    for (int64_t p = FirstKeptPosition(c.tokens, c.shape.ratio); p < c.tokens; ++p) {
      const std::vector<float> row = sequence.StateRow(p);
      result.kept_rows.insert(result.kept_rows.end(), row.begin(), row.end());
    }
    return result;
  }
  // Runs the whole sequence in chunks: `first` tokens, then `chunk` at a time.
  static Result Run(int64_t first, int64_t chunk, const Exec& exec) {
    const BitsCase& c = GetParam();
    Sequence sequence(c.shape, c.tokens, 21);
    std::vector<float> entries(static_cast<size_t>(c.tokens / c.shape.ratio * c.shape.dim));
    for (int64_t begin = 0; begin < c.tokens;) {
      const int64_t end = std::min(c.tokens, begin + (begin == 0 ? first : chunk));
      float* out = entries.data() + begin / c.shape.ratio * c.shape.dim;
      const absl::Status status = Compressor(sequence.Args(begin, end, out), exec);
      EXPECT_TRUE(status.ok()) << status;
      begin = end;
    }
    return Finish(sequence, std::move(entries));
  }
  static void ExpectSame(const Result& got, const Result& want, const std::string& what) {
    EXPECT_TRUE(SameBits(got.entries, want.entries)) << what;
    EXPECT_EQ(got.pages, want.pages) << what;
    EXPECT_TRUE(SameBits(got.kept_rows, want.kept_rows)) << what;
  }
};

TEST_P(CompressorBitsTest, DoNotDependOnTheChunks) {
  const Result whole = Run(GetParam().tokens, 1, Exec{});
  for (float value : whole.entries) ASSERT_TRUE(std::isfinite(value));
  for (float value : whole.kept_rows) ASSERT_TRUE(std::isfinite(value));
  for (int64_t chunk : {1, 3, 4, 5, 127, 128, 129}) {
    ExpectSame(Run(chunk, chunk, Exec{}), whole, "chunks of " + std::to_string(chunk));
  }
  for (int64_t prefill : {2, 37, 131}) {
    ExpectSame(Run(prefill, 1, Exec{}), whole, "prefill of " + std::to_string(prefill));
  }
}

TEST_P(CompressorBitsTest, DoNotDependOnTheThreads) {
  const Result one = Run(64, 64, Exec{});
  for (int threads : {2, 3}) {
    ThreadPool pool(threads);
    Workspace workspace;
    const Exec exec = {.threads = &pool, .workspace = &workspace};
    ExpectSame(Run(64, 64, exec), one, "threads");
    ExpectSame(Run(200, 1, exec), one, "threads, decode");
  }
}

TEST_P(CompressorBitsTest, DoNotDependOnTheSimdTarget) {
  const Result best = Run(64, 64, Exec{});
  const int targets =
      testing::ForEachTarget([&] { ExpectSame(Run(64, 64, Exec{}), best, "another target"); });
  EXPECT_GE(targets, 1);
}

TEST_P(CompressorBitsTest, DoNotDependOnTheBatch) {
  const BitsCase& c = GetParam();
  const int64_t start = 37;
  const int64_t rows = c.tokens - start;
  const Result whole = Run(start, rows, Exec{});
  // Another sequence's rows come first in the batch.
  Sequence other(c.shape, 150, 91);
  Sequence sequence(c.shape, c.tokens, 21);
  const int64_t w = sequence.width();
  const auto head = static_cast<size_t>(start / c.shape.ratio * c.shape.dim);
  std::vector<float> first(head);
  ASSERT_TRUE(Compressor(sequence.Args(0, start, first.data()), Exec{}).ok());
  std::vector<float> u = other.u, g = other.g;
  u.insert(u.end(), sequence.u.begin() + start * w, sequence.u.end());
  g.insert(g.end(), sequence.g.begin() + start * w, sequence.g.end());
  const int64_t other_entries = 150 / c.shape.ratio * c.shape.dim;
  std::vector<float> entries(static_cast<size_t>(other_entries) + whole.entries.size() - head);
  CompressorArgs args = sequence.Args(start, c.tokens, entries.data());
  args.ape = F32Matrix(sequence.ape.data(), c.shape.ratio, w);
  args.u = F32Matrix(u.data(), 150 + rows, w);
  args.g = F32Matrix(g.data(), 150 + rows, w);
  const SequenceKv views[] = {other.cache().View(0, 150, 0),
                              sequence.cache().View(150, rows, start)};
  args.sequences = views;
  ASSERT_TRUE(Compressor(args, Exec{}).ok());
  first.insert(first.end(), entries.begin() + other_entries, entries.end());
  ExpectSame(Finish(sequence, std::move(first)), whole, "batch");
}

INSTANTIATE_TEST_SUITE_P(Shapes, CompressorBitsTest, ::testing::ValuesIn(kBitsCases),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace isthmus::kernels
