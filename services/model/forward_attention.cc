// SPDX-License-Identifier: Apache-2.0
// The attention half of a layer, in the order of model specification 3.10: latent queries and keys,
// then the entries that complete in this step, then the choice of entries, then attention. A query
// may use the entry that it completes itself, so nothing here may be reordered.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/compressor/compressor.h"
#include "kernels/fused/attention_inputs/attention_inputs.h"
#include "kernels/indexer/indexer.h"
#include "kernels/linear/linear.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "services/base/check.h"
#include "services/base/status_macros.h"
#include "services/model/forward_step.h"

namespace isthmus::model {

using kernels::Arithmetic;
using kernels::MatrixView;

namespace {

// The view of ape that the compressor reads; it writes only to g.
MatrixView Ape(const CompressorWeights& c) {
  return kernels::F32Matrix(const_cast<float*>(c.ape), c.ratio, c.width);
}

int64_t CountNewEntries(const ForwardBatch& batch, int64_t ratio) {
  int64_t sum = 0;
  for (const kernels::SequenceKv& s : batch.sequences) {
    sum += kernels::NewEntries(s.start_position, s.start_position + s.num_rows, ratio);
  }
  return sum;
}

// Whether the input of a linear is quantised before it, once for all that share it, or by it: a GPU
// quantises as it packs an input.
bool QuantisesAhead(const kernels::WeightView& w, Arithmetic arithmetic,
                    const kernels::Exec& exec) {
  return arithmetic == Arithmetic::kReference && kernels::QuantisesInput(w.format) &&
         !kernels::IsDevice(exec.arch);
}
bool QuantisesInside(const kernels::WeightView& w, Arithmetic arithmetic,
                     const kernels::Exec& exec) {
  return arithmetic == Arithmetic::kReference && kernels::QuantisesInput(w.format) &&
         kernels::IsDevice(exec.arch);
}

}  // namespace

absl::Status ModelForward::AttentionHalf(int layer, Step& step) const {
  const LayerWeights& w = LayerAt(layer);
  const kernels::Workspace::Scope half(step.exec.workspace);
  step.Emit(layer, "hc_attn_post", step.post);
  step.Emit(layer, "hc_attn_comb", step.comb, {step.rows, Step::kStreams, Step::kStreams});
  step.Emit(layer, "attn_in", step.x);

  ISTHMUS_RETURN_IF_ERROR(ProjectInput(layer, step));
  ISTHMUS_RETURN_IF_ERROR(Queries(layer, step));
  ISTHMUS_RETURN_IF_ERROR(PrepareAttention(layer, step));
  step.selected = nullptr;
  step.max_selected = 0;
  if (step.Chooses(w.ratio)) ISTHMUS_RETURN_IF_ERROR(Select(layer, step));
  ISTHMUS_RETURN_IF_ERROR(Attend(layer, step));
  step.Emit(layer, "attn_out", step.y);
  return MixOutIn(w.hc_ffn, w.ffn_norm, step);
}

// All linears of x in one call: the latent of the queries and kv, which share their quantised
// input, then those of the compressor, and of the indexer where the layer has one, which is not
// quantised.
absl::Status ModelForward::ProjectInput(int layer, Step& step) const {
  const ModelConfig& config = *views_.config;
  const LayerWeights& w = LayerAt(layer);
  const bool reference = arithmetic_ == Arithmetic::kReference;
  MatrixView quantised_x = step.x;  // A GPU quantises as it packs the input of a linear.
  if (QuantisesAhead(w.wq_a, arithmetic_, step.exec)) {
    quantised_x = step.Take(step.rows, config.hidden_size);
    step.Mark("quantise.hidden");
    ISTHMUS_RETURN_IF_ERROR(kernels::QuantiseActivation(step.x, quantised_x, step.exec));
  }
  std::vector<kernels::LinearArgs> of_x;
  const auto add = [&](const kernels::WeightView& weight, bool rounds) {
    of_x.push_back({.x = step.x,
                    .weight = weight,
                    .out = step.Take(step.rows, weight.rows),
                    .round_output = rounds});
    return of_x.back().out;
  };
  step.query_latent = add(w.wq_a, reference);
  step.kv = add(w.wkv, reference);
  for (kernels::LinearArgs& quantised : of_x) {
    quantised.x = quantised_x;
    quantised.quantise_input = QuantisesInside(w.wq_a, arithmetic_, step.exec);
    quantised.input_is_quantised = QuantisesAhead(w.wq_a, arithmetic_, step.exec);
  }
  if (w.ratio != 0) {
    ISTHMUS_CHECK(w.compressor.has_value());  // Loading gives every layer what its ratio needs.
    step.compressor_u = add(w.compressor->wkv, false);
    step.compressor_g = add(w.compressor->wgate, false);
  }
  if (w.ratio == 4) {
    ISTHMUS_CHECK(w.indexer.has_value());
    step.index_u = add(w.indexer->compressor.wkv, false);
    step.index_g = add(w.indexer->compressor.wgate, false);
    if (step.Chooses(w.ratio)) step.index_weights = add(w.indexer->weights_proj, reference);
  }
  step.Mark("linear.input");
  return kernels::LinearMany(of_x, step.exec);
}

// Specification 3.1: the normed latent and q [rows, heads * head_dim], as projected.
absl::Status ModelForward::Queries(int layer, Step& step) const {
  const ModelConfig& config = *views_.config;
  const LayerWeights& w = LayerAt(layer);
  step.Mark("rms_norm.q");
  ISTHMUS_RETURN_IF_ERROR(kernels::RmsNorm({.x = step.query_latent,
                                            .weight = w.q_norm,
                                            .out = step.query_latent,
                                            .epsilon = config.rms_norm_eps,
                                            .arithmetic = arithmetic_},
                                           step.exec));
  step.Emit(layer, "qr", step.query_latent);
  // From here on only wq_b and the indexer's wq_b read the latent: quantise it once for both.
  if (QuantisesAhead(w.wq_b, arithmetic_, step.exec)) {
    step.Mark("quantise.latent");
    ISTHMUS_RETURN_IF_ERROR(
        kernels::QuantiseActivation(step.query_latent, step.query_latent, step.exec));
  }
  return ExpandQueries(layer, step);
}

// q, and the queries of the indexer where the layer has one, from the latent that they share.
absl::Status ModelForward::ExpandQueries(int layer, Step& step) const {
  const ModelConfig& config = *views_.config;
  const LayerWeights& w = LayerAt(layer);
  kernels::LinearArgs of_latent[2];
  of_latent[0] = {.x = step.query_latent,
                  .weight = w.wq_b,
                  .out = step.Take(step.rows, w.wq_b.rows),
                  .quantise_input = QuantisesInside(w.wq_b, arithmetic_, step.exec),
                  .round_output = arithmetic_ == Arithmetic::kReference,
                  .input_is_quantised = QuantisesAhead(w.wq_b, arithmetic_, step.exec)};
  step.q = of_latent[0].out;
  size_t count = 1;
  if (step.Chooses(w.ratio)) {
    ISTHMUS_CHECK(w.indexer.has_value());
    step.index_q = step.Take(step.rows, int64_t{config.index_n_heads} * config.index_head_dim);
    of_latent[1] = of_latent[0];
    of_latent[1].weight = w.indexer->wq_b;
    of_latent[1].out = step.index_q;
    count = 2;
  }
  step.Mark("linear.wq_b");
  return kernels::LinearMany({of_latent, count}, step.exec);
}

// The main compressor's arguments, and those of the index keys'.
kernels::CompressorArgs ModelForward::CompressArgs(int layer, const Step& step) const {
  const ModelConfig& config = *views_.config;
  const LayerWeights& w = LayerAt(layer);
  ISTHMUS_CHECK(w.compressor.has_value());
  const CompressorWeights& c = *w.compressor;
  const kernels::CacheKindIndex kind = w.ratio == 4 ? kernels::kCsaKv : kernels::kHcaKv;
  const kernels::CacheKindIndex state = w.ratio == 4 ? kernels::kCsaState : kernels::kHcaState;
  return {.u = step.compressor_u,
          .g = step.compressor_g,
          .ape = Ape(c),
          .norm_weight = c.norm,
          .frequency = compressed_frequency_,
          .dim = config.head_dim,
          .rope_dim = config.qk_rope_head_dim,
          .ratio = w.ratio,
          .epsilon = config.rms_norm_eps,
          .sequences = step.inputs.sequences,
          .device_batch = step.inputs.device_batch,
          .entry_plane = layout_.Plane(kind, layer),
          .entry_kind = kind,
          .state_plane = layout_.Plane(state, layer),
          .arithmetic = arithmetic_};
}
kernels::CompressorArgs ModelForward::CompressKeysArgs(int layer, const Step& step) const {
  const LayerWeights& w = LayerAt(layer);
  ISTHMUS_CHECK(w.indexer.has_value());
  const CompressorWeights& c = w.indexer->compressor;
  kernels::CompressorArgs args = CompressArgs(layer, step);
  args.u = step.index_u;
  args.g = step.index_g;
  args.ape = Ape(c);
  args.norm_weight = c.norm;
  args.dim = views_.config->index_head_dim;
  args.is_index_key = true;
  args.entry_plane = layout_.Plane(kernels::kIndexKey, layer);
  args.entry_kind = kernels::kIndexKey;
  args.state_plane = layout_.Plane(kernels::kIndexState, layer);
  return args;
}

// Specification 3.2 and 3.7: heads and the latent entry normed and rotated, the entries and index
// keys that complete in this step, and the index query.
absl::Status ModelForward::PrepareAttention(int layer, Step& step) const {
  const ModelConfig& config = *views_.config;
  const LayerWeights& w = LayerAt(layer);
  const int64_t index_heads = config.index_n_heads;
  const int64_t index_dim = config.index_head_dim;
  const bool chooses = step.Chooses(w.ratio);
  kernels::AttentionInputsArgs args = {
      .heads = {.q = step.q,
                .head_dim = config.head_dim,
                .kv = step.kv,
                .kv_weight = w.kv_norm,
                .positions = step.inputs.positions,
                .frequency = w.ratio == 0 ? plain_frequency_ : compressed_frequency_,
                .epsilon = config.rms_norm_eps,
                .arithmetic = arithmetic_},
      .compressor = {},
      .index_compressor = {},
      .index_query = {}};
  if (w.ratio != 0) args.compressor = CompressArgs(layer, step);
  if (w.ratio == 4) args.index_compressor = CompressKeysArgs(layer, step);
  if (chooses) {
    const double size = static_cast<double>(index_dim * index_heads);
    args.index_query = {.q = step.index_q,
                        .weights = step.index_weights,
                        .num_heads = index_heads,
                        .dim = index_dim,
                        .weight_scale = static_cast<float>(1.0 / std::sqrt(size)),
                        .positions = step.inputs.positions,
                        .frequency = compressed_frequency_,
                        .arithmetic = arithmetic_};
  }
  const int64_t added = w.ratio != 0 ? CountNewEntries(step.batch, w.ratio) : 0;
  MatrixView entries;
  MatrixView keys;
  if (step.has_tap() && added > 0) {
    entries = step.Take(added, config.head_dim);
    keys = step.Take(added, index_dim);
    if (args.compressor) args.compressor->entries = entries.f32(0);
    if (args.index_compressor) args.index_compressor->entries = keys.f32(0);
  }
  step.Mark("attention_inputs");
  ISTHMUS_RETURN_IF_ERROR(kernels::AttentionInputs(args, step.exec));
  step.Emit(layer, "q", step.q, {step.rows, w.wq_b.rows / config.head_dim, config.head_dim});
  step.Emit(layer, "kv", step.kv);
  if (added > 0) step.Emit(layer, "compressed_kv", entries);
  if (added > 0 && w.ratio == 4) step.Emit(layer, "index_keys", keys);
  if (!chooses) return absl::OkStatus();
  step.Emit(layer, "index_q", step.index_q, {step.rows, index_heads, index_dim});
  step.Emit(layer, "index_weights", step.index_weights);
  return absl::OkStatus();
}

// Specification 3.8: the entries each query attends to.
absl::Status ModelForward::Select(int layer, Step& step) const {
  const ModelConfig& config = *views_.config;
  const int64_t max_entries = step.MaxEntries(LayerAt(layer).ratio);
  // A tap wants the query of every row, those that have nothing to choose from included.
  if (max_entries == 0) return absl::OkStatus();

  step.max_selected = std::min<int64_t>(config.index_topk, max_entries);
  step.selected = step.scope.Take<int32_t>(step.rows * step.max_selected);
  const MatrixView scores = step.has_tap() ? step.Take(step.rows, max_entries) : MatrixView{};
  step.Mark("indexer");
  ISTHMUS_RETURN_IF_ERROR(kernels::Indexer({.q = step.index_q,
                                            .w = step.index_weights,
                                            .num_heads = config.index_n_heads,
                                            .dim = config.index_head_dim,
                                            .topk = step.max_selected,
                                            .sequences = step.inputs.sequences,
                                            .device_batch = step.inputs.device_batch,
                                            .key_plane = layout_.Plane(kernels::kIndexKey, layer),
                                            .selected = step.selected,
                                            .scores = static_cast<float*>(scores.data),
                                            .scores_stride = max_entries,
                                            .arithmetic = arithmetic_},
                                           step.exec));
  if (step.has_tap()) {
    step.Emit(layer, "index_scores", scores);
    step.Emit(
        layer, "topk",
        {step.selected, kernels::DType::kI32, step.rows, step.max_selected, step.max_selected});
  }
  return absl::OkStatus();
}

// Specification 3.4 to 3.6: attention, inverse rotation, grouped and final output projection.
absl::Status ModelForward::Attend(int layer, Step& step) const {
  const ModelConfig& config = *views_.config;
  const LayerWeights& w = LayerAt(layer);
  const bool reference = arithmetic_ == Arithmetic::kReference;
  const int64_t heads = w.wq_b.rows / config.head_dim;  // The rank's.
  const int64_t head_dim = config.head_dim;
  const kernels::CacheKindIndex kind = w.ratio == 128 ? kernels::kHcaKv : kernels::kCsaKv;
  const kernels::AttentionArgs args = {
      .q = step.q,
      .chunk_kv = step.kv,
      .out = step.q,
      .sink = w.attn_sink,
      .num_heads = heads,
      .head_dim = head_dim,
      .rope_dim = config.qk_rope_head_dim,
      .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim))),
      .window = config.sliding_window,
      .ratio = w.ratio,
      .sequences = step.inputs.sequences,
      .device_batch = step.inputs.device_batch,
      .window_plane = layout_.Plane(kernels::kWindow, layer),
      .entry_plane = w.ratio != 0 ? layout_.Plane(kind, layer) : kernels::EntryPlane{},
      .entry_kind = kind,
      .selected = step.selected,
      .max_selected = step.max_selected,
      .arithmetic = arithmetic_};
  step.Mark("attention");
  ISTHMUS_RETURN_IF_ERROR(kernels::Attention(args, step.exec));
  step.Mark("rope.inverse");
  ISTHMUS_RETURN_IF_ERROR(
      kernels::Rope({.x = step.q,
                     .head_dim = head_dim,
                     .positions = step.inputs.positions,
                     .frequency = w.ratio == 0 ? plain_frequency_ : compressed_frequency_,
                     .inverse = true,
                     .arithmetic = arithmetic_},
                    step.exec));
  step.Emit(layer, "attn_core", step.q, {step.rows, heads, head_dim});

  const auto groups = static_cast<int64_t>(w.wo_a.size());
  const int64_t group_inputs = heads * head_dim / groups;
  const MatrixView z = step.Take(step.rows, groups * config.o_lora_rank);
  step.Mark("linear.wo_a");
  // wo_a reads unquantised bf16, although it is stored in fp8 (specification 2.7).
  std::vector<kernels::LinearArgs> of_groups;
  of_groups.reserve(w.wo_a.size());
  for (int64_t group = 0; group < groups; ++group) {
    of_groups.push_back({.x = step.q.Columns(group * group_inputs, group_inputs),
                         .weight = w.wo_a[static_cast<size_t>(group)],
                         .out = z.Columns(group * config.o_lora_rank, config.o_lora_rank),
                         .round_output = reference});
  }
  ISTHMUS_RETURN_IF_ERROR(kernels::LinearMany(of_groups, step.exec));
  step.Emit(layer, "attn_z", z);
  step.Mark("linear.wo_b");
  ISTHMUS_RETURN_IF_ERROR(
      kernels::Linear({.x = z,
                       .weight = w.wo_b,
                       .out = step.y,
                       .quantise_input = reference && kernels::QuantisesInput(w.wo_b.format),
                       .round_output = reference},
                      step.exec));
  return SumOverRanks(step);
}

}  // namespace isthmus::model
