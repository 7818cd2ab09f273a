// SPDX-License-Identifier: Apache-2.0
// Validation and the variant table of the indexer.
#include "kernels/indexer/indexer.h"

#include <bit>

#include "absl/strings/str_cat.h"
#include "kernels/core/choose.h"
#include "kernels/core/formats.h"
#include "kernels/core/index_key.h"
#include "kernels/core/quantise.h"
#include "kernels/core/sequence_check.h"
#include "kernels/indexer/indexer_passes.h"
#include "kernels/indexer/indexer_steps.h"
#include "kernels/indexer/indexer_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr Patch kRadixTopK = {
    .name = "indexer.radix_top_k",
    .summary =
        "A row's selection counts digits of 12 and 4 (or 10) bits in shared memory instead of one "
        "bit at a time, over scores held in registers.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = true,
    .bound = {},
    .test = "IndexerCudaTest",
    .decision = "kernels/indexer/decisions/0001-radix-top-k.md"};

constexpr Patch kMmaScores = {
    .name = "indexer.mma_scores",
    .summary =
        "Keys stay in registers as tensor-core operands while the heads of several rows stream "
        "past, in even shares of all keys over the multiprocessors; then a selection by radix.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = true,
    .bound = {NumericClass::kReordered, /*factor=*/2.0, /*floor=*/1e-7},
    .test = "IndexerCudaTest",
    .decision = "kernels/indexer/decisions/0002-mma-scores.md"};

constexpr Patch kFusedSelect = {
    .name = "indexer.fused_select",
    .summary =
        "With few rows and keys, the block that scores a decode row's last tile (as "
        "indexer.mma_scores) selects its entries by radix in the same launch.",
    .phases = kPhaseDecode,
    .bound = {NumericClass::kReordered, /*factor=*/2.0, /*floor=*/1e-7},
    .test = "IndexerCudaTest",
    .decision = "kernels/indexer/decisions/0003-fused-select.md"};

constexpr const Patch* kPatches[] = {&kFusedSelect, &kMmaScores, &kRadixTopK};

// What mma_scores is written for: queries on the fp4 grid, and tiles of keys that lie within a page
// and begin at 16 bytes.
bool KeysFillTiles(const IndexerArgs& args) {
  const EntryPlane& plane = args.key_plane;
  const bool has_format = plane.format == EntryFormat::kKeyFp4 ||
                          plane.format == EntryFormat::kKeyFp8 ||
                          plane.format == EntryFormat::kKeyBf16;
  return has_format && args.arithmetic == Arithmetic::kReference && args.dim == 128 &&
         args.num_heads <= 64 && plane.entries % 32 == 0 && plane.data_offset % 16 == 0 &&
         plane.scale_offset % 4 == 0;
}

#if ISTHMUS_HAS_CUDA
// One launch pays while a block has a few keys of a row; with more, a selection by 1024 threads in
// a launch of its own is the shorter tail.
absl::Status LaunchIndexerFused(const IndexerArgs& args, const Exec& exec) {
  if (FitsOnePass(args) &&
      FewKeysPerSm(args.q.rows, VisibleKeys(args.device_batch->max_tokens - 1), exec) &&
      exec.counters != nullptr && args.q.rows <= kNumCounters) {
    return RunIndexerPasses(args, exec, ScoreAndSelectByMma, nullptr);
  }
  return RunIndexerPasses(args, exec, ScoreByMma, SelectByRadix);
}
absl::Status LaunchIndexerMma(const IndexerArgs& args, const Exec& exec) {
  return RunIndexerPasses(args, exec, ScoreByMma, SelectByRadix);
}
absl::Status LaunchIndexerRadix(const IndexerArgs& args, const Exec& exec) {
  return RunIndexerPasses(args, exec, ScoreByThreads, SelectByRadix);
}
#else
constexpr absl::Status (*LaunchIndexerFused)(const IndexerArgs&, const Exec&) = nullptr;
constexpr absl::Status (*LaunchIndexerMma)(const IndexerArgs&, const Exec&) = nullptr;
constexpr absl::Status (*LaunchIndexerRadix)(const IndexerArgs&, const Exec&) = nullptr;
#endif

// Fastest first within an architecture; each architecture ends in its trusted path.
constexpr IndexerVariant kVariants[] = {
    {&kFusedSelect, kSm90Up, KeysFillTiles, LaunchIndexerFused},
    {&kMmaScores, kSm90Up, KeysFillTiles, LaunchIndexerMma},
    {&kRadixTopK, kAnyCuda, nullptr, LaunchIndexerRadix},
    {nullptr, kAnyCuda, nullptr, LaunchIndexerCuda},
    {nullptr, kCpuOnly, nullptr, LaunchIndexerCpu},
};

absl::Status ValidateShapes(const IndexerArgs& args) {
  if (args.num_heads < 1 || args.dim < 1 || args.dim % kIndexKeyBlock != 0) {
    return absl::InvalidArgumentError(absl::StrCat("indexer: num_heads ", args.num_heads, ", dim ",
                                                   args.dim, "; dim must be a multiple of ",
                                                   kIndexKeyBlock));
  }
  if (args.topk < 1 || args.selected == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("indexer: topk is ", args.topk,
                                                   ", must be positive, with `selected` ",
                                                   args.selected == nullptr ? "null" : "set"));
  }
  const int64_t rows = args.q.rows;
  ISTHMUS_RETURN_IF_ERROR(CheckF32Matrix("indexer: q", args.q, rows, args.num_heads * args.dim));
  return CheckF32Matrix("indexer: w", args.w, rows, args.num_heads);
}

absl::Status ValidatePlane(const IndexerArgs& args) {
  const int64_t bytes = IndexKeyBytes(args.key_plane.format, args.dim);
  if (bytes != 0 && args.key_plane.data_bytes == bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("indexer: key_plane has format ", static_cast<int>(args.key_plane.format),
                   " with ", args.key_plane.data_bytes, " bytes per key, dim is ", args.dim));
}

// What the host can see of a batch whose sequences lie in device memory.
absl::Status ValidateDeviceBatch(const IndexerArgs& args) {
  const DeviceBatch& batch = *args.device_batch;
  if (!args.sequences.empty() || batch.rows != args.q.rows) {
    return absl::InvalidArgumentError(absl::StrCat("indexer: device_batch has ", batch.rows,
                                                   " rows, q has ", args.q.rows, "; sequences has ",
                                                   args.sequences.size(), ", must be empty"));
  }
  if (args.key_plane.entries <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "indexer: key_plane has ", args.key_plane.entries, " entries per page, must be positive"));
  }
  if (args.dim > kMaxDeviceDim) {
    return absl::InvalidArgumentError(
        absl::StrCat("indexer: dim is ", args.dim, ", at most ", kMaxDeviceDim, " on a GPU"));
  }
  const int64_t visible = VisibleKeys(batch.max_tokens - 1);
  if (args.scores == nullptr || args.scores_stride >= visible) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("indexer: scores_stride is ", args.scores_stride,
                                                 ", a sequence may have ", visible, " entries"));
}

}  // namespace

absl::Status ValidateIndexer(const IndexerArgs& args) {
  ISTHMUS_RETURN_IF_ERROR(ValidateShapes(args));
  ISTHMUS_RETURN_IF_ERROR(ValidatePlane(args));
  if (args.device_batch != nullptr) return ValidateDeviceBatch(args);
  ISTHMUS_RETURN_IF_ERROR(CheckSequences("indexer", args.sequences, args.q.rows));
  for (const SequenceKv& seq : args.sequences) {
    if (seq.num_rows == 0) continue;
    const int64_t visible = VisibleKeys(seq.start_position + seq.num_rows - 1);
    ISTHMUS_RETURN_IF_ERROR(CheckPages("indexer", seq, kIndexKey, args.key_plane, visible));
    if (args.scores != nullptr && args.scores_stride < visible) {
      return absl::InvalidArgumentError(absl::StrCat("indexer: scores_stride is ",
                                                     args.scores_stride, ", the sequence at row ",
                                                     seq.first_row, " has ", visible, " entries"));
    }
  }
  return absl::OkStatus();
}

std::span<const Patch* const> IndexerPatches() { return kPatches; }

std::span<const IndexerVariant> IndexerVariants() { return kVariants; }

absl::Status Indexer(const IndexerArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateIndexer(args));
  ISTHMUS_ASSIGN_OR_RETURN(const IndexerVariant* variant, Choose(IndexerVariants(), args, exec));
  if (IsDevice(exec.arch) != (args.device_batch != nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("indexer: architecture ", exec.arch,
                                                   " with device_batch ",
                                                   args.device_batch != nullptr ? "set" : "null"));
  }
  return variant->launch(args, exec);
}

namespace {

absl::Status ValidateStep(const IndexerArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateIndexer(args));
  const bool has_batch = args.device_batch != nullptr;
  if (!IsDevice(exec.arch) || !has_batch || args.scores == nullptr || args.q.rows > kMaxPassRows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "indexer: one step alone needs a GPU, a device_batch, scores and at most ", kMaxPassRows,
        " rows; architecture ", exec.arch, ", device_batch ", has_batch ? "set" : "null",
        ", scores ", args.scores == nullptr ? "null" : "set", ", rows ", args.q.rows));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status IndexerScores(const IndexerArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateStep(args, exec));
#if ISTHMUS_HAS_CUDA
  const bool has_mma = IsActive(kMmaScores, exec) && KeysFillTiles(args);
  if (args.q.rows > 0) return RunIndexerStep(args, exec, has_mma ? ScoreByMma : ScoreByThreads);
#endif
  return absl::OkStatus();
}

absl::Status IndexerSelection(const IndexerArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateStep(args, exec));
#if ISTHMUS_HAS_CUDA
  const bool has_radix = IsActive(kRadixTopK, exec);
  if (args.q.rows > 0) return RunIndexerStep(args, exec, has_radix ? SelectByRadix : SelectByBits);
#endif
  return absl::OkStatus();
}

absl::Status IndexQuery(const MatrixView& q, int64_t num_heads, int64_t dim, Arithmetic arithmetic,
                        const Exec& exec) {
  if (num_heads < 1 || dim < 1 || !std::has_single_bit(static_cast<uint64_t>(dim))) {
    return absl::InvalidArgumentError(absl::StrCat("index_query: num_heads ", num_heads, ", dim ",
                                                   dim, "; dim must be a power of two"));
  }
  ISTHMUS_RETURN_IF_ERROR(CheckF32Matrix("index_query: q", q, q.rows, num_heads * dim));
  if (arithmetic == Arithmetic::kMath) return absl::OkStatus();
  if (IsDevice(exec.arch)) {
    absl::Status (*launch)(const MatrixView&, int64_t, int64_t, const Exec&) = LaunchIndexQueryCuda;
    if (launch != nullptr && dim <= kMaxDeviceDim) return launch(q, num_heads, dim, exec);
    return absl::UnimplementedError(
        absl::StrCat("index_query: no variant for architecture ", exec.arch, " and dim ", dim));
  }
  ParallelFor(exec, q.rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t h = 0; h < num_heads; ++h) {
        float* x = q.f32(row) + h * dim;
        Hadamard(x, dim);
        RoundBf16Row(x, dim, x);
        RoundTripFp4Row(x, dim, x);
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
