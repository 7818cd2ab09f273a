// SPDX-License-Identifier: Apache-2.0
#include "services/diag/dump.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"
#include "services/diag/cache_dump.h"
#include "services/diag/input_streams.h"
#include "services/model/safetensors_writer.h"
#include "services/model/tap.h"

namespace isthmus::diag {
namespace {

using kernels::DType;
using model::TapTensor;

const std::set<std::string>& NamesOf(DumpSet set) {
  static const std::set<std::string> kGoldenNames = {
      "streams", "attn_out",      "ffn_out",    "compressed_kv",  "index_keys", "index_scores",
      "topk",    "router_scores", "router_ids", "router_weights", "logits"};
  static const std::set<std::string> kLayerNames = {
      "attn_in",     "attn_out",      "hc_attn_post", "hc_attn_comb",  "ffn_in",     "ffn_out",
      "hc_ffn_post", "hc_ffn_comb",   "streams",      "compressed_kv", "index_keys", "index_scores",
      "topk",        "router_scores", "router_ids",   "router_weights"};
  static const std::set<std::string> kStageNames = {
      "qr", "q", "kv", "index_q", "index_weights", "attn_core", "attn_z", "routed_out"};
  static const std::set<std::string> kNoNames = {};
  switch (set) {
    case DumpSet::kGolden:
      return kGoldenNames;
    case DumpSet::kLayers:
      return kLayerNames;
    case DumpSet::kStages:
      return kStageNames;
    case DumpSet::kCache:
      return kNoNames;
  }
  return kNoNames;
}

std::string KeyOf(const TapTensor& tensor) {
  if (tensor.layer < 0) return std::string(tensor.name);
  return absl::StrCat("layer", tensor.layer, ".", tensor.name);
}

// Collects tensors over the steps of one sequence. The first axis of every tensor grows; ragged
// ones (scores, topk) are kept with the width of each step and padded at the end.
class Recorder {
 public:
  explicit Recorder(DumpSet set) : names_(NamesOf(set)) {}

  void Record(const TapTensor& tensor) {
    if (names_.find(std::string(tensor.name)) == names_.end()) return;
    Part part;
    part.shape = tensor.shape;
    part.dtype = tensor.dtype;
    int64_t count = 1;
    for (int64_t extent : tensor.shape) count *= extent;
    const auto* bytes = static_cast<const std::byte*>(tensor.values);
    part.bytes.assign(bytes, bytes + 4 * count);
    parts_[KeyOf(tensor)].push_back(std::move(part));
  }

  // Joins the steps. `topk_width` is index_topk.
  Dump Join(int64_t topk_width) const {
    Dump dump;
    for (const auto& [key, parts] : parts_) {
      dump[key] = JoinParts(parts, absl::EndsWith(key, ".topk") ? topk_width : 0);
    }
    return dump;
  }

 private:
  struct Part {
    DType dtype = DType::kF32;
    std::vector<int64_t> shape;
    std::vector<std::byte> bytes;
  };

  static DumpTensor JoinParts(const std::vector<Part>& parts, int64_t least_width) {
    DumpTensor out;
    out.dtype = parts[0].dtype == DType::kF32 ? "F32" : "I32";
    out.shape = parts[0].shape;
    const bool is_matrix = out.shape.size() == 2;
    for (const Part& part : parts) {
      if (is_matrix) out.shape[1] = std::max(out.shape[1], part.shape[1]);
    }
    if (is_matrix) out.shape[1] = std::max(out.shape[1], least_width);
    out.shape[0] = 0;
    uint32_t fill = 0;
    const float minus_infinity = -std::numeric_limits<float>::infinity();
    const int32_t none = -1;
    std::memcpy(&fill, out.dtype == "F32" ? static_cast<const void*>(&minus_infinity) : &none, 4);
    for (const Part& part : parts) {
      out.shape[0] += part.shape[0];
      if (!is_matrix || part.shape[1] == out.shape[1]) {
        out.bytes.insert(out.bytes.end(), part.bytes.begin(), part.bytes.end());
        continue;
      }
      for (int64_t row = 0; row < part.shape[0]; ++row) {
        std::vector<uint32_t> padded(static_cast<size_t>(out.shape[1]), fill);
        std::memcpy(padded.data(), part.bytes.data() + 4 * row * part.shape[1],
                    4 * static_cast<size_t>(part.shape[1]));
        const auto* bytes = reinterpret_cast<const std::byte*>(padded.data());
        out.bytes.insert(out.bytes.end(), bytes, bytes + 4 * padded.size());
      }
    }
    return out;
  }

  const std::set<std::string>& names_;
  std::map<std::string, std::vector<Part>> parts_;
};

// A step that brings no entry has no scores either, but its rows still count: rows of -infinity and
// -1. Only leading steps can lack entries, so they are put in front.
void FillLeadingRows(int64_t rows, Dump& dump) {
  for (auto& [key, tensor] : dump) {
    const bool is_scores = absl::EndsWith(key, ".index_scores");
    if (!is_scores && !absl::EndsWith(key, ".topk")) continue;
    const int64_t missing = rows - tensor.shape[0];
    if (missing <= 0) continue;
    uint32_t fill = 0xffffffffu;
    const float minus_infinity = -std::numeric_limits<float>::infinity();
    if (is_scores) std::memcpy(&fill, &minus_infinity, 4);
    const std::vector<uint32_t> padding(static_cast<size_t>(missing * tensor.shape[1]), fill);
    const auto* bytes = reinterpret_cast<const std::byte*>(padding.data());
    tensor.bytes.insert(tensor.bytes.begin(), bytes, bytes + 4 * padding.size());
    tensor.shape[0] = rows;
  }
}

void AddRouterBias(const model::Weights& weights, Dump& dump) {
  for (int layer = 0; layer < weights.config().num_hidden_layers; ++layer) {
    const kernels::VectorView& bias = weights.layer(layer).gate_bias;
    if (bias.size == 0) continue;
    dump[absl::StrCat("layer", layer, ".router_bias")] = F32Tensor({bias.size}, bias.f32());
  }
}

// The steps that feed the tokens: sizes in order.
std::vector<int64_t> StepSizes(const DumpOptions& options) {
  const auto total = static_cast<int64_t>(options.tokens.size());
  const int64_t prefill = total - options.decode_tokens;
  const int64_t chunk =
      options.chunk_tokens > 0 ? options.chunk_tokens : std::max<int64_t>(prefill, 1);
  std::vector<int64_t> sizes;
  for (int64_t at = 0; at < prefill; at += chunk) sizes.push_back(std::min(chunk, prefill - at));
  sizes.insert(sizes.end(), static_cast<size_t>(options.decode_tokens), 1);
  return sizes;
}

absl::Status ValidateOptions(const DumpOptions& options) {
  const auto total = static_cast<int64_t>(options.tokens.size());
  if (total == 0) return absl::InvalidArgumentError("tokens: the file has none");
  if (options.decode_tokens < 0 || options.decode_tokens > total) {
    return absl::InvalidArgumentError(
        absl::StrCat("decode is ", options.decode_tokens, ", the file has ", total, " tokens"));
  }
  if (options.chunk_tokens < 0) {
    return absl::InvalidArgumentError(absl::StrCat("chunk is ", options.chunk_tokens));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DumpSet> ParseDumpSet(const std::string& name) {
  if (name == "golden") return DumpSet::kGolden;
  if (name == "layers") return DumpSet::kLayers;
  if (name == "stages") return DumpSet::kStages;
  if (name == "cache") return DumpSet::kCache;
  return absl::InvalidArgumentError(
      absl::StrCat("set is \"", name, "\", must be golden, layers, stages or cache"));
}

absl::StatusOr<Dump> RunDump(LocalEngine& local, const DumpOptions& options) {
  ISTHMUS_RETURN_IF_ERROR(ValidateOptions(options));
  const model::ModelConfig& config = local.weights().config();
  const auto total = static_cast<int64_t>(options.tokens.size());
  std::unique_ptr<InputStreams> streams;
  if (!options.input_streams.empty()) {
    ISTHMUS_ASSIGN_OR_RETURN(
        streams, InputStreams::Load(options.input_streams, config.num_hidden_layers, total,
                                    int64_t{4} * config.hidden_size));
  }
  ISTHMUS_ASSIGN_OR_RETURN(kv::SequenceCache cache, local.pool().Open());
  ISTHMUS_RETURN_IF_ERROR(cache.Reserve(total));

  Recorder recorder(options.set);
  int64_t position = 0;
  model::Tap tap;
  if (streams != nullptr) {
    tap.input_streams = [&](int layer) { return streams->Rows(layer, position); };
  }
  const int64_t first_kept = options.decode_tokens > 0 ? total - options.decode_tokens : 0;
  std::vector<float> logits;
  for (int64_t size : StepSizes(options)) {
    const bool keeps = position >= first_kept;
    tap.on_tensor = nullptr;
    if (keeps) tap.on_tensor = [&](const TapTensor& tensor) { recorder.Record(tensor); };
    const kernels::SequenceKv view = cache.View(0, size);
    std::vector<int64_t> rows;
    if (keeps && options.set == DumpSet::kGolden) {
      for (int64_t t = 0; t < size; ++t) rows.push_back(t);
    }
    const auto num_rows = static_cast<int64_t>(rows.size());
    logits.resize(static_cast<size_t>(num_rows * config.vocab_size));
    ISTHMUS_RETURN_IF_ERROR(local.forward().Run(
        {.tokens = std::span(options.tokens)
                       .subspan(static_cast<size_t>(position), static_cast<size_t>(size)),
         .sequences = {&view, 1},
         .logit_rows = rows,
         .logits = kernels::F32Matrix(logits.data(), num_rows, config.vocab_size),
         .tap = &tap},
        local.exec()));
    position += size;
    ISTHMUS_RETURN_IF_ERROR(cache.SetNumTokens(position));
  }

  Dump dump = recorder.Join(config.index_topk);
  FillLeadingRows(total - first_kept, dump);
  dump["input_ids"] = I32Tensor({total}, options.tokens.data());
  if (options.set == DumpSet::kGolden || options.set == DumpSet::kLayers) {
    AddRouterBias(local.weights(), dump);
  }
  const kernels::KvLayout& layout = local.forward().layout();
  ISTHMUS_ASSIGN_OR_RETURN(const CacheCopy copy,
                           CacheCopy::Of(layout, cache, local.pool().device()));
  if (options.set == DumpSet::kStages) {
    AddKvBytes(layout, dump);
    AddEntryBytes(layout, copy, first_kept, dump);
  }
  if (options.set == DumpSet::kCache) {
    AddEntryBytes(layout, copy, 0, dump);
    AddStateSlot(layout, copy, dump);
  }
  return dump;
}

absl::Status WriteDump(const std::string& path, const Dump& dump, const std::string& arithmetic) {
  std::vector<model::NamedTensor> tensors;
  for (const auto& [name, tensor] : dump) {
    tensors.push_back({name, tensor.dtype, tensor.shape, tensor.bytes});
  }
  return model::WriteSafetensors(path, tensors, {{"mode", arithmetic == "math" ? "math" : "ref"}});
}

absl::StatusOr<std::vector<int32_t>> ReadTokenFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read the token file ", path));
  std::vector<int32_t> tokens;
  std::string word;
  while (file >> word) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(word, &id) || id < 0) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": token ", tokens.size(), " is \"",
                                                     word.substr(0, 32),
                                                     "\", expected a decimal id"));
    }
    tokens.push_back(id);
  }
  return tokens;
}

}  // namespace isthmus::diag
