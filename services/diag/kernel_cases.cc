// SPDX-License-Identifier: Apache-2.0
#include "services/diag/kernel_cases.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/attention/attention.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/experts/experts.h"
#include "kernels/fused/post_pre/post_pre.h"
#include "kernels/indexer/indexer_steps.h"
#include "kernels/linear/linear.h"
#include "kernels/random_fill/random_fill.h"
#include "services/base/status_macros.h"
#include "services/diag/step_cost.h"

namespace isthmus::diag {
namespace {

using kernels::Exec;
using kernels::MatrixView;
using kernels::RandomKind;
using model::LayerWeights;

// What the cases of a model share.
struct Bench {
  const RandomModel& model;
  CaseMemory* memory;
  KernelCase out;
  int64_t rows;

  const model::ModelConfig& config() const { return model.config(); }
  bool is_reference() const {
    return model.layout().geometry.arithmetic == kernels::Arithmetic::kReference;
  }
  kernels::Arithmetic arithmetic() const { return model.layout().geometry.arithmetic; }
  int64_t num_tokens() const { return model.inputs().max_tokens; }
  // Tokens that every row of a chunk sees, itself among them.
  int64_t shared_tokens() const {
    return num_tokens() + 1 - model.device_batch().max_rows_per_sequence;
  }
};

// `count` distinct numbers below `bound`, ascending.
std::vector<int32_t> Distinct(std::mt19937& random, int64_t count, int64_t bound) {
  std::vector<int32_t> all(static_cast<size_t>(bound));
  std::iota(all.begin(), all.end(), 0);
  std::vector<int32_t> some;
  std::sample(all.begin(), all.end(), std::back_inserter(some), count, random);
  return some;
}

absl::Status AddAttention(Bench& bench, int ratio) {
  const model::ModelConfig& config = bench.config();
  const int64_t head_dim = config.head_dim;
  const auto kind = ratio == 128 ? kernels::kHcaKv : kernels::kCsaKv;
  const kernels::KvLayout& layout = bench.model.layout();
  std::mt19937 random(3);
  int64_t entries = 0;
  for (int i = 0; i < config.num_hidden_layers; ++i) {
    const LayerWeights& w = bench.model.weights().views().layers[static_cast<size_t>(i)];
    if (w.ratio != ratio) continue;
    const int64_t heads = w.wq_b.rows / head_dim;
    const int64_t visible = ratio == 0 ? 0 : bench.shared_tokens() / ratio;
    entries = ratio == 4 ? std::min<int64_t>(visible, config.index_topk) : visible;
    kernels::AttentionArgs args;
    ISTHMUS_ASSIGN_OR_RETURN(args.q, bench.memory->Matrix(bench.rows, heads * head_dim));
    ISTHMUS_ASSIGN_OR_RETURN(args.out, bench.memory->Matrix(bench.rows, heads * head_dim));
    ISTHMUS_ASSIGN_OR_RETURN(args.chunk_kv, bench.memory->Matrix(bench.rows, head_dim));
    args.sink = w.attn_sink;
    args.num_heads = heads;
    args.head_dim = head_dim;
    args.rope_dim = config.qk_rope_head_dim;
    args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
    args.window = config.sliding_window;
    args.ratio = ratio;
    args.device_batch = &bench.model.device_batch();
    args.window_plane = layout.Plane(kernels::kWindow, i);
    if (ratio != 0) args.entry_plane = layout.Plane(kind, i);
    args.entry_kind = kind;
    args.arithmetic = bench.arithmetic();
    if (ratio == 4 && entries > 0) {
      std::vector<int32_t> selected;
      for (int64_t t = 0; t < bench.rows; ++t) {
        const std::vector<int32_t> of_row = Distinct(random, entries, visible);
        selected.insert(selected.end(), of_row.begin(), of_row.end());
      }
      ISTHMUS_ASSIGN_OR_RETURN(args.selected, bench.memory->Ids(selected));
      args.max_selected = entries;
    }
    bench.out.calls.push_back([args](const Exec& exec) { return kernels::Attention(args, exec); });
    bench.out.operations = 4 * bench.rows * heads * head_dim *
                           (std::min<int64_t>(bench.num_tokens(), config.sliding_window) + entries);
    const kernels::CacheKind& window = layout.kinds[kernels::kWindow];
    // As others count: the queries and the output in bf16.
    bench.out.bytes =
        bench.rows * ((std::min<int64_t>(bench.num_tokens(), config.sliding_window) + entries) *
                          (window.entry_data_bytes + window.entry_scale_bytes) +
                      4 * heads * head_dim);
  }
  bench.out.patch_prefixes = {"attention."};
  return absl::OkStatus();
}

// The operation, or one of its steps.
absl::Status AddIndexer(Bench& bench,
                        absl::Status (*operation)(const kernels::IndexerArgs&, const Exec&)) {
  const bool is_scores = operation == kernels::IndexerScores;
  const bool is_selection = operation == kernels::IndexerSelection;
  const model::ModelConfig& config = bench.config();
  const kernels::KvLayout& layout = bench.model.layout();
  for (int i = 0; i < config.num_hidden_layers; ++i) {
    if (config.ratio(i) != 4) continue;
    kernels::IndexerArgs args;
    args.num_heads = config.index_n_heads;
    args.dim = config.index_head_dim;
    const int64_t entries = bench.num_tokens() / 4;
    args.topk = std::min<int64_t>(config.index_topk, std::max<int64_t>(entries, 1));
    ISTHMUS_ASSIGN_OR_RETURN(args.q, bench.memory->Matrix(bench.rows, args.num_heads * args.dim));
    ISTHMUS_ASSIGN_OR_RETURN(args.w, bench.memory->Matrix(bench.rows, args.num_heads));
    args.device_batch = &bench.model.device_batch();
    args.key_plane = layout.Plane(kernels::kIndexKey, i);
    ISTHMUS_ASSIGN_OR_RETURN(
        args.selected,
        bench.memory->Ids(std::vector<int32_t>(static_cast<size_t>(bench.rows * args.topk))));
    args.arithmetic = bench.arithmetic();
    if (is_scores || is_selection) {
      args.scores_stride = (entries + 3) / 4 * 4;
      ISTHMUS_ASSIGN_OR_RETURN(const MatrixView scores,
                               bench.memory->Matrix(bench.rows, args.scores_stride));
      args.scores = scores.f32(0);
    }
    // Scores of random numbers would not lie on the grid that their selection relies on.
    if (is_selection) {
      Exec once = bench.model.exec();
      ISTHMUS_RETURN_IF_ERROR(kernels::IndexerScores(args, once));
    }
    bench.out.calls.push_back(
        [args, operation](const Exec& exec) { return operation(args, exec); });
    const kernels::CacheKind& keys = layout.kinds[kernels::kIndexKey];
    const int64_t all_keys = bench.rows * entries;
    // Rows of a chunk share their keys.
    bench.out.bytes = is_selection ? 4 * all_keys
                                   : all_keys / bench.model.device_batch().max_rows_per_sequence *
                                         (keys.entry_data_bytes + keys.entry_scale_bytes);
    bench.out.operations = is_selection ? 0 : 2 * all_keys * args.num_heads * args.dim;
  }
  bench.out.patch_prefixes = {is_scores      ? "indexer.mma_scores"
                              : is_selection ? "indexer.radix_top_k"
                                             : "indexer."};
  return absl::OkStatus();
}

absl::Status AddExperts(Bench& bench) {
  const model::ModelConfig& config = bench.config();
  const int64_t k = config.num_experts_per_tok;
  std::mt19937 random(5);
  int64_t sum = 0;
  for (const LayerWeights& w : bench.model.weights().views().layers) {
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < bench.rows; ++t) {
      std::vector<int32_t> of_row = Distinct(random, k, config.n_routed_experts);
      std::shuffle(of_row.begin(), of_row.end(), random);
      ids.insert(ids.end(), of_row.begin(), of_row.end());
    }
    const auto touched = static_cast<int64_t>(std::set<int32_t>(ids.begin(), ids.end()).size());
    kernels::ExpertsArgs args;
    ISTHMUS_ASSIGN_OR_RETURN(args.x, bench.memory->Matrix(bench.rows, config.hidden_size));
    ISTHMUS_ASSIGN_OR_RETURN(args.out, bench.memory->Matrix(bench.rows, config.hidden_size));
    ISTHMUS_ASSIGN_OR_RETURN(const MatrixView weights, bench.memory->Matrix(bench.rows, k));
    ISTHMUS_ASSIGN_OR_RETURN(args.ids, bench.memory->Ids(ids));
    args.weights = weights.f32(0);
    args.k = k;
    args.experts = w.experts;
    args.device_experts = w.device_experts;
    args.shared = &w.shared;
    args.limit = args.shared_limit = config.swiglu_limit;
    args.arithmetic = bench.arithmetic();
    bench.out.calls.push_back([args](const Exec& exec) { return kernels::Experts(args, exec); });
    const auto bytes = [](const kernels::ExpertWeights& e) {
      return StoredBytes(e.w1) + StoredBytes(e.w3) + StoredBytes(e.w2);
    };
    sum += touched * bytes(w.experts[0]) + bytes(w.shared);
    bench.out.operations =
        6 * bench.rows * (k * w.experts[0].w1.rows + w.shared.w1.rows) * config.hidden_size;
  }
  bench.out.bytes = sum / static_cast<int64_t>(bench.out.calls.size());
  bench.out.patch_prefixes = {"experts."};
  return absl::OkStatus();
}

absl::Status AddPostPre(Bench& bench, bool is_bf16) {
  const model::ModelConfig& config = bench.config();
  const int64_t hidden = config.hidden_size;
  const auto activations = [&](int64_t cols) {
    return is_bf16 ? bench.memory->Bf16Matrix(bench.rows, cols)
                   : bench.memory->Matrix(bench.rows, cols);
  };
  for (const LayerWeights& w : bench.model.weights().views().layers) {
    kernels::PostPreArgs args;
    ISTHMUS_ASSIGN_OR_RETURN(args.post.y, activations(hidden));
    ISTHMUS_ASSIGN_OR_RETURN(args.post.streams, activations(4 * hidden));
    ISTHMUS_ASSIGN_OR_RETURN(args.post.post, bench.memory->Matrix(bench.rows, 4));
    ISTHMUS_ASSIGN_OR_RETURN(args.post.comb, bench.memory->Matrix(bench.rows, 16));
    ISTHMUS_ASSIGN_OR_RETURN(args.pre.x, activations(hidden));
    args.post.out = args.post.streams;
    args.post.arithmetic = args.pre.arithmetic = bench.arithmetic();
    args.pre.streams = args.post.out;
    args.pre.fn = w.hc_ffn.fn;
    args.pre.scale = w.hc_ffn.scale;
    args.pre.base = w.hc_ffn.base;
    args.pre.sinkhorn_iterations = config.hc_sinkhorn_iters;
    // Gates of the next half layer in place of this one's, as the forward pass has them.
    args.pre.post = args.post.post;
    args.pre.comb = args.post.comb;
    args.norm_weight = w.ffn_norm;
    bench.out.calls.push_back([args](const Exec& exec) { return kernels::PostPre(args, exec); });
    // Streams read and written, y read, x written.
    bench.out.bytes =
        StoredBytes(w.hc_ffn.fn) + bench.rows * (is_bf16 ? 2 : 4) * hidden * (4 + 4 + 1 + 1);
  }
  bench.out.patch_prefixes = {"hyper_connection."};
  if (is_bf16) {  // Its own operations in turn take f32 alone.
    bench.out.has_trusted = false;
    bench.out.patch_prefixes = {"hyper_connection.fused_post_pre", "hyper_connection.bf16",
                                "hyper_connection.tf32"};
  }
  return absl::OkStatus();
}

// The matrices of one group of linears of a layer, by the name behind "linear.".
std::vector<kernels::WeightView> MatricesOf(const LayerWeights& w, const std::string& name) {
  if (name == "wq_b") return {w.wq_b};
  if (name == "wo_b") return {w.wo_b};
  if (name == "wo_a") return w.wo_a;
  if (name == "wq_a_wkv") return {w.wq_a, w.wkv};
  if (name == "gate") return {w.gate};
  if (name == "compressor" && w.compressor) return {w.compressor->wkv, w.compressor->wgate};
  if (name == "index_wq_b" && w.indexer) return {w.indexer->wq_b};
  return {};
}

absl::Status AddLinear(Bench& bench, const std::string& name) {
  std::vector<std::vector<kernels::WeightView>> groups;
  if (name == "head") {
    groups.push_back({bench.model.weights().views().head});
  } else {
    for (const LayerWeights& w : bench.model.weights().views().layers) {
      groups.push_back(MatricesOf(w, name));
    }
  }
  for (const std::vector<kernels::WeightView>& matrices : groups) {
    if (matrices.empty()) continue;
    auto args = std::make_shared<std::vector<kernels::LinearArgs>>();
    ISTHMUS_ASSIGN_OR_RETURN(MatrixView x, bench.memory->Matrix(bench.rows, matrices[0].cols));
    int64_t bytes = 0;
    bench.out.operations = 0;
    for (const kernels::WeightView& matrix : matrices) {
      ISTHMUS_ASSIGN_OR_RETURN(const MatrixView out, bench.memory->Matrix(bench.rows, matrix.rows));
      // wo_a reads its input as it is; the others quantise it.
      const bool is_quantised =
          bench.is_reference() && kernels::QuantisesInput(matrix.format) && name != "wo_a";
      const Exec& exec = bench.model.device().exec();
      if (is_quantised && args->empty()) {
        ISTHMUS_RETURN_IF_ERROR(kernels::QuantiseActivation(x, x, exec));
      } else if (bench.is_reference() && args->empty()) {  // On the bf16 grid.
        ISTHMUS_RETURN_IF_ERROR(
            kernels::ScaleRows({.x = x, .scale = 1.0f, .arithmetic = bench.arithmetic()}, exec));
      }
      args->push_back({.x = x,
                       .weight = matrix,
                       .out = out,
                       .round_output = bench.is_reference(),
                       .input_is_quantised = is_quantised});
      bytes += StoredBytes(matrix);
      bench.out.operations += 2 * bench.rows * matrix.rows * matrix.cols;
    }
    bench.out.bytes = bytes;
    bench.out.calls.push_back(
        [args](const Exec& exec) { return kernels::LinearMany(*args, exec); });
  }
  bench.out.patch_prefixes = {"linear."};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<MatrixView> CaseMemory::Matrix(int64_t rows, int64_t cols) {
  ISTHMUS_ASSIGN_OR_RETURN(kernels::DeviceBuffer buffer,
                           kernels::DeviceBuffer::Allocate(4 * rows * cols));
  ISTHMUS_RETURN_IF_ERROR(
      kernels::RandomFill({.to = buffer.data(),
                           .records = rows * cols,
                           .first = {.kind = kernels::RandomKind::kF32, .bytes = 4, .limit = 1.0f},
                           .seed = ++seed_},
                          exec_));
  buffers_.push_back(std::move(buffer));
  return kernels::F32Matrix(buffers_.back().as<float>(), rows, cols);
}

absl::StatusOr<MatrixView> CaseMemory::Bf16Matrix(int64_t rows, int64_t cols) {
  ISTHMUS_ASSIGN_OR_RETURN(kernels::DeviceBuffer buffer,
                           kernels::DeviceBuffer::Allocate(2 * rows * cols));
  ISTHMUS_RETURN_IF_ERROR(
      kernels::RandomFill({.to = buffer.data(),
                           .records = rows * cols / 2,
                           .first = {.kind = RandomKind::kBf16, .bytes = 4, .limit = 1.0f},
                           .seed = ++seed_},
                          exec_));
  buffers_.push_back(std::move(buffer));
  return MatrixView{buffers_.back().data(), kernels::DType::kBf16, rows, cols, cols};
}

absl::StatusOr<int32_t*> CaseMemory::Ids(const std::vector<int32_t>& ids) {
  const auto bytes = static_cast<int64_t>(4 * ids.size());
  ISTHMUS_ASSIGN_OR_RETURN(kernels::DeviceBuffer buffer, kernels::DeviceBuffer::Allocate(bytes));
  ISTHMUS_RETURN_IF_ERROR(kernels::CopyToDevice(buffer.data(), ids.data(), bytes, nullptr));
  ISTHMUS_RETURN_IF_ERROR(kernels::DeviceStream().Synchronise());
  buffers_.push_back(std::move(buffer));
  return buffers_.back().as<int32_t>();
}

std::vector<std::string> CaseNames() {
  return {"attention.csa",    "attention.hca",     "attention.window",  "experts",
          "indexer",          "indexer.scores",    "indexer.selection", "post_pre",
          "post_pre.bf16",    "linear.wq_b",       "linear.wo_a",       "linear.wo_b",
          "linear.wq_a_wkv",  "linear.compressor", "linear.gate",       "linear.head",
          "linear.index_wq_b"};
}

absl::StatusOr<KernelCase> MakeCase(const std::string& name, const RandomModel& model,
                                    CaseMemory* memory) {
  const std::vector<std::string> names = CaseNames();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("operation is \"", name, "\", must be one of ", absl::StrJoin(names, ", ")));
  }
  Bench bench = {.model = model, .memory = memory, .out = {}, .rows = model.inputs().rows};
  bench.out.name = name;
  absl::Status status;
  if (name == "attention.csa") status = AddAttention(bench, 4);
  if (name == "attention.hca") status = AddAttention(bench, 128);
  if (name == "attention.window") status = AddAttention(bench, 0);
  if (name == "experts") status = AddExperts(bench);
  if (name == "indexer") status = AddIndexer(bench, kernels::Indexer);
  if (name == "indexer.scores") status = AddIndexer(bench, kernels::IndexerScores);
  if (name == "indexer.selection") status = AddIndexer(bench, kernels::IndexerSelection);
  if (name == "post_pre") status = AddPostPre(bench, false);
  if (name == "post_pre.bf16") status = AddPostPre(bench, true);
  if (name.rfind("linear.", 0) == 0) status = AddLinear(bench, name.substr(7));
  ISTHMUS_RETURN_IF_ERROR(status);
  ISTHMUS_RETURN_IF_ERROR(model.device().stream().Synchronise());
  return std::move(bench.out);
}

}  // namespace isthmus::diag
