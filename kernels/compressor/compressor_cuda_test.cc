// SPDX-License-Identifier: Apache-2.0
// The CUDA variants of the compressor: entries, pages and rings with the bits of the CPU, for mixed
// batches in chunks of any kind, with padding rows, NaN in all memory that nobody wrote.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/compressor/compressor.h"
#include "kernels/compressor/compressor_sequence.h"
#include "kernels/compressor/compressor_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#if ISTHMUS_EMULATED
#include "kernels/core/emulator/emulator.h"
#endif

namespace isthmus::kernels {
namespace {

using testing::DeviceCopy;
using testing::DeviceSequences;
using testing::SameBits;
using testing::TestDevice;
using Sequence = testing::CompressorSequence;
using Shape = testing::CompressorShape;

struct Chunk {
  int64_t start;
  int64_t end;
};
struct BatchCase {
  const char* name;
  Shape shape;
  std::vector<Chunk> chunks;  // One sequence each.
  int64_t padding_rows = 0;
  uint32_t phase = kPhasePrefill;
};
void PrintTo(const BatchCase& c, std::ostream* os) { *os << c.name; }

constexpr Arithmetic kMath = Arithmetic::kMath;
constexpr Arithmetic kReference = Arithmetic::kReference;

const BatchCase kBatchCases[] = {
    {"Ratio4Prefill", {128, 4, false, kReference}, {{0, 3}, {0, 21}, {5, 5}, {7, 26}, {9, 10}}, 2},
    {"Ratio4Math", {128, 4, false, kMath}, {{0, 9}, {3, 4}, {6, 23}}},
    {"Ratio4Decode",
     {128, 4, false, kReference},
     {{0, 1}, {2, 3}, {3, 4}, {7, 8}, {262, 263}, {263, 264}},
     3,
     kPhaseDecode},
    {"Ratio4DecodeOfFew",
     {128, 4, false, kReference},
     {{1, 4}, {6, 9}, {8, 8}, {3, 11}},
     1,
     kPhaseDecode},
    {"Ratio128Prefill", {128, 128, false, kReference}, {{0, 130}, {100, 101}, {120, 300}}, 1},
    {"Ratio128Math", {128, 128, false, kMath}, {{126, 129}, {0, 5}}},
    {"Ratio128Decode",
     {128, 128, false, kReference},
     {{127, 128}, {128, 129}, {511, 512}, {0, 1}},
     4,
     kPhaseDecode},
    {"IndexPrefill", {128, 4, true, kReference}, {{0, 13}, {2, 4}, {7, 16}}, 1},
    {"IndexMath", {128, 4, true, kMath}, {{0, 8}, {3, 5}}},
    {"IndexDecode", {64, 4, true, kReference}, {{3, 4}, {4, 5}, {1023, 1024}}, 1, kPhaseDecode},
    {"IndexFp8Prefill",
     {128, 4, true, kReference, EntryFormat::kKeyFp8},
     {{0, 13}, {2, 4}, {7, 16}},
     1},
    {"IndexFp8Decode",
     {64, 4, true, kReference, EntryFormat::kKeyFp8},
     {{3, 4}, {4, 5}, {1023, 1024}},
     1,
     kPhaseDecode},
    {"IndexBf16Prefill",
     {128, 4, true, kReference, EntryFormat::kKeyBf16},
     {{0, 13}, {2, 4}, {7, 16}},
     1},
    {"IndexBf16Decode",
     {64, 4, true, kReference, EntryFormat::kKeyBf16},
     {{3, 4}, {4, 5}, {1023, 1024}},
     1,
     kPhaseDecode},
    {"RealRatio4", {512, 4, false, kReference}, {{0, 5}, {1023, 1024}}, 1, kPhaseDecode},
    {"RealRatio128", {512, 128, false, kReference}, {{255, 256}}, 0, kPhaseDecode},
};

// The sequences of a case, on the host twice: what the CPU made of them, and what the GPU did.
class Batch {
 public:
  explicit Batch(const BatchCase& c) : case_(c) {
    uint64_t seed = 41;
    for (const Chunk& chunk : c.chunks) {
      sequences_.push_back(std::make_unique<Sequence>(c.shape, chunk.end + 1, seed += 10));
      Sequence& sequence = *sequences_.back();
      // ape, weights and frequencies belong to the layer, not to the sequence.
      sequence.ape = sequences_[0]->ape;
      sequence.norm_weight = sequences_[0]->norm_weight;
      const absl::Status status = Compressor(sequence.Args(0, chunk.start, nullptr), Exec{});
      EXPECT_TRUE(status.ok()) << status;
      const int64_t w = sequence.width();
      for (auto [from, to] : {std::pair{&sequence.u, &u}, std::pair{&sequence.g, &g}}) {
        to->insert(to->end(), from->begin() + chunk.start * w, from->begin() + chunk.end * w);
      }
      views_.push_back(sequence.cache().View(rows, chunk.end - chunk.start, chunk.start));
      rows += chunk.end - chunk.start;
      entries += NewEntries(chunk.start, chunk.end, c.shape.ratio);
    }
    width = sequences_[0]->width();
    const auto padding = static_cast<size_t>(c.padding_rows * width);
    u.insert(u.end(), padding, std::nanf(""));
    g.insert(g.end(), padding, std::nanf(""));
  }

  // With host pointers; rows, sequences and outputs are for the caller to replace.
  CompressorArgs Args() {
    CompressorArgs args = sequences_[0]->Args(0, 0, nullptr);
    args.u = F32Matrix(u.data(), rows, width);
    args.g = F32Matrix(g.data(), rows, width);
    args.sequences = views_;
    return args;
  }
  std::vector<float> RunOnCpu() {
    std::vector<float> out(static_cast<size_t>(entries * case_.shape.dim));
    std::vector<float> gates = g;  // Overwritten.
    CompressorArgs args = Args();
    args.g.data = gates.data();
    args.entries = out.data();
    const absl::Status status = Compressor(args, Exec{});
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }
  void ExpectSameCaches(const Batch& other) {
    for (size_t i = 0; i < sequences_.size(); ++i) {
      Sequence& mine = *sequences_[i];
      Sequence& theirs = *other.sequences_[i];
      EXPECT_EQ(mine.cache().page_words(mine.kind()), theirs.cache().page_words(mine.kind())) << i;
      EXPECT_EQ(mine.cache().state_words(), theirs.cache().state_words()) << i;
    }
  }
  std::span<const SequenceKv> views() const { return views_; }

  std::vector<float> u, g;
  int64_t rows = 0;
  int64_t entries = 0;
  int64_t width = 0;

 private:
  const BatchCase& case_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<SequenceKv> views_;
};

class CompressorCudaTest
    : public ::testing::TestWithParam<std::tuple<CompressorVariant, BatchCase>> {
 protected:
  // Runs the variant on `batch` and brings its caches back; the entries, or none.
  static std::vector<float> RunOnDevice(Batch& batch, bool wants_entries) {
    const auto& [variant, c] = GetParam();
    TestDevice device(c.phase);
    CompressorArgs args = batch.Args();
    DeviceSequences sequences(testing::LayoutOf(c.shape), batch.views(), c.padding_rows);
    const DeviceCopy<float> u(batch.u), g(batch.g);
    const DeviceCopy<float> ape(std::span(args.ape.f32(0), c.shape.ratio * batch.width));
    const DeviceCopy<float> weight(std::span(args.norm_weight.f32(), c.shape.dim));
    const DeviceCopy<float> frequency(args.frequency);
    const DeviceCopy<float> out(std::max<int64_t>(1, batch.entries * c.shape.dim));
    args.u = F32Matrix(u.data(), batch.rows + c.padding_rows, batch.width);
    args.g = F32Matrix(g.data(), batch.rows + c.padding_rows, batch.width);
    args.ape.data = ape.data();
    args.norm_weight.data = weight.data();
    args.frequency = {frequency.data(), args.frequency.size()};
    args.sequences = {};
    args.device_batch = &sequences.batch();
    if (wants_entries) args.entries = out.data();
    EXPECT_TRUE(ValidateCompressor(args, device.exec().arch).ok());
    EXPECT_TRUE(variant.supports == nullptr || variant.supports(args));
    const absl::Status status = variant.launch(args, device.exec());
    EXPECT_TRUE(status.ok()) << status;
    device.Finish();
    EXPECT_TRUE(u.Intact() && g.Intact() && out.Intact());
    sequences.CopyBack();
    std::vector<float> entries = out.ToHost();
    entries.resize(static_cast<size_t>(batch.entries * c.shape.dim));
    return entries;
  }
};

TEST_P(CompressorCudaTest, HasTheBitsOfTheCpu) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto& [variant, c] = GetParam();
  Batch on_cpu(c);
  const std::vector<float> expected = on_cpu.RunOnCpu();
  Batch on_device(c);
  EXPECT_TRUE(SameBits(RunOnDevice(on_device, true), expected));
  on_device.ExpectSameCaches(on_cpu);
#if ISTHMUS_EMULATED
  const emulator::ReverseOrder reversed;
#endif
  Batch without_entries(c);
  RunOnDevice(without_entries, false);
  without_entries.ExpectSameCaches(on_cpu);
}

// Each CUDA variant with the cases of its phases.
std::vector<std::tuple<CompressorVariant, BatchCase>> CudaCases() {
  std::vector<std::tuple<CompressorVariant, BatchCase>> out;
  for (const CompressorVariant& variant : CompressorVariants()) {
    if (variant.arches.begin == kArchCpu) continue;
    for (const BatchCase& c : kBatchCases) {
      if (variant.patch == nullptr || (variant.patch->phases & c.phase) != 0) {
        out.emplace_back(variant, c);
      }
    }
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Table, CompressorCudaTest, ::testing::ValuesIn(CudaCases()),
                         [](const auto& test) {
                           const CompressorVariant& variant = std::get<0>(test.param);
                           std::string name = variant.patch != nullptr
                                                  ? std::string(variant.patch->name)
                                                  : std::to_string(variant.arches.begin);
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name + "_" + std::get<1>(test.param).name;
                         });

TEST(CompressorCudaRefusalTest, NeedsADeviceBatchOfItsRows) {
  Sequence sequence({}, 8, 7);
  CompressorArgs args = sequence.Args(0, 8, nullptr);
  args.sequences = {};
  EXPECT_EQ(ValidateCompressor(args, kArchSm90).code(), absl::StatusCode::kInvalidArgument);
  const DeviceBatch batch = {.rows = 7, .num_sequences = 1};
  args.device_batch = &batch;
  const absl::Status status = ValidateCompressor(args, kArchSm90);
  EXPECT_NE(status.message().find("device_batch has 7 rows"), std::string::npos) << status;
}

}  // namespace
}  // namespace isthmus::kernels
