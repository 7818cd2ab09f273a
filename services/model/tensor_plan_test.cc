// SPDX-License-Identifier: Apache-2.0
#include "services/model/tensor_plan.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/model/testing/checkpoint_files.h"

namespace isthmus::model {
namespace {

using kernels::WeightFormat;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

absl::Status CheckFiles(const CheckpointFiles& files) {
  const TemporaryFolder folder;
  files.Write(folder.path());
  const auto config = LoadModelConfig(folder.path());
  if (!config.ok()) return config.status();
  const auto checkpoint = Checkpoint::Open(folder.path());
  if (!checkpoint.ok()) return checkpoint.status();
  return CheckTensors(*config, *checkpoint);
}

std::string ErrorOf(const CheckpointFiles& files) {
  const absl::Status status = CheckFiles(files);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

StoredTensor ByteTensor(const std::string& name) {
  return {name, TensorType::kU8, {1}, std::vector<std::byte>(1), 0};
}

// Flash, specification 1.1, with an April block.
ModelConfig FlashConfig() {
  ModelConfig c;
  c.vocab_size = 129280;
  c.hidden_size = 4096;
  c.num_hidden_layers = 43;
  c.num_attention_heads = 64;
  c.q_lora_rank = 1024;
  c.o_groups = 8;
  c.o_lora_rank = 1024;
  c.n_routed_experts = 256;
  c.num_experts_per_tok = 6;
  c.moe_intermediate_size = 2048;
  c.num_hash_layers = 3;
  c.compress_ratios = {0, 0};
  for (int i = 2; i < 43; ++i) c.compress_ratios.push_back(i % 2 == 0 ? 4 : 128);
  c.compress_ratios.push_back(0);
  return c;
}

std::vector<PlannedTensor> FlashPlan(WeightFormat experts) {
  return PlanTensors(FlashConfig(), {.num_stages = 1}, [experts](const std::string& base) {
    return IsMtpTensor(base) ? WeightFormat::kMxfp4 : experts;
  });
}

const PlannedTensor& Find(const std::vector<PlannedTensor>& plan, const std::string& name) {
  for (const PlannedTensor& tensor : plan) {
    if (tensor.name == name) return tensor;
  }
  ADD_FAILURE() << name;
  return plan.front();
}

TEST(TensorPlanTest, CountsTheTensorsAndBytesOfThePublishedCheckpoints) {
  // Specification 6.1: 159.61 GB in all, MTP 1575 tensors; 6.3: 132,096 tensors of 33,024 experts.
  int64_t bytes = 0;
  int64_t mtp_tensors = 0;
  for (const PlannedTensor& tensor : FlashPlan(WeightFormat::kMxfp4)) {
    int64_t size = TensorTypeBytes(tensor.type);
    for (const int64_t dim : tensor.shape) size *= dim;
    bytes += size;
    mtp_tensors += IsMtpTensor(tensor.name) ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(bytes), 159.61e9, 0.01e9);
  EXPECT_EQ(mtp_tensors, 1575);
  EXPECT_EQ(FlashPlan(WeightFormat::kNvfp4).size() - FlashPlan(WeightFormat::kMxfp4).size(),
            33024u * 2);
}

TEST(TensorPlanTest, GivesTheShapesOfTheSpecification) {
  const std::vector<PlannedTensor> plan = FlashPlan(WeightFormat::kNvfp4);
  const auto shape = [&plan](const std::string& name) { return Find(plan, name).shape; };
  EXPECT_THAT(shape("embed.weight"), ElementsAre(129280, 4096));
  EXPECT_THAT(shape("hc_head_fn"), ElementsAre(4, 16384));
  EXPECT_THAT(shape("layers.0.hc_attn_fn"), ElementsAre(24, 16384));
  EXPECT_THAT(shape("layers.0.attn.wq_a.scale"), ElementsAre(8, 32));
  EXPECT_THAT(shape("layers.0.attn.wq_b.weight"), ElementsAre(32768, 1024));
  EXPECT_THAT(shape("layers.0.attn.wkv.scale"), ElementsAre(4, 32));
  EXPECT_THAT(shape("layers.0.attn.wo_a.weight"), ElementsAre(8192, 4096));
  EXPECT_THAT(shape("layers.0.attn.wo_b.scale"), ElementsAre(32, 64));
  EXPECT_THAT(shape("layers.2.ffn.gate.tid2eid"), ElementsAre(129280, 6));
  EXPECT_THAT(shape("layers.3.ffn.gate.bias"), ElementsAre(256));
  EXPECT_THAT(shape("layers.2.attn.compressor.ape"), ElementsAre(4, 1024));
  EXPECT_THAT(shape("layers.2.attn.compressor.wkv.weight"), ElementsAre(1024, 4096));
  EXPECT_THAT(shape("layers.3.attn.compressor.ape"), ElementsAre(128, 512));
  EXPECT_THAT(shape("layers.3.attn.compressor.wgate.weight"), ElementsAre(512, 4096));
  EXPECT_THAT(shape("layers.2.attn.indexer.wq_b.weight"), ElementsAre(8192, 1024));
  EXPECT_THAT(shape("layers.2.attn.indexer.weights_proj.weight"), ElementsAre(64, 4096));
  EXPECT_THAT(shape("layers.2.attn.indexer.compressor.ape"), ElementsAre(4, 256));
  EXPECT_THAT(shape("layers.2.attn.indexer.compressor.norm.weight"), ElementsAre(128));
  EXPECT_THAT(shape("layers.42.ffn.experts.255.w1.weight"), ElementsAre(2048, 2048));
  EXPECT_THAT(shape("layers.42.ffn.experts.255.w1.weight_scale"), ElementsAre(2048, 256));
  EXPECT_THAT(shape("layers.42.ffn.experts.255.w2.weight"), ElementsAre(4096, 1024));
  EXPECT_THAT(shape("layers.42.ffn.experts.255.w2.weight_scale"), ElementsAre(4096, 128));
  EXPECT_THAT(shape("layers.42.ffn.experts.255.w2.weight_scale_2"), ElementsAre());
  EXPECT_THAT(shape("layers.0.ffn.shared_experts.w2.scale"), ElementsAre(32, 16));
  EXPECT_THAT(shape("mtp.0.ffn.experts.0.w1.scale"), ElementsAre(2048, 128));
  EXPECT_THAT(shape("mtp.0.e_proj.scale"), ElementsAre(32, 32));
  EXPECT_EQ(Find(plan, "mtp.0.ffn.experts.0.w1.weight").type, TensorType::kI8);
  EXPECT_EQ(Find(plan, "layers.0.ffn.experts.0.w1.weight").type, TensorType::kU8);
}

TEST(TensorPlanTest, GivesTheShapesOfTheDsparkDrafter) {
  ModelConfig config = FlashConfig();
  config.dspark_markov_rank = 256;
  config.dspark_target_layer_ids = {40, 41, 42};
  const std::vector<PlannedTensor> plan =
      PlanTensors(config, {.num_stages = 3, .is_dspark = true},
                  [](const std::string&) { return WeightFormat::kMxfp4; });
  EXPECT_THAT(Find(plan, "mtp.0.main_proj.weight").shape, ElementsAre(4096, 12288));
  EXPECT_THAT(Find(plan, "mtp.0.main_proj.scale").shape, ElementsAre(32, 96));
  EXPECT_THAT(Find(plan, "mtp.2.markov_head.markov_w1.weight").shape, ElementsAre(129280, 256));
  EXPECT_THAT(Find(plan, "mtp.2.confidence_head.proj.weight").shape, ElementsAre(1, 4352));
  EXPECT_THAT(Find(plan, "mtp.1.ffn.gate.bias").shape, ElementsAre(256));
}

TEST(TensorPlanTest, AcceptsBothLayoutsAndBothDrafters) {
  EXPECT_TRUE(CheckFiles(MiniatureCheckpoint(WeightFormat::kNvfp4)).ok());
  EXPECT_TRUE(CheckFiles(MiniatureCheckpoint(WeightFormat::kMxfp4)).ok());
  EXPECT_TRUE(CheckFiles(MiniatureCheckpoint(WeightFormat::kFp8Block128)).ok());
  const absl::Status dspark = CheckFiles(MiniatureCheckpoint(WeightFormat::kNvfp4, true));
  EXPECT_TRUE(dspark.ok()) << dspark;
}

TEST(TensorPlanTest, NamesAMissingTensor) {
  for (const char* name :
       {"embed.weight", "layers.1.attn.wq_a.scale", "layers.0.ffn.gate.tid2eid",
        "layers.2.ffn.experts.3.w2.weight", "layers.2.ffn.experts.3.w2.input_scale",
        "mtp.0.ffn.experts.1.w1.scale", "mtp.0.e_proj.weight"}) {
    CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
    files.Erase(name);
    EXPECT_THAT(ErrorOf(files),
                AllOf(HasSubstr("1 tensor: "), HasSubstr(std::string(name) + "' is missing")));
  }
}

TEST(TensorPlanTest, NamesASurplusTensor) {
  for (const char* name : {"layers.4.attn_norm.weight", "extra", "mtp.0.surplus", "mtp.x.norm",
                           "mtp.00.norm.weight", "layers.1.ffn.gate.tid2eid"}) {
    CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
    files.tensors.push_back(ByteTensor(name));
    EXPECT_THAT(ErrorOf(files), HasSubstr(std::string(name) + "' is surplus, found U8 [1]"));
  }
}

TEST(TensorPlanTest, NamesExpectedAndFoundTypeAndShape) {
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  files.Find("layers.1.attn.wkv.weight").type = TensorType::kI8;
  files.Find("norm.weight").shape = {48, 2};
  EXPECT_THAT(ErrorOf(files),
              AllOf(HasSubstr("2 tensors: "),
                    HasSubstr("'layers.1.attn.wkv.weight': expected F8_E4M3 [128, 96], found "
                              "I8 [128, 96]"),
                    HasSubstr("'norm.weight': expected BF16 [96], found BF16 [48, 2]")));
}

TEST(TensorPlanTest, ChoosesTheFormatOfEachExpertByItsType) {
  // An NVFP4 weight whose dtype says MXFP4 (or the reverse) fails by its scales, never silently.
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  files.Find("layers.1.ffn.experts.0.w1.weight").type = TensorType::kI8;
  EXPECT_THAT(ErrorOf(files),
              AllOf(HasSubstr("layers.1.ffn.experts.0.w1.scale' is missing"),
                    HasSubstr("layers.1.ffn.experts.0.w1.weight_scale' is surplus")));
  // Neither: the scales that are there say what was meant.
  files.Find("layers.1.ffn.experts.0.w1.weight").type = TensorType::kBool;
  EXPECT_THAT(ErrorOf(files), HasSubstr("expected U8 [64, 48], found BOOL [64, 48]"));
}

TEST(TensorPlanTest, CutsALongListOfProblems) {
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  for (int i = 0; i < 40; ++i) files.tensors.push_back(ByteTensor("extra" + std::to_string(i)));
  EXPECT_THAT(ErrorOf(files), AllOf(HasSubstr("40 tensors: "), HasSubstr("; and 24 more")));
}

TEST(TensorPlanTest, IgnoresCopiesOfEmbeddingAndHeadUnderMtp) {
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  files.tensors.push_back(ByteTensor("mtp.0.emb.weight"));
  files.tensors.push_back(ByteTensor("mtp.0.head.weight"));
  EXPECT_TRUE(CheckFiles(files).ok());
}

TEST(TensorPlanTest, WantsTheStagesThatTheConfigCounts) {
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  std::erase_if(files.tensors, [](const StoredTensor& t) { return IsMtpTensor(t.name); });
  EXPECT_THAT(ErrorOf(files),
              HasSubstr("num_nextn_predict_layers 1, the checkpoint holds 0 mtp stages"));
}

TEST(TensorPlanTest, RefusesADrafterThatTheConfigDoesNotDescribe) {
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4, /*is_dspark=*/true);
  const std::string rank = "\"dspark_markov_rank\": 8,";
  files.config_json.erase(files.config_json.find(rank), rank.size());
  EXPECT_THAT(ErrorOf(files), HasSubstr("config.json says dspark_markov_rank 0 and names 3"));
}

TEST(TensorPlanTest, RefusesAnAbsurdNumberOfExpertsBeforePlanning) {
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  const std::string experts = "\"n_routed_experts\": 4,";
  files.config_json.replace(files.config_json.find(experts), experts.size(),
                            "\"n_routed_experts\": 4096,");
  EXPECT_THAT(ErrorOf(files), HasSubstr("asks for 49152 expert matrices"));
}

}  // namespace
}  // namespace isthmus::model
