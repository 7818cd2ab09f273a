// SPDX-License-Identifier: Apache-2.0
// Patch experts.grouped_w4a8, and what its kin on sm_120 share with it: every expert that has
// tokens, the shared one among them, in two launches of tensor-core products over tiles of fp4 or
// fp8 weights and quantised rows, with three small launches around them: sort, quantise, sum.
//
// Bound by memory: the floor is the bytes of the tiles of the experts that have tokens, once
// (a share of half the model's expert, 1024 of 2048 wide: 6.7 MB). See grouped_products.cuh.
#include <algorithm>

#include "kernels/core/weight_tiles.h"
#include "kernels/core/workspace.h"
#include "kernels/experts/experts_variants.h"
#include "kernels/experts/grouped_products.cuh"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

using grouped::Batch;
using grouped::ProductKind;
using grouped::Scratch;

constexpr int64_t kTokensAtOnce = 2048;  // Bounds the workspace of a long prefill.

bool CanMultiply(const WeightView& w, int arch) {
  if (w.layout != TileLayout(w.format, arch)) return false;
  if (reinterpret_cast<uintptr_t>(w.elements) % 16 != 0) return false;  // Bulk copies.
  if (w.rows % grouped::kGroup != 0 || w.cols % grouped::kGroup != 0) return false;
  if (IsFp4(w.format)) return true;
  return w.format == WeightFormat::kFp8Block128 && w.first_col == 0 && w.first_row % 16 == 0;
}
bool CanMultiply(const ExpertWeights& e, int64_t intermediate, int arch) {
  return CanMultiply(e.w1, arch) && CanMultiply(e.w3, arch) && CanMultiply(e.w2, arch) &&
         e.w1.format == e.w3.format && e.w1.rows == intermediate;
}

const ExpertWeights* FirstLoaded(const ExpertsArgs& args) {
  for (const ExpertWeights& e : args.experts) {
    if (e.w1.elements != nullptr) return &e;
  }
  return nullptr;
}

grouped::Fp4Target TakeFp4Rows(int64_t rows, int64_t inputs, Workspace::Scope& scope) {
  return {scope.Take<uint8_t>(rows * inputs / 2), scope.Take<uint8_t>(rows * inputs / 16),
          scope.Take<float>(rows)};
}

Scratch TakeScratch(const Batch& batch, grouped::RowKind row_kind, Workspace::Scope& scope) {
  const int64_t tokens = batch.tokens;
  const int64_t rows = tokens * batch.k + (batch.has_shared ? tokens : 0);
  const int64_t hidden = batch.hidden;
  const int64_t intermediate = batch.intermediate;
  const int64_t code_bytes = row_kind == grouped::RowKind::kF16 ? 2 : 1;
  Scratch scratch = {};
  scratch.row_kind = row_kind;
  scratch.list = scope.Take<grouped::JobList>(1);
  scratch.jobs = scope.Take<grouped::Job>(batch.num_experts + 1);
  scratch.row_token = scope.Take<int32_t>(rows);
  scratch.row_weight = scope.Take<float>(rows);
  scratch.rows_of = scope.Take<int32_t>(tokens * batch.k);
  scratch.x_codes = scope.Take<uint8_t>(tokens * hidden * code_bytes);
  scratch.x_scales = scope.Take<float>(tokens * hidden / grouped::kGroup);
  scratch.h = scope.Take<uint16_t>(rows * intermediate);
  scratch.h_codes = scope.Take<uint8_t>(rows * intermediate * code_bytes);
  scratch.h_scales = scope.Take<float>(rows * intermediate / grouped::kGroup);
  scratch.y = scope.Take<uint16_t>(rows * hidden);
  if (row_kind != grouped::RowKind::kFp4) return scratch;
  scratch.x_fp4 = TakeFp4Rows(tokens, hidden, scope);
  scratch.h_fp4 = TakeFp4Rows(tokens * batch.k, intermediate, scope);
  return scratch;
}

// Rows of a unit. No expert has more rows than there are tokens, and few have more than a quarter
// of 64.
int32_t BlockRows(int64_t tokens) { return tokens <= 8 ? 8 : tokens <= 128 ? 16 : 32; }

// A unit of the shared expert costs twice one of a routed one where its weights are twice as wide.
int SharedCost(const ExpertsArgs& args) {
  const ExpertWeights* routed = FirstLoaded(args);
  if (args.shared == nullptr || routed == nullptr) return 1;
  return IsFp4(routed->w1.format) && !IsFp4(args.shared->w1.format) ? 2 : 1;
}

template <ProductKind kKind>
grouped::ProductArgs MakeProduct(const ExpertsArgs& args, const Batch& batch,
                                 const Scratch& scratch) {
  constexpr bool kIsGate = kKind == ProductKind::kGate;
  grouped::ProductArgs product = {.scratch = scratch,
                                  .inputs = kIsGate ? batch.hidden : batch.intermediate,
                                  .outputs = kIsGate ? batch.intermediate : batch.hidden,
                                  .block_rows = batch.block_rows,
                                  .tokens = batch.tokens,
                                  .shared_cost = SharedCost(args),
                                  .shared_tiles = {},
                                  .shared_bytes = {}};
  if (kIsGate && args.shared != nullptr) {
    const WeightView* views[3] = {&args.shared->w1, &args.shared->w3, &args.shared->w2};
    for (int i = 0; i < 3; ++i) {
      product.shared_tiles[i] = static_cast<const uint8_t*>(views[i]->elements);
      product.shared_bytes[i] = TiledBytes(*views[i]);
    }
  }
  return product;
}

// The tokens [first, first + count) of the batch.
absl::Status RunTokens(const ExpertsArgs& args, int64_t first, int64_t count, const Exec& exec,
                       grouped::RowKind row_kind, grouped::ProductLaunch gate,
                       grouped::ProductLaunch down) {
  Workspace::Scope scope(exec.workspace);
  const ExpertWeights& any = args.shared != nullptr ? *args.shared : *FirstLoaded(args);
  const Batch batch = {.ids = args.ids + first * args.k,
                       .weights = args.weights + first * args.k,
                       .experts = args.device_experts,
                       .shared = args.shared != nullptr ? *args.shared : ExpertWeights{},
                       .tokens = static_cast<int32_t>(count),
                       .k = static_cast<int32_t>(args.k),
                       .num_experts = static_cast<int32_t>(args.experts.size()),
                       .hidden = static_cast<int32_t>(args.x.cols),
                       .intermediate = static_cast<int32_t>(any.w1.rows),
                       .block_rows = BlockRows(count),
                       .limit = args.limit,
                       .shared_limit = args.shared_limit,
                       .has_shared = args.shared != nullptr};
  const Scratch scratch = TakeScratch(batch, row_kind, scope);
  const MatrixView x = args.x.Rows(first, count);
  ISTHMUS_RETURN_IF_ERROR(grouped::LaunchRoute(batch, scratch, x.f32(0), x.row_stride, exec));
  const bool has_fp4_rows = row_kind == grouped::RowKind::kFp4;
  if (has_fp4_rows) {
    ISTHMUS_RETURN_IF_ERROR(
        grouped::LaunchQuantiseInputFp4(batch, scratch, x.f32(0), x.row_stride, exec));
  }
  ISTHMUS_RETURN_IF_ERROR(gate(MakeProduct<ProductKind::kGate>(args, batch, scratch), exec));
  ISTHMUS_RETURN_IF_ERROR(grouped::LaunchQuantiseHidden(batch, scratch, exec));
  if (has_fp4_rows) {
    ISTHMUS_RETURN_IF_ERROR(grouped::LaunchQuantiseHiddenFp4(batch, scratch, exec));
  }
  ISTHMUS_RETURN_IF_ERROR(down(MakeProduct<ProductKind::kDown>(args, batch, scratch), exec));
  float* routed = args.routed.data != nullptr ? args.routed.f32(first) : nullptr;
  return grouped::LaunchCombine(batch, scratch, routed, args.routed.row_stride, args.out.f32(first),
                                args.out.row_stride, exec);
}

bool Supports(const ExpertsArgs& args, int arch) {
  if (args.arithmetic != Arithmetic::kReference) return false;
  if (args.experts.size() > size_t{grouped::kMaxExperts}) return false;
  const ExpertWeights* any = args.shared != nullptr ? args.shared : FirstLoaded(args);
  if (any == nullptr) return false;
  const auto fits = [&](const ExpertWeights& e) {
    return e.w1.elements == nullptr || CanMultiply(e, any->w1.rows, arch);
  };
  if (args.shared != nullptr && !fits(*args.shared)) return false;
  if (!std::all_of(args.experts.begin(), args.experts.end(), fits)) return false;
  return reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0 && args.x.row_stride % 4 == 0;
}

}  // namespace

bool SupportsGroupedOnSm90(const ExpertsArgs& args) { return Supports(args, kArchSm90); }
bool SupportsGroupedOnSm120(const ExpertsArgs& args) { return Supports(args, kArchSm120); }
bool SupportsGroupedW4A4(const ExpertsArgs& args) {
  // A routed expert's rows are NVFP4 in both products, the shared expert's e4m3.
  const auto is_fp4 = [](const ExpertWeights& e) {
    return e.w1.elements == nullptr || (IsFp4(e.w1.format) && IsFp4(e.w2.format));
  };
  if (!std::all_of(args.experts.begin(), args.experts.end(), is_fp4)) return false;
  if (FirstLoaded(args) == nullptr) return false;
  const bool has_fp4_shared =
      args.shared != nullptr && (IsFp4(args.shared->w1.format) || IsFp4(args.shared->w2.format));
  return !has_fp4_shared && Supports(args, kArchSm120);
}

absl::Status grouped::RunGrouped(const ExpertsArgs& args, const Exec& exec, RowKind row_kind,
                                 ProductLaunch gate, ProductLaunch down) {
  for (int64_t first = 0; first < args.x.rows; first += kTokensAtOnce) {
    const int64_t count = std::min(kTokensAtOnce, args.x.rows - first);
    ISTHMUS_RETURN_IF_ERROR(RunTokens(args, first, count, exec, row_kind, gate, down));
  }
  return absl::OkStatus();
}

absl::Status LaunchExpertsGroupedW4A8(const ExpertsArgs& args, const Exec& exec) {
  using grouped::MmaKind;
  return grouped::RunGrouped(args, exec, grouped::RowKind::kF16,
                             grouped::LaunchProduct<MmaKind::kF16, ProductKind::kGate>,
                             grouped::LaunchProduct<MmaKind::kF16, ProductKind::kDown>);
}

}  // namespace isthmus::kernels
