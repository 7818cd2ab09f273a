// SPDX-License-Identifier: Apache-2.0
// Validation, the trusted path and the variant table of attention_inputs.
#include "kernels/fused/attention_inputs/attention_inputs.h"

#include "absl/strings/str_cat.h"
#include "kernels/compressor/compressor_variants.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/fused/attention_inputs/attention_inputs_variants.h"
#include "kernels/fused/attention_inputs/head_norm_rope_variants.h"
#include "kernels/indexer/indexer.h"
#include "kernels/rope/rope.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr Patch kOneLaunch = {
    .name = "attention_inputs.one_launch",
    .summary =
        "Norms and rotations of the heads, both compressors and the index query as blocks of one "
        "launch instead of six, none of which fills a device or waits for another.",
    .phases = kPhaseDecode,
    .default_on = true,
    .bound = {NumericClass::kBitExact, /*factor=*/1.0, /*floor=*/0.0},
    .test = "AttentionInputsTest",
    .decision = "kernels/fused/attention_inputs/decisions/0002-one-launch.md"};

bool FitsPiece(const std::optional<CompressorArgs>& args) {
  if (!args.has_value()) return true;
  const DeviceBatch& batch = *args->device_batch;
  return args->dim % 64 == 0 && batch.max_rows_per_sequence <= 8 &&
         2 * batch.num_sequences <= kNumCounters;
}

// A lane holds four channels of an index query, a block of threads eight heads of one token.
bool FitsIndexQuery(const IndexQueryArgs& args) {
  if (args.q.data == nullptr) return true;
  return args.dim == 128 && args.num_heads % 8 == 0 && args.frequency.size() <= 64 &&
         args.arithmetic == Arithmetic::kReference;
}

bool FitsParts(const AttentionInputsArgs& args) {
  return args.heads.head_dim % 128 == 0 && args.heads.head_dim <= 512 && args.heads.q.rows > 0 &&
         FitsPiece(args.compressor) && FitsPiece(args.index_compressor) &&
         FitsIndexQuery(args.index_query);
}

constexpr AttentionInputsVariant kVariants[] = {
    {&kOneLaunch, kSm90Up, FitsParts, LaunchAttentionInputsParts},
    {nullptr, {kArchCpu, kAnyCuda.end}, nullptr, LaunchAttentionInputsInTurn},
};

absl::Status Validate(const AttentionInputsArgs& args, int arch) {
  ISTHMUS_RETURN_IF_ERROR(ValidateHeadNormRope(args.heads));
  for (const std::optional<CompressorArgs>* some : {&args.compressor, &args.index_compressor}) {
    if (some->has_value()) ISTHMUS_RETURN_IF_ERROR(ValidateCompressor(**some, arch));
  }
  const IndexQueryArgs& query = args.index_query;
  if (query.q.data == nullptr) return absl::OkStatus();
  const int64_t tokens = query.q.rows;
  if (query.num_heads < 1 || query.dim < 1 || query.q.cols != query.num_heads * query.dim ||
      query.weights.rows != tokens || query.weights.cols != query.num_heads ||
      static_cast<int64_t>(query.positions.size()) != tokens ||
      2 * static_cast<int64_t>(query.frequency.size()) > query.dim) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention_inputs: the index query is [", tokens, ", ", query.q.cols,
                     "] with ", query.num_heads, " heads of ", query.dim, ", weights [",
                     query.weights.rows, ", ", query.weights.cols, "], ", query.positions.size(),
                     " positions, ", query.frequency.size(), " frequencies"));
  }
  return absl::OkStatus();
}

}  // namespace

std::span<const Patch* const> AttentionInputsPatches() {
  static constexpr const Patch* kPatches[] = {&kOneLaunch, &kHeadNormRopeWarpPerHead};
  return kPatches;
}
std::span<const AttentionInputsVariant> AttentionInputsVariants() { return kVariants; }

absl::Status LaunchAttentionInputsInTurn(const AttentionInputsArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(HeadNormRope(args.heads, exec));
  if (args.compressor) ISTHMUS_RETURN_IF_ERROR(Compressor(*args.compressor, exec));
  if (args.index_compressor) ISTHMUS_RETURN_IF_ERROR(Compressor(*args.index_compressor, exec));
  const IndexQueryArgs& query = args.index_query;
  if (query.q.data == nullptr) return absl::OkStatus();
  ISTHMUS_RETURN_IF_ERROR(Rope({.x = query.q,
                                .head_dim = query.dim,
                                .positions = query.positions,
                                .frequency = query.frequency,
                                .arithmetic = query.arithmetic},
                               exec));
  ISTHMUS_RETURN_IF_ERROR(IndexQuery(query.q, query.num_heads, query.dim, query.arithmetic, exec));
  return ScaleRows(
      {.x = query.weights, .scale = query.weight_scale, .arithmetic = query.arithmetic}, exec);
}

absl::Status AttentionInputs(const AttentionInputsArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(Validate(args, exec.arch));
  ISTHMUS_ASSIGN_OR_RETURN(const AttentionInputsVariant* variant,
                           Choose(AttentionInputsVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
