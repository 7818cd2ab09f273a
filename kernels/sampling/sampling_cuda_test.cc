// SPDX-License-Identifier: Apache-2.0
// Every CUDA variant of batched sampling draws the tokens of the definition; so does the CPU's.
#include <cmath>
#include <limits>
#include <ostream>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/sampling/sampling_variants.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const SamplingBatchVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path");
}

namespace {

using kernels::testing::CanRunHere;
using kernels::testing::DeviceCopy;
using kernels::testing::TestDevice;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Batch {
  int64_t vocab = 0;
  std::vector<float> logits;  // [rows, vocab + 3]
  std::vector<float> temperature, top_p, min_p;
  std::vector<int32_t> top_k;
  std::vector<uint64_t> seed, counter;

  int64_t rows() const { return static_cast<int64_t>(temperature.size()); }
  // Rows that can be read in fours still can.
  int64_t padding() const { return vocab % 4 == 0 ? 4 : 3; }
  int64_t stride() const { return vocab + padding(); }
  void Add(const std::vector<float>& row, float t, float p, int32_t k, uint64_t at,
           float least = 0.0f) {
    vocab = static_cast<int64_t>(row.size());
    logits.insert(logits.end(), row.begin(), row.end());
    logits.insert(logits.end(), static_cast<size_t>(padding()), 1e30f);  // Read by nobody.
    temperature.push_back(t);
    top_p.push_back(p);
    top_k.push_back(k);
    min_p.push_back(least);
    seed.push_back(99);
    counter.push_back(at);
  }
  // What the definition draws; -1 where it refuses.
  std::vector<int32_t> Expected() const {
    std::vector<int32_t> out;
    for (int64_t t = 0; t < rows(); ++t) {
      const auto i = static_cast<size_t>(t);
      const absl::StatusOr<int32_t> token =
          SampleDefinition({.logits = F32Vector(logits.data() + t * stride(), vocab),
                            .temperature = temperature[i],
                            .top_p = top_p[i],
                            .top_k = top_k[i],
                            .min_p = min_p[i],
                            .seed = seed[i],
                            .counter = counter[i]},
                           Exec{});
      out.push_back(token.ok() ? *token : -1);
    }
    return out;
  }
  SamplingBatchArgs Args(float* data) const {
    return {.logits = {data, DType::kF32, rows(), vocab, stride()}};
  }
};

// Ties and holes, as masks and coarse logits make them.
std::vector<float> Logits(uint64_t seed, int64_t vocab) {
  std::vector<float> logits = kernels::testing::NormalValues(seed, vocab, 3.0f);
  for (int64_t id = 0; id < vocab; ++id) {
    float& logit = logits[static_cast<size_t>(id)];
    if (id % 3 == 0) logit = std::round(logit);
    if (id % 11 == 5) logit = id % 2 == 0 ? kNan : -kInfinity;
  }
  return logits;
}

Batch EveryKind(int64_t vocab, int draws) {
  Batch batch;
  const std::vector<float> logits = Logits(static_cast<uint64_t>(vocab), vocab);
  for (int i = 0; i < draws; ++i) {
    const auto at = static_cast<uint64_t>(i);
    batch.Add(logits, 0.0f, 1.0f, 0, at);
    batch.Add(logits, 1.0f, 1.0f, 0, at);
    batch.Add(logits, 0.6f, 0.95f, 0, at);
    batch.Add(logits, 1.5f, 1.0f, 40, at);
    batch.Add(logits, 3.0f, 0.3f, 5, at);
    batch.Add(logits, 1.0f, 1.0f, 0, at, 0.2f);
    batch.Add(logits, 2.0f, 0.9f, 30, at, 0.05f);
    batch.Add(logits, 1.0f, 1.0f, 0, at, 1.0f);
    batch.Add(std::vector<float>(static_cast<size_t>(vocab), 2.5f), 1.0f, 0.7f, 0, at);
  }
  batch.Add(std::vector<float>(static_cast<size_t>(vocab), kNan), 1.0f, 1.0f, 0, 0);
  batch.Add(std::vector<float>(static_cast<size_t>(vocab), -0.0f), 0.0f, 1.0f, 0, 0);
  return batch;
}

TEST(SampleBatchTest, DrawsOnTheCpuAsSampleDoes) {
  for (const int64_t vocab : {1, 7, 500}) {
    Batch batch = EveryKind(vocab, 10);
    std::vector<int32_t> tokens(batch.temperature.size(), -2);
    SamplingBatchArgs args = batch.Args(batch.logits.data());
    args.temperature = batch.temperature.data();
    args.top_p = batch.top_p.data();
    args.top_k = batch.top_k.data();
    args.min_p = batch.min_p.data();
    args.seed = batch.seed.data();
    args.counter = batch.counter.data();
    args.tokens = tokens.data();
    ASSERT_TRUE(SampleBatch(args, Exec{}).ok());
    EXPECT_EQ(tokens, batch.Expected());
    args.min_p = nullptr;
    EXPECT_EQ(SampleBatch(args, Exec{}).code(), absl::StatusCode::kInvalidArgument);
  }
}

class SamplingCudaTest : public ::testing::TestWithParam<SamplingBatchVariant> {
 protected:
  void ExpectTheDefinitions(const Batch& batch, TestDevice& device) {
    const DeviceCopy<float> logits(batch.logits);
    const DeviceCopy<float> temperature(batch.temperature);
    const DeviceCopy<float> top_p(batch.top_p);
    const DeviceCopy<int32_t> top_k(batch.top_k);
    const DeviceCopy<float> min_p(batch.min_p);
    const DeviceCopy<uint64_t> seed(batch.seed);
    const DeviceCopy<uint64_t> counter(batch.counter);
    const DeviceCopy<int32_t> tokens(batch.rows());
    SamplingBatchArgs args = batch.Args(logits.data());
    args.temperature = temperature.data();
    args.top_p = top_p.data();
    args.top_k = top_k.data();
    args.min_p = min_p.data();
    args.seed = seed.data();
    args.counter = counter.data();
    args.tokens = tokens.data();
    ASSERT_TRUE(ValidateSamplingBatch(args, device.exec().arch).ok());
    if (GetParam().supports != nullptr && !GetParam().supports(args)) return;
    ASSERT_TRUE(GetParam().launch(args, device.exec()).ok());
    device.Finish();
    EXPECT_EQ(tokens.ToHost(), batch.Expected());
    EXPECT_TRUE(tokens.Intact());
  }
};

TEST_P(SamplingCudaTest, DrawsTheTokensOfTheDefinition) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  for (const int64_t vocab : {1, 7, 600}) {
    ExpectTheDefinitions(EveryKind(vocab, testing::TestsRealShapes() ? 50 : 2), device);
  }
}

TEST_P(SamplingCudaTest, DrawsFromARealVocabulary) {
  ISTHMUS_REQUIRE_DEVICE();
  if (!testing::TestsRealShapes()) GTEST_SKIP() << "too large to emulate";
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  ExpectTheDefinitions(EveryKind(129280, 1), device);
}

// Many tokens at one edge, masses that vanish, temperatures that leave one token or all alike.
Batch AtTheEdges(int64_t vocab, uint64_t draws) {
  Batch batch;
  const auto size = static_cast<size_t>(vocab);
  const std::vector<float> equal(size, -2.0f);
  std::vector<float> halves(size, 1.0f);
  std::fill_n(halves.begin(), size / 2, 0.5f);
  std::vector<float> far(size, -3e38f);
  far[size / 3] = 3e38f;
  far[size / 2] = 3e38f;
  std::vector<float> close(size);
  for (size_t id = 0; id < size; ++id) close[id] = 5.0f + 1e-6f * static_cast<float>(id % 9);
  const std::vector<float> random = Logits(7, vocab);
  for (uint64_t at = 0; at < draws; ++at) {
    for (const std::vector<float>& row : {equal, halves, far, close, random}) {
      batch.Add(row, 1.0f, 0.8f, static_cast<int32_t>(vocab / 2), at);
      batch.Add(row, 1e-30f, 0.5f, 0, at);
      batch.Add(row, 1e30f, 1.0f, 3, at, 0.5f);
      batch.Add(row, 0.02f, 0.999f, 0, at);
    }
  }
  return batch;
}

TEST_P(SamplingCudaTest, DrawsTheTokensOfTheDefinitionAtEdges) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  // More equal logits than a block can list.
  ExpectTheDefinitions(testing::TestsRealShapes() ? AtTheEdges(20000, 5) : AtTheEdges(1300, 1),
                       device);
}

TEST(SampleBatchTest, ReadsInFoursWhereRowsAllowIt) {
  const auto reads = [](int64_t cols, int64_t stride, int64_t offset, int64_t rows) {
    alignas(16) static float logits[8];
    const SamplingBatchArgs args = {.logits = {logits + offset, DType::kF32, rows, cols, stride}};
    const std::span<const SamplingBatchVariant> table = SamplingBatchVariants();
    return table[0].supports(args);
  };
  EXPECT_TRUE(reads(512, 512, 0, 3));
  EXPECT_TRUE(reads(512, 516, 4, 3));
  EXPECT_TRUE(reads(512, 513, 0, 1));
  EXPECT_FALSE(reads(512, 513, 0, 2));
  EXPECT_FALSE(reads(510, 512, 0, 3));
  EXPECT_FALSE(reads(512, 512, 1, 3));
}

INSTANTIATE_TEST_SUITE_P(
    Table, SamplingCudaTest,
    ::testing::ValuesIn(kernels::testing::DeviceVariants(SamplingBatchVariants())),
    kernels::testing::VariantName<SamplingBatchVariant>);

}  // namespace
}  // namespace isthmus::kernels
