// SPDX-License-Identifier: Apache-2.0
#include "services/worker/worker_plan.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "gtest/gtest.h"
#include "kvtransfer/transport_loopback.h"
#include "services/base/clock.h"
#include "services/worker/worker.h"

namespace isthmus::worker {
namespace {

constexpr char kCheckpoint[] = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";

// config.json of V4-Flash with NVFP4 experts, alone in a folder (specification 1.1, 6.3).
std::string FlashFolder() {
  const std::string folder = testing::TempDir() + "/flash-shape";
  std::filesystem::create_directories(folder);
  nlohmann::json ratios = {0, 0};
  while (ratios.size() < 43) ratios.push_back(ratios.size() % 2 == 0 ? 4 : 128);
  ratios.push_back(0);
  const nlohmann::json json = {{"model_type", "deepseek_v4"},
                               {"vocab_size", 129280},
                               {"hidden_size", 4096},
                               {"num_hidden_layers", 43},
                               {"num_attention_heads", 64},
                               {"q_lora_rank", 1024},
                               {"o_groups", 8},
                               {"o_lora_rank", 1024},
                               {"n_routed_experts", 256},
                               {"num_experts_per_tok", 6},
                               {"moe_intermediate_size", 2048},
                               {"num_hash_layers", 3},
                               {"num_nextn_predict_layers", 1},
                               {"compress_ratios", ratios},
                               {"quantization_config", {{"moe_quant_algo", "NVFP4"}}}};
  std::ofstream(folder + "/config.json") << json.dump();
  return folder;
}

absl::StatusOr<engine::MemoryPlan> Plan(const WorkerConfig& config) {
  absl::StatusOr<ModelShape> shape = ReadModelShape(config);
  if (!shape.ok()) return shape.status();
  return PlanWorker(config, *shape);
}

TEST(WorkerPlanTest, NeedsNothingButConfigJson) {
  WorkerConfig config;
  config.checkpoint = FlashFolder();
  config.device = "cuda:0";
  config.max_sequence_tokens = 1 << 20;
  config.memory = "184GiB";
  const auto plan = *Plan(config);
  EXPECT_DOUBLE_EQ(plan.bytes_per_token(), 3514.25);
  EXPECT_NEAR(static_cast<double>(plan.weight_bytes), 164.68e9, 0.05e9);
  EXPECT_EQ(plan.max_sequence_tokens, 1 << 20);
  EXPECT_LE(plan.total_bytes, int64_t{184} << 30);
  EXPECT_GT(plan.total_bytes, int64_t{183} << 30);
}

// Each of two GPUs holds about half of the weights, and the whole cache.
TEST(WorkerPlanTest, OfRanksIsTheMemoryOfOne) {
  WorkerConfig config;
  config.checkpoint = FlashFolder();
  config.device = "cuda:0";
  config.tp = 2;
  const auto plan = *Plan(config);
  EXPECT_DOUBLE_EQ(plan.bytes_per_token(), 3514.25);
  EXPECT_GT(plan.weight_bytes, int64_t{82'000'000'000});
  EXPECT_LT(plan.weight_bytes, int64_t{87'000'000'000});
}

TEST(WorkerPlanTest, StoresIndexKeysAsConfigured) {
  WorkerConfig config;
  config.checkpoint = FlashFolder();
  const auto named = [&](const std::string& format) {
    config.index_key_format = format;
    return *Plan(config);
  };
  const auto fp4 = named("default");
  EXPECT_EQ(fp4.index_key_format, "fp4");
  EXPECT_EQ(engine::MemoryPlanJson(fp4), engine::MemoryPlanJson(named("fp4")));
  // A quarter of a key of 68, 132 or 256 bytes in each of 21 layers.
  EXPECT_DOUBLE_EQ(fp4.bytes_per_token(), 3514.25);
  EXPECT_DOUBLE_EQ(named("fp8").bytes_per_token(), 3514.25 + (132 - 68) * 21 / 4);
  EXPECT_DOUBLE_EQ(named("bf16").bytes_per_token(), 3514.25 + (256 - 68) * 21 / 4);
  EXPECT_EQ(named("bf16").index_key_format, "bf16");
  EXPECT_NE(engine::MemoryPlanJson(named("bf16")).find("\"index_key_format\": \"bf16\""),
            std::string::npos);
  config.arithmetic = "math";
  EXPECT_EQ(named("default").index_key_format, "f32");
  EXPECT_EQ(named("f32").index_key_format, "f32");
}

TEST(WorkerPlanTest, NamesADeviceForEachRank) {
  WorkerConfig config;
  EXPECT_TRUE(DevicesOf(config)->empty());
  config.device = "cuda:3";
  EXPECT_EQ(*DevicesOf(config), (std::vector<int>{3}));
  config.tp = 2;
  EXPECT_EQ(*DevicesOf(config), (std::vector<int>{3, 4}));
  config.device = "cuda:1,cuda:0";
  EXPECT_EQ(*DevicesOf(config), (std::vector<int>{1, 0}));
  config.tp = 3;
  EXPECT_EQ(DevicesOf(config).status().message(),
            "device is \"cuda:1,cuda:0\", which are 2 GPUs, for 3 ranks");
  config.device = "cpu";
  EXPECT_EQ(DevicesOf(config).status().message(),
            "device is \"cpu\", want a GPU for each of 3 ranks");
  config.tp = 1;
  config.device = "cuda:0,cuda:1";
  EXPECT_EQ(DevicesOf(config).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(WorkerPlanTest, OnTheCpuLargeWeightsStayInTheirFiles) {
  WorkerConfig config;
  config.checkpoint = FlashFolder();
  EXPECT_EQ(Plan(config)->weight_bytes, 0);
  config.checkpoint = kCheckpoint;
  EXPECT_GT(Plan(config)->weight_bytes, 1'000'000);
}

TEST(WorkerPlanTest, RefusesWithTheNameOfTheField) {
  const auto refusal = [](const WorkerConfig& config) {
    const absl::Status status = Plan(config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  WorkerConfig config;
  EXPECT_EQ(refusal(config), "checkpoint: no directory is given");
  config.checkpoint = kCheckpoint;
  config.memory = "1.5GiB";
  EXPECT_NE(refusal(config).find("memory: is \"1.5GiB\""), std::string::npos);
  config.memory = "1MiB";
  EXPECT_NE(refusal(config).find("raise memory to"), std::string::npos);
  config.memory = "0";
  config.device = "cuda:0";
  config.tp = 3;  // Of 8 heads in 2 groups.
  EXPECT_EQ(refusal(config).find("tp: "), 0u);
  config.tp = 1;
  config.device = "cpu";
  config.max_sequence_tokens = 70000;
  EXPECT_NE(refusal(config).find("one sequence of 70000 tokens"), std::string::npos);
  config.max_sequence_tokens = 0;
  config.arithmetic = "math";
  config.index_key_format = "fp8";
  EXPECT_EQ(refusal(config),
            "model.index_key_format: is \"fp8\", but arithmetic math stores index keys as f32");
  config.arithmetic = "reference";
  config.index_key_format = "f32";
  EXPECT_EQ(refusal(config),
            "model.index_key_format: is \"f32\", but arithmetic reference stores index keys as "
            "fp4, fp8 or bf16");
  config.index_key_format = "default";
  config.checkpoint = "/nowhere";
  EXPECT_EQ(Plan(config).status().code(), absl::StatusCode::kNotFound);
}

// The pools of a worker are those that were printed for it, and it takes no longer sequences.
TEST(WorkerPlanTest, AWorkerHasWhatWasPlanned) {
  WorkerConfig config;
  config.model_kind = "scripted";
  config.memory = "64MiB";
  config.max_sequence_tokens = 3000;
  const auto plan = *Plan(config);
  transfer::LoopbackNetwork network;
  WorkerParts parts;
  parts.transport = transfer::MakeLoopbackTransport(&network, "worker", RealClock());
  const auto worker =
      *Worker::Assemble(config, v1::WORKER_ROLE_PREFILL, std::move(parts), RealClock());
  EXPECT_EQ(engine::MemoryPlanJson(worker->plan()), engine::MemoryPlanJson(plan));
  EXPECT_EQ(worker->card().values().max_sequence_tokens(), 3000u);
  for (const engine::PlannedPool& pool : plan.pools) {
    if (pool.name == "csa_kv") {
      EXPECT_EQ(worker->pool().pages(kernels::kCsaKv).num_pages(), pool.entries);
    }
    if (pool.name == "state_slot") {
      EXPECT_EQ(worker->pool().slots().num_pages(), pool.entries);
    }
  }
}

TEST(WorkerPlanTest, AWorkerThatCannotHoldAChunkDoesNotStart) {
  WorkerConfig config;
  config.model_kind = "scripted";
  config.cache_tokens = 512;
  config.chunk_tokens = 1024;
  transfer::LoopbackNetwork network;
  WorkerParts parts;
  parts.transport = transfer::MakeLoopbackTransport(&network, "worker", RealClock());
  const absl::Status status =
      Worker::Assemble(config, v1::WORKER_ROLE_PREFILL, std::move(parts), RealClock()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("one chunk of 1024 tokens needs 4"), absl::string_view::npos);
}

}  // namespace
}  // namespace isthmus::worker
