// SPDX-License-Identifier: Apache-2.0
// Every variant gives the bits of the operations one after another on the CPU, in everything that
// they write: queries, the latent entry, pages, rings, the index query. Refusals.
#include "kernels/fused/attention_inputs/attention_inputs.h"

#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/compressor/compressor_sequence.h"
#include "kernels/core/formats.h"
#include "kernels/fused/attention_inputs/attention_inputs_variants.h"
#include "kernels/rope/rope.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/variants.h"
#if ISTHMUS_EMULATED
#include "kernels/core/emulator/emulator.h"
#endif

namespace isthmus::kernels {
namespace {

using testing::CanRunHere;
using testing::DeviceCopy;
using testing::DeviceSequences;
using testing::SameBits;
using testing::TestDevice;
using Shape = testing::CompressorShape;
using Sequence = testing::CompressorSequence;

constexpr Arithmetic kReference = Arithmetic::kReference;

// The compressor of a decode step: sequences of so many tokens, each with one row more.
struct Entries {
  Entries(const Shape& shape_in, const std::vector<int64_t>& starts, uint64_t seed)
      : shape(shape_in) {
    for (const int64_t start : starts) {
      sequences.push_back(std::make_unique<Sequence>(shape, start + 2, seed += 10));
      Sequence& sequence = *sequences.back();
      sequence.ape = sequences[0]->ape;
      sequence.norm_weight = sequences[0]->norm_weight;
      EXPECT_TRUE(Compressor(sequence.Args(0, start, nullptr), Exec{}).ok());
      const int64_t w = sequence.width();
      for (auto [from, to] : {std::pair{&sequence.u, &u}, std::pair{&sequence.g, &g}}) {
        to->insert(to->end(), from->begin() + start * w, from->begin() + (start + 1) * w);
      }
      const auto row = static_cast<int64_t>(views.size());
      views.push_back(sequence.cache().View(row, 1, start));
    }
  }
  CompressorArgs HostArgs() {
    const auto rows = static_cast<int64_t>(views.size());
    gates = g;  // Overwritten on the CPU.
    CompressorArgs args = sequences[0]->Args(0, 0, nullptr);
    args.u = F32Matrix(u.data(), rows, sequences[0]->width());
    args.g = F32Matrix(gates.data(), rows, sequences[0]->width());
    args.sequences = views;
    return args;
  }
  void ExpectSameCaches(Entries& other) {
    for (size_t i = 0; i < sequences.size(); ++i) {
      testing::SequenceCache& mine = sequences[i]->cache();
      testing::SequenceCache& theirs = other.sequences[i]->cache();
      const auto kind = sequences[i]->kind();
      EXPECT_EQ(mine.page_words(kind), theirs.page_words(kind)) << i;
      EXPECT_EQ(mine.state_words(), theirs.state_words()) << i;
    }
  }

  const Shape shape;
  std::vector<std::unique_ptr<Sequence>> sequences;
  std::vector<SequenceKv> views;
  std::vector<float> u, g, gates;
};

// The same on a device, and back.
struct DeviceEntries {
  explicit DeviceEntries(Entries& host, int64_t padding)
      : args(host.HostArgs()),
        sequences(testing::LayoutOf(host.shape), host.views, padding),
        ape(std::span<const float>(args.ape.f32(0), args.ape.rows * args.ape.cols)),
        weight(std::span<const float>(args.norm_weight.f32(), args.norm_weight.size)),
        frequency(args.frequency) {
    const int64_t width = args.u.cols;
    const auto rows = static_cast<int64_t>(host.views.size()) + padding;
    for (std::vector<float>* values : {&host.u, &host.g}) {
      values->resize(static_cast<size_t>(rows * width), std::nanf(""));
    }
    u = std::make_unique<DeviceCopy<float>>(host.u);
    g = std::make_unique<DeviceCopy<float>>(host.g);
    args.u = F32Matrix(u->data(), rows, width);
    args.g = F32Matrix(g->data(), rows, width);
    args.ape.data = ape.data();
    args.norm_weight.data = weight.data();
    args.frequency = {frequency.data(), args.frequency.size()};
    args.sequences = {};
    args.device_batch = &sequences.batch();
  }
  CompressorArgs args;
  DeviceSequences sequences;
  DeviceCopy<float> ape, weight, frequency;
  std::unique_ptr<DeviceCopy<float>> u, g;
};

struct Case {
  const char* name;
  std::vector<int64_t> starts;  // Tokens before the step, of each sequence.
  int64_t padding = 0;
  int ratio = 0;  // 0: no compressor.
  bool has_query = false;
  Arithmetic arithmetic = kReference;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

const Case kCases[] = {
    {"Window", {5, 0}, 0, 0},
    {"Ratio128", {127, 300, 511}, 1, 128},
    {"Ratio4", {3, 8, 4, 263, 0}, 3, 4, true},
    {"Ratio4WithoutQueries", {2, 3}, 0, 4, false},
    {"Ratio4Math", {3, 7}, 1, 4, true, Arithmetic::kMath},
};

// All inputs on the host.
struct Inputs {
  static constexpr int64_t kHeads = 9;  // Not a multiple of a block's.
  static constexpr int64_t kHeadDim = 128;
  static constexpr int64_t kIndexHeads = 16;
  static constexpr int64_t kIndexDim = 128;

  explicit Inputs(const Case& c)
      : arithmetic(c.arithmetic),
        ratio(c.ratio),
        rows(static_cast<int64_t>(c.starts.size()) + c.padding) {
    q = testing::OutlierValues(1, rows * kHeads * kHeadDim);
    kv = testing::OutlierValues(2, rows * kHeadDim);
    weight = testing::NormalValues(3, kHeadDim);
    frequency = RopeFrequencies({.rope_dim = 64, .original_positions = 65536});
    positions = c.starts;
    positions.resize(static_cast<size_t>(rows), 0);
    if (c.has_query) {
      index_q = testing::OutlierValues(4, rows * kIndexHeads * kIndexDim);
      index_weights = testing::NormalValues(5, rows * kIndexHeads);
    }
    for (std::vector<float>* some : {&q, &kv, &index_q, &index_weights}) {
      for (float& value : *some) value = RoundBf16(value);
    }
    if (ratio != 0) main.emplace(Shape{128, ratio, false, arithmetic}, c.starts, 41);
    if (ratio == 4) keys.emplace(Shape{128, ratio, true, arithmetic}, c.starts, 141);
  }
  // With the matrices at the given places; compressors are for the caller to add.
  AttentionInputsArgs Args(float* q_at, float* kv_at, float* index_q_at, float* index_weights_at,
                           const float* weight_at, const int64_t* positions_at,
                           const float* frequency_at) const {
    const std::span<const int64_t> places = {positions_at, positions.size()};
    const std::span<const float> rates = {frequency_at, frequency.size()};
    AttentionInputsArgs args = {.heads = {.q = F32Matrix(q_at, rows, kHeads * kHeadDim),
                                          .head_dim = kHeadDim,
                                          .kv = F32Matrix(kv_at, rows, kHeadDim),
                                          .kv_weight = F32Vector(weight_at, kHeadDim),
                                          .positions = places,
                                          .frequency = rates,
                                          .arithmetic = arithmetic},
                                .compressor = {},
                                .index_compressor = {},
                                .index_query = {}};
    if (!index_q.empty()) {
      args.index_query = {.q = F32Matrix(index_q_at, rows, kIndexHeads * kIndexDim),
                          .weights = F32Matrix(index_weights_at, rows, kIndexHeads),
                          .num_heads = kIndexHeads,
                          .dim = kIndexDim,
                          .weight_scale = 0.0221f,
                          .positions = places,
                          .frequency = rates,
                          .arithmetic = arithmetic};
    }
    return args;
  }
  absl::Status RunOnCpu() {
    AttentionInputsArgs args = Args(q.data(), kv.data(), index_q.data(), index_weights.data(),
                                    weight.data(), positions.data(), frequency.data());
    if (main) args.compressor = main->HostArgs();
    if (keys) args.index_compressor = keys->HostArgs();
    return AttentionInputs(args, Exec{});
  }

  const Arithmetic arithmetic;
  const int ratio;
  const int64_t rows;
  std::vector<float> q, kv, index_q, index_weights, weight, frequency;
  std::vector<int64_t> positions;
  std::optional<Entries> main, keys;
};

class AttentionInputsTest : public ::testing::TestWithParam<Case> {
 protected:
  // False: the variant does not take the case.
  static bool RunOnDevice(const AttentionInputsVariant& variant, Inputs& in) {
    TestDevice device(kPhaseDecode);
    const DeviceCopy<float> q(in.q), kv(in.kv), index_q(in.index_q);
    const DeviceCopy<float> index_weights(in.index_weights), weight(in.weight);
    const DeviceCopy<float> frequency(in.frequency);
    const DeviceCopy<int64_t> positions(in.positions);
    AttentionInputsArgs args = in.Args(q.data(), kv.data(), index_q.data(), index_weights.data(),
                                       weight.data(), positions.data(), frequency.data());
    std::optional<DeviceEntries> main, keys;
    const int64_t padding = in.rows - static_cast<int64_t>(GetParam().starts.size());
    if (in.main) args.compressor = main.emplace(*in.main, padding).args;
    if (in.keys) args.index_compressor = keys.emplace(*in.keys, padding).args;
    if (variant.supports != nullptr && !variant.supports(args)) return false;
    const absl::Status status = variant.launch(args, device.exec());
    EXPECT_TRUE(status.ok()) << status;
    device.Finish();
    if (main) main->sequences.CopyBack();
    if (keys) keys->sequences.CopyBack();
    EXPECT_TRUE(q.Intact() && kv.Intact() && index_q.Intact() && index_weights.Intact());
    in.q = q.ToHost();
    in.kv = kv.ToHost();
    in.index_q = index_q.ToHost();
    in.index_weights = index_weights.ToHost();
    return true;
  }
};

TEST_P(AttentionInputsTest, EveryVariantGivesTheBitsOfTheOperationsInTurn) {
  ISTHMUS_REQUIRE_DEVICE();
  Case alone = GetParam();
  alone.padding = 0;  // The CPU knows none; padding rows of a device are free to hold anything.
  Inputs expected(alone);
  ASSERT_TRUE(expected.RunOnCpu().ok());
  const auto begin = [](std::vector<float> values, const std::vector<float>& as) {
    values.resize(as.size());
    return values;
  };
  int ran = 0;
  for (const AttentionInputsVariant& variant : AttentionInputsVariants()) {
    for (const bool is_reversed : {false, true}) {
#if ISTHMUS_EMULATED
      std::optional<emulator::ReverseOrder> reversed;
      if (is_reversed) reversed.emplace();
#endif
      Inputs in(GetParam());
      if (variant.launch == nullptr || !CanRunHere(variant, TestDevice().exec())) continue;
      if (!RunOnDevice(variant, in)) continue;
      ran += variant.patch != nullptr ? 1 : 0;
      EXPECT_TRUE(SameBits(begin(in.q, expected.q), expected.q)) << is_reversed;
      EXPECT_TRUE(SameBits(begin(in.kv, expected.kv), expected.kv)) << is_reversed;
      EXPECT_TRUE(SameBits(begin(in.index_q, expected.index_q), expected.index_q));
      EXPECT_TRUE(
          SameBits(begin(in.index_weights, expected.index_weights), expected.index_weights));
      if (in.main) in.main->ExpectSameCaches(*expected.main);
      if (in.keys) in.keys->ExpectSameCaches(*expected.keys);
    }
  }
  const bool is_fused = GetParam().arithmetic == kReference || !GetParam().has_query;
  EXPECT_EQ(ran, is_fused ? 2 : 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionInputsTest, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(AttentionInputsRefusalTest, NamesAnIndexQueryThatDoesNotFit) {
  Inputs in(kCases[3]);
  std::vector<float> index_q(static_cast<size_t>(2 * Inputs::kIndexHeads * Inputs::kIndexDim));
  AttentionInputsArgs args = in.Args(in.q.data(), in.kv.data(), nullptr, nullptr, in.weight.data(),
                                     in.positions.data(), in.frequency.data());
  args.index_query = {.q = F32Matrix(index_q.data(), 2, Inputs::kIndexHeads * Inputs::kIndexDim),
                      .weights = {},
                      .num_heads = Inputs::kIndexHeads,
                      .positions = {},
                      .frequency = {}};
  const absl::Status status = AttentionInputs(args, Exec{});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("weights [0, 0], 0 positions"), std::string::npos) << status;
  args.index_query = {};
  args.heads.kv_weight.size = 64;
  EXPECT_EQ(AttentionInputs(args, Exec{}).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace isthmus::kernels
