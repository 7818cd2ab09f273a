// SPDX-License-Identifier: Apache-2.0
#include "services/diag/random_model.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/random_fill/random_fill.h"
#include "services/base/status_macros.h"

namespace isthmus::diag {
namespace {

using kernels::EntryFormat;
using kernels::RandomKind;
using kernels::RandomPart;

// Room for the tokens of the step.
int64_t TokensPerSequence(const RandomModelOptions& options) {
  const int64_t page = options.page_tokens;
  return (options.context + options.rows + page - 1) / page * page;
}

// Scales of about 2^-6, so that values are near one.
RandomPart Scales(int64_t bytes) {
  return {.kind = RandomKind::kByteOfMask, .bytes = bytes, .base = 120, .mask = 1};
}

}  // namespace

absl::StatusOr<std::unique_ptr<RandomModel>> RandomModel::Create(
    const RandomModelOptions& options) {
  std::unique_ptr<RandomModel> out(new RandomModel(options));
  ISTHMUS_ASSIGN_OR_RETURN(out->plan_,
                           model::PlanShard(options.config, options.rank, options.ranks));
  ISTHMUS_ASSIGN_OR_RETURN(out->device_, model::DeviceContext::Open(options.device));
  ISTHMUS_ASSIGN_OR_RETURN(out->weights_,
                           model::DeviceWeights::Random(options.config, out->plan_, options.routed,
                                                        /*seed=*/1, out->device_->exec()));
  ISTHMUS_ASSIGN_OR_RETURN(
      out->forward_, model::ModelForward::Create(out->weights_->views(), options.arithmetic,
                                                 options.page_tokens, options.index_key_format));
  ISTHMUS_ASSIGN_OR_RETURN(
      out->pool_, kv::CachePool::Create(out->layout(), TokensPerSequence(options) * options.batch,
                                        static_cast<int32_t>(options.batch), options.device));
  ISTHMUS_RETURN_IF_ERROR(out->FillCaches());
  ISTHMUS_RETURN_IF_ERROR(out->MakeBatch());
  return out;
}

kernels::Exec RandomModel::exec() const {
  kernels::Exec exec = device_->exec();
  exec.phase = options_.rows > 1 ? kPhasePrefill : kPhaseDecode;
  exec.communicator = options_.communicator;
  return exec;
}

int64_t RandomModel::cache_bytes() const {
  int64_t sum = pool_->slots().arena().bytes();
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    sum += pool_->pages(static_cast<kernels::CacheKindIndex>(k)).arena().bytes();
  }
  return sum;
}

absl::Status RandomModel::FillPlane(std::byte* base, int64_t planes, int64_t stride,
                                    const kernels::EntryPlane& plane, uint64_t seed) {
  kernels::RandomFillArgs entries = {.to = base + plane.data_offset,
                                     .planes = planes,
                                     .plane_stride = stride,
                                     .records = plane.entries,
                                     .seed = seed};
  const int64_t rope_bytes = int64_t{2} * options_.config.qk_rope_head_dim;
  switch (plane.format) {
    case EntryFormat::kKvFp8:
      entries.first = {.kind = RandomKind::kFp8, .bytes = plane.data_bytes - rope_bytes};
      entries.second = {.kind = RandomKind::kBf16, .bytes = rope_bytes, .limit = 1.7f};
      break;
    case EntryFormat::kKvF32:
    case EntryFormat::kKeyF32:
    case EntryFormat::kStateRow:
      entries.first = {.kind = RandomKind::kF32, .bytes = plane.data_bytes, .limit = 1.7f};
      break;
    case EntryFormat::kKeyBf16:
      entries.first = {.kind = RandomKind::kBf16, .bytes = plane.data_bytes, .limit = 1.7f};
      break;
    default:  // Codes of index keys; fp8 codes without NaN serve for pairs of fp4 as well.
      entries.first = {.kind = RandomKind::kFp8, .bytes = plane.data_bytes};
  }
  const kernels::Exec& exec = device_->exec();
  ISTHMUS_RETURN_IF_ERROR(kernels::RandomFill(entries, exec));
  if (plane.scale_bytes == 0) return absl::OkStatus();
  kernels::RandomFillArgs scales = {.to = base + plane.scale_offset,
                                    .planes = planes,
                                    .plane_stride = stride,
                                    .records = 1,
                                    .first = Scales(int64_t{plane.scale_bytes} * plane.entries),
                                    .seed = seed + 1};
  if (plane.format == EntryFormat::kKeyFp8) {  // One f32, a power of two.
    scales.first = {
        .kind = RandomKind::kF32, .bytes = scales.first.bytes, .limit = 0.0f, .offset = 0x1p-6f};
  }
  return kernels::RandomFill(scales, exec);
}

absl::Status RandomModel::FillCaches() {
  uint64_t seed = 100;
  for (int k = 0; k < kernels::kNumCacheKinds; ++k) {
    const auto kind = static_cast<kernels::CacheKindIndex>(k);
    kv::PagePool& pages = k < kernels::kNumPagedKinds ? pool_->pages(kind) : pool_->slots();
    if (pages.num_pages() == 0) continue;
    for (const int layer : layout().kinds[kind].layers) {
      ISTHMUS_RETURN_IF_ERROR(FillPlane(pages.address(0), pages.num_pages(), pages.page_bytes(),
                                        layout().Plane(kind, layer), seed += 2));
    }
  }
  return device_->stream().Synchronise();
}

absl::Status RandomModel::MakeBatch() {
  std::vector<int32_t> ids(static_cast<size_t>(options_.config.vocab_size));
  std::iota(ids.begin(), ids.end(), 0);
  std::mt19937 random(7);
  std::shuffle(ids.begin(), ids.end(), random);
  for (int64_t i = 0; i < options_.batch; ++i) {
    ISTHMUS_ASSIGN_OR_RETURN(kv::SequenceCache cache, pool_->Open());
    ISTHMUS_RETURN_IF_ERROR(cache.Reserve(options_.context + options_.rows));
    ISTHMUS_RETURN_IF_ERROR(cache.SetNumTokens(options_.context));
    caches_.push_back(std::move(cache));
    for (int64_t r = 0; r < options_.rows; ++r) {
      tokens_.push_back(ids[static_cast<size_t>(i * options_.rows + r) % ids.size()]);
    }
    sequences_.push_back(caches_.back().View(i * options_.rows, options_.rows));
    logit_rows_.push_back((i + 1) * options_.rows - 1);
  }
  batch_.tokens = tokens_;
  batch_.sequences = sequences_;
  batch_.logit_rows = logit_rows_;
  const int64_t num_rows = options_.batch * options_.rows;
  const model::StepShape shape = {.rows = num_rows,
                                  .sequences = options_.batch,
                                  .logit_rows = options_.batch,
                                  .max_rows_per_sequence = options_.rows,
                                  .max_tokens = options_.context + options_.rows};
  bool has_moved = false;
  ISTHMUS_RETURN_IF_ERROR(stage_.Load(batch_, shape, device_->exec().stream, &has_moved));
  const int64_t columns = weights_->views().head.rows;
  ISTHMUS_ASSIGN_OR_RETURN(logits_, kernels::DeviceBuffer::Allocate(4 * columns * options_.batch));
  device_batch_ = stage_.device_batch();
  const auto sequences = static_cast<size_t>(options_.batch);
  inputs_.rows = num_rows;
  inputs_.tokens = stage_.tokens();
  inputs_.positions = {stage_.positions(), static_cast<size_t>(num_rows)};
  inputs_.device_batch = &device_batch_;
  inputs_.max_tokens = shape.max_tokens;
  inputs_.logit_rows = {stage_.logit_rows(), sequences};
  inputs_.logits = kernels::F32Matrix(logits_.as<float>(), options_.batch, columns);
  return device_->stream().Synchronise();
}

model::ModelConfig MiniatureConfig(int num_layers) {
  model::ModelConfig config;
  config.vocab_size = 512;
  config.hidden_size = 256;
  config.num_hidden_layers = num_layers;
  config.num_attention_heads = 8;
  config.q_lora_rank = 128;
  config.o_groups = 2;
  config.o_lora_rank = 64;
  config.index_n_heads = 16;
  config.index_topk = 16;
  config.n_routed_experts = 8;
  config.num_experts_per_tok = 2;
  config.moe_intermediate_size = 128;
  config.num_hash_layers = 1;
  for (int i = 0; i < num_layers; ++i) {
    config.compress_ratios.push_back(i == 0 ? 0 : i % 2 == 1 ? 4 : 128);
  }
  return config;
}

}  // namespace isthmus::diag
