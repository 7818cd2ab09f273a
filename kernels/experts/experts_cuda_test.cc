// SPDX-License-Identifier: Apache-2.0
// Every CUDA variant of experts within its bound, and the trusted one bit for bit the CPU's.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#if ISTHMUS_EMULATED
#include "kernels/core/emulator/emulator.h"
#endif
#include "kernels/experts/experts_cases.h"
#include "kernels/experts/experts_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const ExpertsVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path");
}

namespace {

using kernels::testing::CanRunHere;
using kernels::testing::DeviceCopy;
using kernels::testing::DeviceWeight;
using kernels::testing::SameBits;
using kernels::testing::TestDevice;
using kernels::testing::WithinBound;
using kernels::testing::WithinRelativeL2;

// The weights of one expert on the device. Experts that no token names are left out, as poison.
struct DeviceExpert {
  DeviceExpert(const ExpertWeights& host, WeightLayout layout)
      : w1(host.w1, layout), w3(host.w3, layout), w2(host.w2, layout) {}
  ExpertWeights weights() const { return {w1.view(), w3.view(), w2.view()}; }
  DeviceWeight w1, w3, w2;
};

// `padding` tokens with ids -1 follow those of the case; rows of x, out and routed lie `gap` apart
// from one another.
class DeviceCase {
 public:
  DeviceCase(const ExpertsCase& c, WeightLayout layout, int64_t padding = 0, int64_t gap = 0)
      : rows_(c.tokens_ + padding),
        stride_(c.hidden_ + gap),
        x(Spread(c, rows_, stride_)),
        ids(Padded(c.ids, rows_ * c.k_, int32_t{-1})),
        weights(Padded(c.weights, rows_ * c.k_, 0.0f)),
        out(rows_ * stride_),
        routed(rows_ * stride_),
        shared_(c.shared, layout),
        shared_weights_(shared_.weights()) {
    for (size_t e = 0; e < c.experts.size(); ++e) {
      ExpertWeights device = {};
      if (std::find(c.ids.begin(), c.ids.end(), static_cast<int32_t>(e)) != c.ids.end()) {
        experts_.push_back(std::make_unique<DeviceExpert>(c.experts[e], layout));
        device = experts_.back()->weights();
      }
      table_.push_back(device);
    }
    device_table_ = std::make_unique<DeviceCopy<ExpertWeights>>(table_);
    k_ = c.k_;
    hidden_ = c.hidden_;
  }
  ExpertsArgs Args(Arithmetic arithmetic) const {
    ExpertsArgs args;
    args.x = {x.data(), DType::kF32, rows_, hidden_, stride_};
    args.ids = ids.data();
    args.weights = weights.data();
    args.k = k_;
    args.experts = table_;
    args.device_experts = device_table_->data();
    args.shared = &shared_weights_;
    args.out = {out.data(), DType::kF32, rows_, hidden_, stride_};
    args.routed = {routed.data(), DType::kF32, rows_, hidden_, stride_};
    args.arithmetic = arithmetic;
    return args;
  }
  // The tokens of the case, out of the strided rows of `from`.
  std::vector<float> Gather(const DeviceCopy<float>& from, int64_t tokens) const {
    const std::vector<float> all = from.ToHost();
    std::vector<float> gathered;
    for (int64_t t = 0; t < tokens; ++t) {
      gathered.insert(gathered.end(), all.begin() + t * stride_,
                      all.begin() + t * stride_ + hidden_);
    }
    return gathered;
  }
  bool Untouched(const DeviceCopy<float>& from, int64_t first_padding) const {
    const std::vector<float> all = from.ToHost();
    for (size_t i = 0; i < all.size(); ++i) {
      const auto t = static_cast<int64_t>(i) / stride_;
      const auto d = static_cast<int64_t>(i) % stride_;
      const bool is_result = t < first_padding && d < hidden_;
      if (!is_result && std::bit_cast<uint32_t>(all[i]) != 0xffffffffu) return false;
    }
    return true;
  }

 private:
  static std::vector<float> Spread(const ExpertsCase& c, int64_t rows, int64_t stride) {
    std::vector<float> out(static_cast<size_t>(rows * stride), std::nanf(""));
    for (int64_t t = 0; t < c.tokens_; ++t) {
      std::copy_n(c.x.begin() + t * c.hidden_, c.hidden_, out.begin() + t * stride);
    }
    return out;
  }
  template <typename T>
  static std::vector<T> Padded(std::vector<T> values, int64_t size, T padding) {
    values.resize(static_cast<size_t>(size), padding);
    return values;
  }

  int64_t rows_, stride_;
  int64_t k_ = 0, hidden_ = 0;

 public:
  DeviceCopy<float> x;
  DeviceCopy<int32_t> ids;
  DeviceCopy<float> weights;
  DeviceCopy<float> out, routed;

 private:
  DeviceExpert shared_;
  ExpertWeights shared_weights_;
  std::vector<std::unique_ptr<DeviceExpert>> experts_;
  std::vector<ExpertWeights> table_;
  std::unique_ptr<DeviceCopy<ExpertWeights>> device_table_;
};

struct Expected {
  std::vector<float> out, routed;
};
Expected RunHost(ExpertsCase& c, Arithmetic arithmetic,
                 absl::Status (*operation)(const ExpertsArgs&, const Exec&)) {
  const auto size = static_cast<size_t>(c.tokens_ * c.hidden_);
  Expected e = {std::vector<float>(size), std::vector<float>(size)};
  EXPECT_TRUE(operation(c.Args(arithmetic, e.out.data(), e.routed.data()), Exec{}).ok());
  return e;
}

// The emulator calls itself what the variant needs; a GPU is what it is.
class EmulatedArch {
 public:
  explicit EmulatedArch(int arch) { SetEmulatedArch(arch); }
  ~EmulatedArch() { SetEmulatedArch(kArchSm90); }
  EmulatedArch(const EmulatedArch&) = delete;
  EmulatedArch& operator=(const EmulatedArch&) = delete;
};
int ArchFor(const ExpertsVariant& variant) {
  return variant.arches.begin == kArchSm120 ? kArchSm120 : kArchSm90;
}
// How those GPUs hold fp4.
WeightLayout TilesFor(const ExpertsVariant& variant) {
  return TileLayout(WeightFormat::kMxfp4, ArchFor(variant));
}

constexpr double kGroupedFloor = 2e-3;  // Of experts.grouped_w4a8.

class ExpertsCudaTest : public ::testing::TestWithParam<ExpertsVariant> {
 protected:
  // One case on the device: bound or bits, guards, padding, and the same bits again.
  void ExpectRight(ExpertsCase& c, Arithmetic arithmetic, WeightLayout layout, int64_t padding = 0,
                   int64_t gap = 0) {
    const ExpertsVariant& variant = GetParam();
    if (!CanRunHere(variant, device_.exec())) GTEST_SKIP() << "another architecture's";
    const DeviceCase on_device(c, layout, padding, gap);
    const ExpertsArgs args = on_device.Args(arithmetic);
    if (variant.supports != nullptr && !variant.supports(args)) return;
    ++ran_;
    const absl::Status valid = ValidateExperts(args, true);
    ASSERT_TRUE(valid.ok()) << valid;
    ASSERT_TRUE(variant.launch(args, device_.exec()).ok());
    device_.Finish();
    const std::vector<float> out = on_device.Gather(on_device.out, c.tokens_);
    const std::vector<float> routed = on_device.Gather(on_device.routed, c.tokens_);
    EXPECT_TRUE(on_device.out.Intact() && on_device.routed.Intact() && on_device.x.Intact());
    EXPECT_TRUE(on_device.Untouched(on_device.out, c.tokens_));
    EXPECT_TRUE(on_device.Untouched(on_device.routed, c.tokens_));
    Compare(c, arithmetic, out, routed);
#if ISTHMUS_EMULATED
    const emulator::ReverseOrder reversed;
#endif
    ASSERT_TRUE(variant.launch(args, device_.exec()).ok());
    device_.Finish();
    EXPECT_TRUE(SameBits(on_device.Gather(on_device.out, c.tokens_), out));
  }
  int ran_ = 0;

 private:
  void Compare(ExpertsCase& c, Arithmetic arithmetic, const std::vector<float>& out,
               const std::vector<float>& routed) {
    const ExpertsVariant& variant = GetParam();
    if (variant.patch == nullptr) {
      const Expected cpu = RunHost(c, arithmetic, Experts);
      EXPECT_TRUE(SameBits(out, cpu.out));
      EXPECT_TRUE(SameBits(routed, cpu.routed));
      return;
    }
    const Expected exact = RunHost(c, arithmetic, ExpertsDefinition);
    std::vector<float> unused(out.size());
    const std::vector<float> naive = NaiveExperts(c.Args(arithmetic, unused.data(), nullptr));
    EXPECT_TRUE(WithinBound(out, naive, exact.out, variant.patch->bound));
    EXPECT_TRUE(WithinRelativeL2(routed, exact.routed, variant.patch->bound.floor));
    if (variant.launch != LaunchExpertsGroupedW4A4) return;
    // Without what the rounding of its inputs does, it is as near as the others.
    const Expected rounded = RunHost(c, arithmetic, ExpertsDefinitionW4A4);
    EXPECT_TRUE(WithinRelativeL2(out, rounded.out, kGroupedFloor));
    EXPECT_TRUE(WithinRelativeL2(routed, rounded.routed, kGroupedFloor));
  }
  const EmulatedArch arch_{ArchFor(GetParam())};
  TestDevice device_;
};

TEST_P(ExpertsCudaTest, TakesEveryFormatAndLayout) {
  ISTHMUS_REQUIRE_DEVICE();
  for (const WeightFormat format :
       {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block128, WeightFormat::kMxfp4,
        WeightFormat::kNvfp4}) {
    for (const WeightLayout layout :
         {WeightLayout::kRowMajor, WeightLayout::kMmaTiles, WeightLayout::kMmaTilesF16}) {
      for (const Arithmetic arithmetic : {Arithmetic::kMath, Arithmetic::kReference}) {
        ExpertsCase c(format, 3, 256, 128, 5, 2, false);
        ExpectRight(c, arithmetic, layout);
      }
    }
  }
  if (ran_ == 0 && IsRealDevice()) GTEST_SKIP() << "needs a GPU of another architecture";
  EXPECT_GT(ran_, 0);
}

TEST_P(ExpertsCudaTest, TakesOddShapesAndCasts) {
  ISTHMUS_REQUIRE_DEVICE();
  for (const auto& [hidden, intermediate] : {std::pair{96, 32}, {160, 96}, {384, 160}}) {
    ExpertsCase c(WeightFormat::kMxfp4, 2, hidden, intermediate, 3, 1, false);
    ExpectRight(c, Arithmetic::kReference, TilesFor(GetParam()));
  }
  ExpertsCase odd(WeightFormat::kF32, 3, 33, 17, 9, 3, false);
  ExpectRight(odd, Arithmetic::kReference, WeightLayout::kRowMajor);
}

TEST_P(ExpertsCudaTest, TakesAnyNumberOfTokens) {
  ISTHMUS_REQUIRE_DEVICE();
  for (const int64_t tokens : {1, 2, 7, 8, 9, 20, 41}) {
    ExpertsCase c(WeightFormat::kMxfp4, tokens, 256, 128, 12, 3, false);
    ExpectRight(c, Arithmetic::kReference, TilesFor(GetParam()), tokens % 3, 4);
  }
  for (const int64_t tokens : {1, 9, 33}) {
    ExpertsCase c(WeightFormat::kNvfp4, tokens, 256, 128, 7, 2, false);
    ExpectRight(c, Arithmetic::kReference, TilesFor(GetParam()));
  }
}

TEST_P(ExpertsCudaTest, TakesAllTokensInOneExpert) {
  ISTHMUS_REQUIRE_DEVICE();
  ExpertsCase c(WeightFormat::kMxfp4, 37, 256, 128, 6, 1, false);
  for (int32_t& id : c.ids) id = 4;
  ExpectRight(c, Arithmetic::kReference, TilesFor(GetParam()), 3);
}

TEST_P(ExpertsCudaTest, TakesNoTokensAndOnlyPadding) {
  ISTHMUS_REQUIRE_DEVICE();
  ExpertsCase c(WeightFormat::kMxfp4, 0, 256, 128, 6, 2, false);
  ExpectRight(c, Arithmetic::kReference, TilesFor(GetParam()));
  ExpectRight(c, Arithmetic::kReference, TilesFor(GetParam()), 3);
}

TEST_P(ExpertsCudaTest, TakesManyTokens) {
  ISTHMUS_REQUIRE_DEVICE();
  ExpertsCase c(WeightFormat::kMxfp4, 131, 128, 128, 9, 3, false);
  ExpectRight(c, Arithmetic::kReference, TilesFor(GetParam()), 2);
  ExpertsCase genuine(WeightFormat::kNvfp4, 27, 128, 128, 3, 1, false);
  ExpectRight(genuine, Arithmetic::kReference, TilesFor(GetParam()));
}

TEST_P(ExpertsCudaTest, TakesTheRealShape) {
  ISTHMUS_REQUIRE_DEVICE();
  if (!testing::TestsRealShapes()) GTEST_SKIP() << "minutes in the emulator";
  for (const int64_t tokens : {1, 9}) {
    ExpertsCase c(WeightFormat::kMxfp4, tokens, 4096, 1024, 12, 3, false);
    ExpectRight(c, Arithmetic::kReference, TilesFor(GetParam()));
  }
}

// Also of eight and more tokens of an expert, and whatever block they fall into.
TEST_P(ExpertsCudaTest, GivesATokenTheSameBitsInEveryBatch) {
  ISTHMUS_REQUIRE_DEVICE();
  const ExpertsVariant& variant = GetParam();
  TestDevice device;
  if (!CanRunHere(variant, device.exec())) GTEST_SKIP() << "another architecture's";
  // 11 groups of inputs: the eight parts of the gate product have one or two.
  ExpertsCase c(WeightFormat::kMxfp4, 27, 1408, 128, 6, 2, false);
  const DeviceCase on_device(c, TilesFor(variant));
  const ExpertsArgs all = on_device.Args(Arithmetic::kReference);
  ASSERT_TRUE(variant.launch(all, device.exec()).ok());
  device.Finish();
  const std::vector<float> expected = on_device.Gather(on_device.out, c.tokens_);
  for (const auto& [first, count] : {std::pair{0, 1}, {1, 2}, {3, 7}, {10, 17}}) {
    ExpertsArgs part = all;
    part.x = all.x.Rows(first, count);
    part.out = all.out.Rows(first, count);
    part.routed = all.routed.Rows(first, count);
    part.ids += first * c.k_;
    part.weights += first * c.k_;
    ASSERT_TRUE(variant.launch(part, device.exec()).ok());
  }
  device.Finish();
  EXPECT_TRUE(SameBits(on_device.Gather(on_device.out, c.tokens_), expected));
}

// A captured graph serves whatever ids and inputs lie in memory when it runs.
TEST_P(ExpertsCudaTest, FollowsTheIdsOfTheReplay) {
  ISTHMUS_REQUIRE_DEVICE();
  const ExpertsVariant& variant = GetParam();
  TestDevice device;
  if (!CanRunHere(variant, device.exec())) GTEST_SKIP() << "another architecture's";
  ExpertsCase c(WeightFormat::kMxfp4, 5, 128, 128, 9, 3, false);
  DeviceCase on_device(c, TilesFor(variant));
  const ExpertsArgs args = on_device.Args(Arithmetic::kReference);
  ASSERT_TRUE(variant.launch(args, device.exec()).ok());  // The workspace grows.
  device.Finish();
  ASSERT_TRUE(DeviceGraph::BeginCapture(device.stream()).ok());
  const absl::Status launched = variant.launch(args, device.exec());
  absl::StatusOr<DeviceGraph> graph = DeviceGraph::EndCapture(device.stream());
  ASSERT_TRUE(launched.ok() && graph.ok()) << launched << graph.status();

  // Other tokens in other experts, and fewer of them.
  std::reverse(c.ids.begin(), c.ids.end());
  std::reverse(c.x.begin(), c.x.end());
  std::fill(c.ids.begin() + 4 * 3, c.ids.end(), -1);
  on_device.ids.Set(c.ids);
  on_device.x.Set(c.x);
  ASSERT_TRUE(graph->Replay(device.stream()).ok());
  device.Finish();
  const std::vector<float> replayed = on_device.Gather(on_device.out, 4);
  ASSERT_TRUE(variant.launch(args, device.exec()).ok());
  device.Finish();
  EXPECT_TRUE(SameBits(replayed, on_device.Gather(on_device.out, 4)));
  c.tokens_ = 4;
  if (variant.patch == nullptr) {
    EXPECT_TRUE(SameBits(replayed, RunHost(c, Arithmetic::kReference, Experts).out));
  }
}

TEST_P(ExpertsCudaTest, KeepsNanToItsTokenAndMayWriteOverItsInput) {
  ISTHMUS_REQUIRE_DEVICE();
  const ExpertsVariant& variant = GetParam();
  TestDevice device;
  if (!CanRunHere(variant, device.exec())) GTEST_SKIP() << "another architecture's";
  ExpertsCase c(WeightFormat::kMxfp4, 3, 128, 128, 6, 2, false);
  c.x[128 + 5] = std::numeric_limits<float>::quiet_NaN();
  const DeviceCase on_device(c, TilesFor(variant));
  ExpertsArgs args = on_device.Args(Arithmetic::kReference);
  args.out = args.x;
  ASSERT_TRUE(variant.launch(args, device.exec()).ok());
  device.Finish();
  const std::vector<float> out = on_device.Gather(on_device.x, 3);
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i / 128 == 1) << i;
}

std::string NameOf(const ::testing::TestParamInfo<ExpertsVariant>& param) {
  const std::string name = kernels::testing::VariantName(param);
  return param.param.arches.begin == kArchSm120 ? name + "_sm120" : name;
}
INSTANTIATE_TEST_SUITE_P(Table, ExpertsCudaTest,
                         ::testing::ValuesIn(kernels::testing::DeviceVariants(ExpertsVariants())),
                         NameOf);

}  // namespace
}  // namespace isthmus::kernels
