// SPDX-License-Identifier: Apache-2.0
// What is uploaded is what was loaded, whole and as a rank's share; and random weights of a model's
// shapes give finite logits.
#include "services/model/device_weights.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels/core/weight_tiles.h"
#include "kernels/testing/device.h"
#include "services/model/device_context.h"
#include "services/model/sharded_weights.h"

namespace isthmus::model {
namespace {

using kernels::WeightView;

constexpr char kGolden[] = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-random-3layer/";

std::unique_ptr<Weights> Load(const std::string& name, WeightOptions::Residency residency) {
  WeightOptions options;
  options.residency = residency;
  auto weights = Weights::Load(kGolden + name, options);
  EXPECT_TRUE(weights.ok()) << weights.status();
  return *std::move(weights);
}

std::vector<uint8_t> Fetch(const void* from, int64_t bytes) {
  std::vector<uint8_t> out(static_cast<size_t>(bytes));
  EXPECT_TRUE(kernels::CopyToHost(out.data(), from, bytes, nullptr).ok());
  return out;
}

// Every value of the matrix on the device is that of the host's.
void ExpectSameValues(const WeightView& host, const WeightView& device) {
  ASSERT_EQ(device.layout,
            kernels::TileLayout(device.format, kernels::PropertiesOf(0).value().arch));
  ASSERT_EQ(host.rows, device.rows);
  ASSERT_EQ(host.cols, device.cols);
  const std::vector<uint8_t> elements = Fetch(device.elements, kernels::TiledBytes(device));
  std::vector<uint8_t> scales;
  WeightView copy = device;
  copy.elements = elements.data();
  if (device.scales != nullptr) {
    scales = Fetch(device.scales,
                   (device.first_row + device.rows + 127) / 128 * kernels::ScaleColumns(device));
    copy.scales = scales.data();
  }
  for (int64_t n = 0; n < host.rows; ++n) {
    for (int64_t k = 0; k < host.cols; ++k) {
      const auto value = [&](const WeightView& w) {
        return kernels::WeightElement(w, n, k) * kernels::WeightScale(w, n, k) * w.global_scale;
      };
      ASSERT_EQ(value(host), value(copy)) << n << ", " << k;
    }
  }
}

void ExpectSameLayer(const LayerWeights& host, const LayerWeights& device) {
  ExpectSameValues(host.wq_b, device.wq_b);
  ExpectSameValues(host.wo_a.back(), device.wo_a.back());
  ExpectSameValues(host.wo_b, device.wo_b);
  ExpectSameValues(host.hc_attn.fn, device.hc_attn.fn);
  ExpectSameValues(host.gate, device.gate);
  ExpectSameValues(host.shared.w2, device.shared.w2);
  std::vector<kernels::ExpertWeights> experts(device.experts.size());
  ASSERT_TRUE(kernels::CopyToHost(experts.data(), device.device_experts,
                                  static_cast<int64_t>(experts.size() * sizeof(experts[0])),
                                  nullptr)
                  .ok());
  for (size_t e = 0; e < experts.size(); e += 3) {
    ExpectSameValues(host.experts[e].w1, experts[e].w1);
    ExpectSameValues(host.experts[e].w2, experts[e].w2);
  }
  const std::vector<uint8_t> norm = Fetch(device.attn_norm.data, 4 * device.attn_norm.size);
  EXPECT_EQ(0, std::memcmp(norm.data(), host.attn_norm.data, norm.size()));
}

TEST(DeviceWeightsTest, EveryValueArrives) {
  ISTHMUS_REQUIRE_DEVICE();
  for (const char* name : {"mxfp4", "nvfp4-cast"}) {
    const auto whole = Load(name, WeightOptions::kMapped);
    const auto uploaded = DeviceWeights::Upload(*whole, nullptr, nullptr);
    ASSERT_TRUE(uploaded.ok()) << uploaded.status();
    EXPECT_TRUE((*uploaded)->views().on_device);
    for (int i = 0; i < whole->config().num_hidden_layers; ++i) {
      ExpectSameLayer(whole->layer(i), (*uploaded)->views().layers[static_cast<size_t>(i)]);
    }
    ExpectSameValues(whole->head(), (*uploaded)->views().head);
    // A lossless cast takes no more room than what it was cast from.
    EXPECT_EQ((*uploaded)->views().layers[0].experts[0].w1.format, kernels::WeightFormat::kMxfp4);
  }
}

TEST(DeviceWeightsTest, ARanksShareArrives) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto whole = Load("mxfp4", WeightOptions::kMapped);
  const ShardPlan plan = *PlanShard(whole->config(), 1, 2);
  const auto share = ShardedWeights::Create(whole.get(), plan);
  const auto uploaded = DeviceWeights::Upload(*whole, &plan, nullptr);
  ASSERT_TRUE(share.ok()) << share.status();
  ASSERT_TRUE(uploaded.ok()) << uploaded.status();
  ExpectSameLayer((*share)->layer(1), (*uploaded)->views().layers[1]);
  ExpectSameValues((*share)->head(), (*uploaded)->views().head);
}

TEST(DeviceWeightsTest, RefusesWhatIsPackedForTheCpu) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto packed = Load("mxfp4", WeightOptions::kPacked);
  const auto refused = DeviceWeights::Upload(*packed, nullptr, nullptr);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("mapped"), absl::string_view::npos);
}

}  // namespace
}  // namespace isthmus::model
