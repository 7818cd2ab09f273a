// SPDX-License-Identifier: Apache-2.0
// Every layer of the forward pass against dumps of an independent implementation: within 1e-5 in
// math arithmetic, within the noise floors of the files in reference arithmetic.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/testing/golden_file.h"
#include "tests/fidelity/compare.h"
#include "tests/fidelity/models.h"

namespace isthmus::fidelity {
namespace {

using kernels::Arithmetic;

struct GoldenCase {
  std::string file = {};  // Under io/.
  Arithmetic arithmetic = Arithmetic::kMath;
  DumpChoice choice = {};
  // Each layer starts from the streams of this file, whose tokens begin alike, so that the noise of
  // the layers before does not hide a fault.
  std::string streams_from = {};
};

void PrintTo(const GoldenCase& test, std::ostream* out) { *out << test.file; }

std::string CaseName(const testing::TestParamInfo<GoldenCase>& info) {
  std::string name = info.param.file;
  for (char& c : name) {
    if (c == '.') c = '_';
  }
  return name;
}

// Runs one file's tokens through `checkpoint` and holds the dump against it.
void ExpectWithinLimits(const std::string& checkpoint, const std::string& io_folder,
                        const GoldenCase& test) {
  const std::string path = absl::StrCat(io_folder, "/", test.file, ".safetensors");
  const auto golden = ReadTensorSet(path);
  ASSERT_TRUE(golden.ok()) << golden.status();
  DumpChoice choice = test.choice;
  if (!test.streams_from.empty()) {
    choice.input_streams = absl::StrCat(io_folder, "/", test.streams_from, ".safetensors");
  }
  const auto dump =
      DumpOf({.checkpoint = checkpoint, .arithmetic = test.arithmetic}, InputIds(*golden), choice);
  ASSERT_TRUE(dump.ok()) << dump.status();
  const Comparison comparison = Compare(*golden, FromDump(*dump));
  EXPECT_TRUE(comparison.passed()) << comparison.Report();
  EXPECT_GT(comparison.verdicts.size(), 10u) << comparison.Report(/*all=*/true);
}

const DumpChoice kDecode40 = {.decode_tokens = 40};
const DumpChoice kDecode10 = {.decode_tokens = 10};

class TinyRandomGoldenTest : public testing::TestWithParam<GoldenCase> {};

TEST_P(TinyRandomGoldenTest, AgreesWithTheDump) {
  ISTHMUS_REQUIRE_GOLDEN();
  const std::string folder = kernels::testing::GoldenDir() + "/tiny-random-nvfp4";
  ExpectWithinLimits(folder, folder + "/io", GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Files, TinyRandomGoldenTest,
    testing::Values(
        GoldenCase{.file = "prefill.math"}, GoldenCase{.file = "decode.math", .choice = kDecode40},
        GoldenCase{.file = "prefill.ref", .arithmetic = Arithmetic::kReference},
        GoldenCase{.file = "decode.ref", .arithmetic = Arithmetic::kReference, .choice = kDecode40},
        GoldenCase{.file = "layers.ref",
                   .arithmetic = Arithmetic::kReference,
                   .choice = {.set = diag::DumpSet::kLayers},
                   .streams_from = "layers.ref"},
        GoldenCase{.file = "stages.ref",
                   .arithmetic = Arithmetic::kReference,
                   .choice = {.set = diag::DumpSet::kStages},
                   .streams_from = "layers.ref"},
        GoldenCase{.file = "cache.ref",
                   .arithmetic = Arithmetic::kReference,
                   .choice = {.set = diag::DumpSet::kCache},
                   .streams_from = "layers.ref"}),
    CaseName);

// The bundled files: what every fresh clone proves.
class ThreeLayerGoldenTest : public testing::TestWithParam<GoldenCase> {};

TEST_P(ThreeLayerGoldenTest, BothLayoutsAgreeWithTheDump) {
  const std::string folder = BundledPath("tiny-random-3layer");
  ExpectWithinLimits(folder + "/mxfp4", folder + "/io", GetParam());
  ExpectWithinLimits(folder + "/nvfp4-cast", folder + "/io", GetParam());
}

INSTANTIATE_TEST_SUITE_P(Files, ThreeLayerGoldenTest,
                         testing::Values(GoldenCase{.file = "prefill.math"},
                                         GoldenCase{.file = "decode.math", .choice = kDecode10},
                                         GoldenCase{.file = "decode.ref",
                                                    .arithmetic = Arithmetic::kReference,
                                                    .choice = kDecode10}),
                         CaseName);

TEST(ThreeLayerFullSetTest, ReferencePrefillAgreesWithTheFullSet) {
  ISTHMUS_REQUIRE_GOLDEN();
  ExpectWithinLimits(BundledPath("tiny-random-3layer/nvfp4-cast"),
                     kernels::testing::GoldenDir() + "/tiny-random-3layer/io",
                     {.file = "prefill.ref", .arithmetic = Arithmetic::kReference});
}

// MXFP4 and its lossless NVFP4 copy are the same numbers, so every bit of every tensor is equal.
TEST(LosslessCastTest, BothLayoutsGiveTheSameBytes) {
  const std::vector<int32_t> ids = SeededIds(7, 150, 512);
  const std::string folder = BundledPath("tiny-random-3layer");
  for (const Arithmetic arithmetic : {Arithmetic::kMath, Arithmetic::kReference}) {
    const auto mxfp4 = DumpOf({.checkpoint = folder + "/mxfp4", .arithmetic = arithmetic}, ids, {});
    const auto nvfp4 =
        DumpOf({.checkpoint = folder + "/nvfp4-cast", .arithmetic = arithmetic}, ids, {});
    ASSERT_TRUE(mxfp4.ok()) << mxfp4.status();
    ASSERT_TRUE(nvfp4.ok()) << nvfp4.status();
    ASSERT_EQ(mxfp4->size(), nvfp4->size());
    for (const auto& [name, tensor] : *mxfp4) {
      EXPECT_EQ(tensor.bytes, nvfp4->at(name).bytes) << name;
    }
  }
}

// The window's slots hold positions modulo 128; after 259 tokens the slots 0, 1, 2 were written a
// third time.
TEST(CacheDumpTest, SlotsHoldTheLatestPositions) {
  const std::string checkpoint = BundledPath("tiny-random-3layer/mxfp4");
  const auto dump = DumpOf({.checkpoint = checkpoint, .arithmetic = Arithmetic::kReference},
                           SeededIds(3, 259, 512), {.set = diag::DumpSet::kCache});
  ASSERT_TRUE(dump.ok()) << dump.status();
  const TensorSet set = FromDump(*dump);
  const Tensor* positions = set.Find("window_pos");
  ASSERT_NE(positions, nullptr);
  ASSERT_EQ(positions->values.size(), 128u);
  EXPECT_EQ(positions->values[0], 256.0f);
  EXPECT_EQ(positions->values[2], 258.0f);
  EXPECT_EQ(positions->values[3], 131.0f);
}

}  // namespace
}  // namespace isthmus::fidelity
