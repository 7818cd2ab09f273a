// SPDX-License-Identifier: Apache-2.0
#include "services/model/weights.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/core/gemm.h"
#include "services/model/checkpoint.h"
#include "services/model/testing/checkpoint_files.h"

namespace isthmus::model {
namespace {

using kernels::WeightFormat;
using kernels::WeightLayout;
using kernels::WeightView;
using ::testing::AllOf;
using ::testing::HasSubstr;

const char kTinyRecall[] = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";
const char kThreeLayers[] = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-random-3layer";

WeightOptions In(WeightOptions::Residency residency) {
  WeightOptions options;
  options.residency = residency;
  return options;
}

std::unique_ptr<Weights> Load(const std::string& dir, WeightOptions::Residency residency,
                              ThreadPool* threads = nullptr) {
  absl::StatusOr<std::unique_ptr<Weights>> weights = Weights::Load(dir, In(residency), threads);
  EXPECT_TRUE(weights.ok()) << weights.status();
  return weights.ok() ? *std::move(weights) : nullptr;
}

// Values of one matrix straight from the file, by specification 6.1 and 6.3, with code of its own:
// nothing here is shared with the loader but the mapping.
class FileMatrix {
 public:
  FileMatrix(const Checkpoint& file, const std::string& base)
      : weight_(file.Find(base + ".weight")), scale_(file.Find(base + ".scale")) {
    if (weight_ == nullptr) weight_ = file.Find(base);
    if (scale_ == nullptr) scale_ = file.Find(base + ".weight_scale");
    const CheckpointTensor* global = file.Find(base + ".weight_scale_2");
    if (global != nullptr) std::memcpy(&global_, global->bytes, 4);
  }

  double Value(int64_t n, int64_t k) const {
    const int64_t columns = weight_->shape[1];
    const auto power = [](uint8_t ue8m0) { return std::ldexp(1.0, ue8m0 - 127); };
    switch (weight_->type) {
      case TensorType::kF32:
      case TensorType::kBf16:
        return Float(n * columns + k);
      case TensorType::kF8E4m3:
        return kernels::Fp8E4m3Value(Byte(weight_, n * columns + k)) *
               power(Scale(n / 128, k / 128));
      case TensorType::kI8:
        return Fp4(n, k) * power(Scale(n, k / 32));
      default:
        return Fp4(n, k) * kernels::Fp8E4m3Value(Scale(n, k / 16)) * double{global_};
    }
  }

 private:
  static uint8_t Byte(const CheckpointTensor* tensor, int64_t i) {
    return static_cast<uint8_t>(tensor->bytes[i]);
  }
  uint8_t Scale(int64_t row, int64_t column) const {
    return Byte(scale_, row * scale_->shape[1] + column);
  }
  double Fp4(int64_t n, int64_t k) const {
    const uint8_t pair = Byte(weight_, n * weight_->shape[1] + k / 2);
    return kernels::Fp4E2m1Value(k % 2 == 0 ? pair & 15 : pair >> 4);
  }
  double Float(int64_t i) const {
    const int64_t width = TensorTypeBytes(weight_->type);
    char bits[4] = {};
    std::memcpy(bits + (4 - width), weight_->bytes + i * width, static_cast<size_t>(width));
    float value = 0;
    std::memcpy(&value, bits, 4);
    return value;
  }

  const CheckpointTensor* weight_;
  const CheckpointTensor* scale_;
  float global_ = 0;
};

// Elements of the view against the file: all of a small matrix, every 61st of a larger one.
void ExpectFileValues(const Checkpoint& file, const std::string& base, const WeightView& view,
                      int64_t first_row = 0) {
  const int64_t count = view.rows * view.cols;
  ASSERT_GT(count, 0) << base;
  const FileMatrix matrix(file, base);
  for (int64_t i = 0; i<count; i += count> 20'000 ? 61 : 1) {
    const int64_t n = i / view.cols;
    const int64_t k = i % view.cols;
    const double found = kernels::WeightValue(view, n, k);
    const double wanted = matrix.Value(first_row + n, k);
    if (found != wanted) {
      FAIL() << base << " [" << n << ", " << k << "]: found " << found << ", wanted " << wanted;
    }
  }
}

void ExpectFileVector(const Checkpoint& file, const std::string& name,
                      const kernels::VectorView& vector) {
  const CheckpointTensor* tensor = file.Find(name);
  ASSERT_NE(tensor, nullptr) << name;
  const int64_t width = TensorTypeBytes(tensor->type);
  ASSERT_EQ(vector.size, tensor->size / width) << name;
  for (int64_t i = 0; i < vector.size; ++i) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + (4 - width), tensor->bytes + i * width,
                static_cast<size_t>(width));
    float value = 0;
    std::memcpy(&value, &bits, 4);
    ASSERT_EQ(vector.f32()[i], value) << name << " [" << i << "]";
  }
}

void ExpectHyperConnection(const Checkpoint& file, const std::string& prefix,
                           const HyperConnectionWeights& hc) {
  ExpectFileValues(file, prefix + "_fn", hc.fn);
  ExpectFileVector(file, prefix + "_scale", hc.scale);
  ExpectFileVector(file, prefix + "_base", hc.base);
}

void ExpectCompressor(const Checkpoint& file, const std::string& prefix,
                      const CompressorWeights& compressor) {
  ExpectFileValues(file, prefix + "wkv", compressor.wkv);
  ExpectFileValues(file, prefix + "wgate", compressor.wgate);
  ExpectFileVector(file, prefix + "norm.weight", compressor.norm);
  ExpectFileVector(
      file, prefix + "ape",
      kernels::F32Vector(compressor.ape, int64_t{compressor.ratio} * compressor.width));
}

void ExpectLayer(const Checkpoint& file, const ModelConfig& config, int i,
                 const LayerWeights& layer) {
  const std::string prefix = absl::StrCat("layers.", i, ".");
  const std::string attn = prefix + "attn.";
  const std::string ffn = prefix + "ffn.";
  ExpectHyperConnection(file, prefix + "hc_attn", layer.hc_attn);
  ExpectHyperConnection(file, prefix + "hc_ffn", layer.hc_ffn);
  ExpectFileVector(file, prefix + "attn_norm.weight", layer.attn_norm);
  ExpectFileVector(file, prefix + "ffn_norm.weight", layer.ffn_norm);
  ExpectFileVector(file, attn + "q_norm.weight", layer.q_norm);
  ExpectFileVector(file, attn + "kv_norm.weight", layer.kv_norm);
  ExpectFileVector(file, attn + "attn_sink", layer.attn_sink);
  ExpectFileValues(file, attn + "wq_a", layer.wq_a);
  ExpectFileValues(file, attn + "wq_b", layer.wq_b);
  ExpectFileValues(file, attn + "wkv", layer.wkv);
  ExpectFileValues(file, attn + "wo_b", layer.wo_b);
  ASSERT_EQ(layer.wo_a.size(), static_cast<size_t>(config.o_groups));
  for (size_t g = 0; g < layer.wo_a.size(); ++g) {
    ExpectFileValues(file, attn + "wo_a", layer.wo_a[g],
                     static_cast<int64_t>(g) * config.o_lora_rank);
  }
  ASSERT_EQ(layer.compressor.has_value(), layer.ratio != 0);
  ASSERT_EQ(layer.indexer.has_value(), layer.ratio == 4);
  if (layer.compressor) ExpectCompressor(file, attn + "compressor.", *layer.compressor);
  if (layer.indexer) {
    ExpectFileValues(file, attn + "indexer.wq_b", layer.indexer->wq_b);
    ExpectFileValues(file, attn + "indexer.weights_proj", layer.indexer->weights_proj);
    ExpectCompressor(file, attn + "indexer.compressor.", layer.indexer->compressor);
  }
  ExpectFileValues(file, ffn + "gate", layer.gate);
  if (config.is_hash_layer(i)) {
    const CheckpointTensor* ids = file.Find(ffn + "gate.tid2eid");
    ASSERT_EQ(layer.hash_ids.size() * 8, static_cast<size_t>(ids->size));
    EXPECT_EQ(std::memcmp(layer.hash_ids.data(), ids->bytes, layer.hash_ids.size() * 8), 0);
    EXPECT_EQ(layer.gate_bias.size, 0);
  } else {
    EXPECT_TRUE(layer.hash_ids.empty());
    ExpectFileVector(file, ffn + "gate.bias", layer.gate_bias);
  }
  ASSERT_EQ(layer.experts.size(), static_cast<size_t>(config.n_routed_experts));
  for (size_t e = 0; e < layer.experts.size(); ++e) {
    const std::string base = absl::StrCat(ffn, "experts.", e, ".");
    ExpectFileValues(file, base + "w1", layer.experts[e].w1);
    ExpectFileValues(file, base + "w3", layer.experts[e].w3);
    ExpectFileValues(file, base + "w2", layer.experts[e].w2);
  }
  ExpectFileValues(file, ffn + "shared_experts.w1", layer.shared.w1);
  ExpectFileValues(file, ffn + "shared_experts.w3", layer.shared.w3);
  ExpectFileValues(file, ffn + "shared_experts.w2", layer.shared.w2);
}

// Everything that Weights hands out is what the file says.
void ExpectWeightsOfFile(const std::string& dir, const Weights& weights) {
  const auto file = Checkpoint::Open(dir);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(weights.embed().layout, WeightLayout::kRowMajor);
  EXPECT_EQ(weights.embed().format, WeightFormat::kBf16);
  ExpectFileValues(*file, "embed", weights.embed());
  ExpectFileValues(*file, "head", weights.head());
  ExpectFileVector(*file, "norm.weight", weights.norm());
  ExpectHyperConnection(*file, "hc_head", weights.hc_head());
  for (int i = 0; i < weights.config().num_hidden_layers; ++i) {
    ASSERT_EQ(weights.layer(i).ratio, weights.config().ratio(i));
    ExpectLayer(*file, weights.config(), i, weights.layer(i));
  }
}

TEST(WeightsTest, HandsOutTheFilesValuesInEveryLayoutAndResidency) {
  for (const WeightFormat experts :
       {WeightFormat::kNvfp4, WeightFormat::kMxfp4, WeightFormat::kFp8Block128}) {
    const TemporaryFolder folder;
    MiniatureCheckpoint(experts).Write(folder.path());
    for (const auto residency : {WeightOptions::kPacked, WeightOptions::kMapped}) {
      const auto weights = Load(folder.path(), residency);
      ASSERT_NE(weights, nullptr);
      ExpectWeightsOfFile(folder.path(), *weights);
      const WeightReport& report = weights->report();
      EXPECT_EQ(report.is_packed, residency == WeightOptions::kPacked);
      EXPECT_EQ(report.num_shards, 3);
      EXPECT_EQ(report.num_mtp_stages, 1);
      const int64_t matrices = 4 * 4 * 3;
      EXPECT_EQ(report.nvfp4_expert_matrices, experts == WeightFormat::kNvfp4 ? matrices : 0);
      EXPECT_EQ(report.mxfp4_expert_matrices, experts == WeightFormat::kMxfp4 ? matrices : 0);
      EXPECT_EQ(report.fp8_expert_matrices, experts == WeightFormat::kFp8Block128 ? matrices : 0);
      EXPECT_EQ(report.lossless_casts, 0);
      EXPECT_EQ(weights->layer(1).experts[2].w1.format, experts);
    }
  }
}

TEST(WeightsTest, HoldsALosslessCastAsWhatItIs) {
  const TemporaryFolder folder;
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  MakeLosslessCast(&files);
  files.Write(folder.path());
  const auto packed = Load(folder.path(), WeightOptions::kPacked);
  ASSERT_NE(packed, nullptr);
  ExpectWeightsOfFile(folder.path(), *packed);
  EXPECT_EQ(packed->report().lossless_casts, 48);
  EXPECT_EQ(packed->report().nvfp4_expert_matrices, 48);
  EXPECT_EQ(packed->layer(3).experts[3].w2.format, WeightFormat::kMxfp4);
  EXPECT_FALSE(packed->layer(3).experts[3].w2.is_mxfp4_cast);

  const auto mapped = Load(folder.path(), WeightOptions::kMapped);
  ASSERT_NE(mapped, nullptr);
  EXPECT_EQ(mapped->report().lossless_casts, 48);
  EXPECT_EQ(mapped->layer(3).experts[3].w2.format, WeightFormat::kNvfp4);
  EXPECT_TRUE(mapped->layer(3).experts[3].w2.is_mxfp4_cast);
  EXPECT_EQ(mapped->fingerprint(), packed->fingerprint());
}

TEST(WeightsTest, JudgesEachMatrixOnItsOwn) {
  const TemporaryFolder folder;
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  MakeLosslessCast(&files);
  // The last scale of one matrix: seen when every row is read.
  files.Find("layers.2.ffn.experts.1.w3.weight_scale").bytes.back() = std::byte{0x39};
  files.Write(folder.path());
  const auto weights = Load(folder.path(), WeightOptions::kPacked);
  ASSERT_NE(weights, nullptr);
  ExpectWeightsOfFile(folder.path(), *weights);
  EXPECT_EQ(weights->report().lossless_casts, 47);
  EXPECT_EQ(weights->layer(2).experts[1].w3.format, WeightFormat::kNvfp4);
  EXPECT_EQ(weights->layer(2).experts[1].w1.format, WeightFormat::kMxfp4);
}

TEST(WeightsTest, GivesTheSameOnSeveralThreads) {
  const TemporaryFolder folder;
  MiniatureCheckpoint(WeightFormat::kMxfp4).Write(folder.path());
  ThreadPool threads(3);
  const auto weights = Load(folder.path(), WeightOptions::kPacked, &threads);
  ASSERT_NE(weights, nullptr);
  ExpectWeightsOfFile(folder.path(), *weights);
  EXPECT_EQ(weights->fingerprint(), Load(folder.path(), WeightOptions::kMapped)->fingerprint());
}

TEST(WeightsTest, PacksUnlessTheLimitForbids) {
  const TemporaryFolder folder;
  MiniatureCheckpoint(WeightFormat::kNvfp4).Write(folder.path());
  WeightOptions options;
  options.packed_limit_bytes = 1000;
  auto weights = Weights::Load(folder.path(), options);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_FALSE((*weights)->report().is_packed);
  EXPECT_GT((*weights)->report().mapped_bytes, 1000);
  options.packed_limit_bytes = 100'000'000;
  weights = Weights::Load(folder.path(), options);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_TRUE((*weights)->report().is_packed);
  EXPECT_EQ((*weights)->report().mapped_bytes, 0);
}

TEST(WeightsTest, CopiesWhatAFileMisaligns) {
  // One file, tensors in plan order behind a tensor of one byte: nothing is aligned.
  const TemporaryFolder folder;
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4, false, /*num_shards=*/1);
  std::vector<TensorEntry> entries;
  std::string bytes;
  uint64_t at = 0;
  files.tensors.insert(files.tensors.begin(),
                       {"mtp.0.emb.weight", TensorType::kU8, {1}, std::vector<std::byte>(1), 0});
  for (const StoredTensor& t : files.tensors) {
    entries.push_back({t.name, t.type, t.shape, at, at + t.bytes.size()});
    at += t.bytes.size();
    bytes.append(reinterpret_cast<const char*>(t.bytes.data()), t.bytes.size());
  }
  WriteFileBytes(folder.File("config.json"), files.config_json);
  WriteFileBytes(folder.File("model.safetensors"), *FormatSafetensorsHeader(entries, {}) + bytes);
  for (const auto residency : {WeightOptions::kPacked, WeightOptions::kMapped}) {
    const auto weights = Load(folder.path(), residency);
    ASSERT_NE(weights, nullptr);
    ExpectWeightsOfFile(folder.path(), *weights);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(weights->layer(0).hc_attn.fn.elements) % 4, 0u);
  }
}

TEST(WeightsTest, AppliesAndChecksTheOverrideOfIndexTopk) {
  const TemporaryFolder folder;
  MiniatureCheckpoint(WeightFormat::kNvfp4).Write(folder.path());
  WeightOptions options;
  options.index_topk = 5;
  const auto weights = Weights::Load(folder.path(), options);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ((*weights)->config().index_topk, 5);
  EXPECT_NE((*weights)->fingerprint(), Load(folder.path(), WeightOptions::kAuto)->fingerprint());
  for (const int64_t bad : {int64_t{0}, int64_t{-3}, int64_t{1} << 40}) {
    options.index_topk = bad;
    const absl::Status status = Weights::Load(folder.path(), options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("index_topk is"));
  }
}

// The message of loading `files`, which must fail in both residencies alike.
std::string LoadError(const CheckpointFiles& files) {
  const TemporaryFolder folder;
  files.Write(folder.path());
  const absl::Status packed = Weights::Load(folder.path(), In(WeightOptions::kPacked)).status();
  const absl::Status mapped = Weights::Load(folder.path(), In(WeightOptions::kMapped)).status();
  EXPECT_EQ(packed.code(), absl::StatusCode::kInvalidArgument) << packed;
  EXPECT_EQ(packed, mapped);
  EXPECT_THAT(std::string(packed.message()), HasSubstr(folder.path()));
  return std::string(packed.message());
}

TEST(WeightsTest, RefusesNanScalesByName) {
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  files.Find("layers.1.attn.wo_b.scale").bytes[0] = std::byte{255};
  EXPECT_THAT(LoadError(files), HasSubstr("'layers.1.attn.wo_b.scale' holds byte 255 = NaN at "
                                          "[0, 0], must be a number"));
  files = MiniatureCheckpoint(WeightFormat::kMxfp4);
  files.Find("layers.1.ffn.experts.0.w1.scale").bytes[1] = std::byte{255};
  EXPECT_THAT(LoadError(files), HasSubstr("'layers.1.ffn.experts.0.w1.scale' holds byte 255"));
  files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  files.Find("layers.1.ffn.experts.0.w1.weight_scale").bytes[1] = std::byte{127};
  EXPECT_THAT(LoadError(files), HasSubstr("experts.0.w1.weight_scale' holds byte 127"));
}

TEST(WeightsTest, RefusesAGlobalScaleThatIsNoNumber) {
  for (const float bad : {-1.0f, INFINITY, NAN}) {
    CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
    std::memcpy(files.Find("layers.3.ffn.experts.2.w2.weight_scale_2").bytes.data(), &bad, 4);
    EXPECT_THAT(LoadError(files), HasSubstr("experts.2.w2.weight_scale_2' is "));
  }
}

TEST(WeightsTest, RefusesHashIdsOutOfRangeOrDoubled) {
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  StoredTensor& ids = files.Find("layers.0.ffn.gate.tid2eid");
  const int64_t bad = 4;
  std::memcpy(ids.bytes.data() + 8 * 7, &bad, 8);
  EXPECT_THAT(LoadError(files), HasSubstr("holds expert 4 at [3, 1], must be in [0, 4)"));
  std::memcpy(ids.bytes.data() + 8 * 7, ids.bytes.data() + 8 * 6, 8);
  EXPECT_THAT(LoadError(files), HasSubstr("at [3, 1], twice in that row"));
}

TEST(WeightsTest, RefusesATensorThatIsMissing) {
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  files.Erase("layers.2.attn.compressor.ape");
  EXPECT_THAT(LoadError(files), HasSubstr("'layers.2.attn.compressor.ape' is missing, expected "
                                          "F32 [128, 128]"));
}

TEST(WeightsTest, FingerprintSeesContentOfEverySize) {
  CheckpointFiles files = MiniatureCheckpoint(WeightFormat::kNvfp4);
  const auto fingerprint = [](const CheckpointFiles& f) {
    const TemporaryFolder folder;
    f.Write(folder.path());
    return Load(folder.path(), WeightOptions::kMapped)->fingerprint();
  };
  const uint64_t before = fingerprint(files);
  for (StoredTensor& tensor : files.tensors) tensor.shard = 2 - tensor.shard;
  EXPECT_EQ(fingerprint(files), before);  // The cut into shards is not content.
  StoredTensor& norm = files.Find("mtp.0.norm.weight");
  norm.bytes[191] ^= std::byte{1};
  EXPECT_NE(fingerprint(files), before);
  norm.bytes[191] ^= std::byte{1};
  StoredTensor& fn = files.Find("layers.1.hc_attn_fn");  // 36 KiB: its middle is sampled.
  ASSERT_GT(fn.bytes.size(), 16u << 10);
  fn.bytes[fn.bytes.size() / 2] ^= std::byte{1};
  EXPECT_NE(fingerprint(files), before);
}

// ---- golden checkpoints

// The full golden folder, or empty: then the caller skips, or fails where CI wants everything.
std::string GoldenDir() {
  const char* dir = std::getenv("ISTHMUS_GOLDEN_DIR");  // NOLINT(concurrency-mt-unsafe): no writer.
  return dir == nullptr ? "" : dir;
}
bool IsCi() {
  const char* ci = std::getenv("CI");  // NOLINT(concurrency-mt-unsafe): no writer.
  return ci != nullptr && std::string(ci) == "true";
}

TEST(WeightsGoldenTest, LoadsTheBundledModel) {
  for (const auto residency : {WeightOptions::kPacked, WeightOptions::kMapped}) {
    const auto weights = Load(kTinyRecall, residency);
    ASSERT_NE(weights, nullptr);
    ExpectWeightsOfFile(kTinyRecall, *weights);
    EXPECT_EQ(weights->report().nvfp4_expert_matrices, 5 * 8 * 3);
    EXPECT_EQ(weights->report().num_mtp_stages, 1);
    EXPECT_EQ(weights->config().index_topk, 64);
  }
}

TEST(WeightsGoldenTest, FingerprintDiffersWhenShardThreeIsExchanged) {
  const TemporaryFolder folder;
  for (const auto& entry : std::filesystem::directory_iterator(kTinyRecall)) {
    if (entry.is_regular_file()) {
      std::filesystem::create_symlink(entry.path(), folder.File(entry.path().filename()));
    }
  }
  const auto full = Load(folder.path(), WeightOptions::kMapped);
  ASSERT_NE(full, nullptr);
  EXPECT_EQ(full->fingerprint(), Load(kTinyRecall, WeightOptions::kPacked)->fingerprint());
  const std::string shard = "model-00003-of-00003.safetensors";
  std::filesystem::remove(folder.File(shard));
  std::filesystem::create_symlink(std::string(kTinyRecall) + "/early-indexer/" + shard,
                                  folder.File(shard));
  const auto early = Load(folder.path(), WeightOptions::kMapped);
  ASSERT_NE(early, nullptr);
  EXPECT_NE(early->fingerprint(), full->fingerprint());
}

TEST(WeightsGoldenTest, DetectsTheCastOfTheThreeLayerModelInFull) {
  const auto mxfp4 = Load(absl::StrCat(kThreeLayers, "/mxfp4"), WeightOptions::kPacked);
  const auto cast = Load(absl::StrCat(kThreeLayers, "/nvfp4-cast"), WeightOptions::kPacked);
  ASSERT_NE(mxfp4, nullptr);
  ASSERT_NE(cast, nullptr);
  EXPECT_EQ(mxfp4->report().mxfp4_expert_matrices, 3 * 8 * 3);
  EXPECT_EQ(cast->report().nvfp4_expert_matrices, 3 * 8 * 3);
  EXPECT_EQ(cast->report().lossless_casts, 3 * 8 * 3);
  ExpectWeightsOfFile(absl::StrCat(kThreeLayers, "/nvfp4-cast"), *cast);
  // Rebuilt bit for bit: elements and scales are those of the MXFP4 files.
  for (int i = 0; i < 3; ++i) {
    for (size_t e = 0; e < 8; ++e) {
      for (const auto member : {&kernels::ExpertWeights::w1, &kernels::ExpertWeights::w2,
                                &kernels::ExpertWeights::w3}) {
        const WeightView& a = mxfp4->layer(i).experts[e].*member;
        const WeightView& b = cast->layer(i).experts[e].*member;
        ASSERT_EQ(b.format, WeightFormat::kMxfp4);
        const auto bytes = static_cast<size_t>(a.rows * a.cols / 2);
        EXPECT_EQ(std::memcmp(a.elements, b.elements, bytes), 0);
        EXPECT_EQ(std::memcmp(a.scales, b.scales, bytes / 16), 0);
      }
    }
  }
  const auto mapped = Load(absl::StrCat(kThreeLayers, "/nvfp4-cast"), WeightOptions::kMapped);
  ASSERT_NE(mapped, nullptr);
  EXPECT_EQ(mapped->report().lossless_casts, 3 * 8 * 3);
}

TEST(WeightsGoldenTest, FindsNoCastInTheRandomNvfp4Model) {
  if (GoldenDir().empty()) {
    if (IsCi()) FAIL() << "ISTHMUS_GOLDEN_DIR is not set";
    GTEST_SKIP() << "ISTHMUS_GOLDEN_DIR is not set";
  }
  const std::string dir = GoldenDir() + "/tiny-random-nvfp4";
  for (const auto residency : {WeightOptions::kPacked, WeightOptions::kMapped}) {
    const auto weights = Load(dir, residency);
    ASSERT_NE(weights, nullptr);
    ExpectWeightsOfFile(dir, *weights);
    EXPECT_EQ(weights->report().nvfp4_expert_matrices, 5 * 8 * 3);
    EXPECT_EQ(weights->report().lossless_casts, 0);
    EXPECT_EQ(weights->report().num_mtp_stages, 1);
  }
}

}  // namespace
}  // namespace isthmus::model
