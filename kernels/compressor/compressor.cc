// SPDX-License-Identifier: Apache-2.0
// Validation and the variant table of the compressor.
#include "kernels/compressor/compressor.h"

#include <bit>

#include "absl/strings/str_cat.h"
#include "kernels/compressor/compressor_variants.h"
#include "kernels/core/choose.h"
#include "kernels/core/formats.h"
#include "kernels/core/index_key.h"
#include "kernels/core/sequence_check.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr Patch kFusedInsert = {
    .name = "compressor.fused_insert",
    .summary =
        "Pooling, norm, rotation, encoding, insertion and ring in one launch over blocks of "
        "channels, since a decode step mostly keeps one row and pays for launches.",
    .phases = kPhaseDecode,
    .default_on = true,
    .bound = {NumericClass::kBitExact},
    .test = "CompressorCudaTest",
    .decision = "kernels/compressor/decisions/0001-insert-in-one-launch.md"};
constexpr const Patch* kPatches[] = {&kFusedInsert};

bool IsFewRowsOfWholeBlocks(const CompressorArgs& args) {
  return args.dim % 64 == 0 && args.device_batch->max_rows_per_sequence <= 8 &&
         args.device_batch->num_sequences <= kNumCounters;
}

// Fastest first within an architecture; each architecture ends in its trusted path.
constexpr CompressorVariant kVariants[] = {
    {&kFusedInsert, kSm90Up, IsFewRowsOfWholeBlocks, LaunchCompressorFused},
    {nullptr, kAnyCuda, nullptr, LaunchCompressorCuda},
    {nullptr, kCpuOnly, nullptr, LaunchCompressorCpu},
};

absl::Status ValidateShapes(const CompressorArgs& args) {
  if (args.ratio != 4 && args.ratio != 128) {
    return absl::InvalidArgumentError(
        absl::StrCat("compressor: ratio is ", args.ratio, ", must be 4 or 128"));
  }
  const int64_t block = args.is_index_key ? kIndexKeyBlock : 16;
  const bool is_power = args.dim > 0 && std::has_single_bit(static_cast<uint64_t>(args.dim));
  if (args.dim < 1 || args.dim % block != 0 || (args.is_index_key && !is_power)) {
    return absl::InvalidArgumentError(absl::StrCat("compressor: dim is ", args.dim,
                                                   ", must be a multiple of ", block,
                                                   ", and a power of two for index keys"));
  }
  if (args.rope_dim < 0 || args.rope_dim % 2 != 0 || args.rope_dim > args.dim ||
      static_cast<int64_t>(args.frequency.size()) != args.rope_dim / 2) {
    return absl::InvalidArgumentError(absl::StrCat("compressor: rope_dim is ", args.rope_dim,
                                                   ", dim ", args.dim, ", frequencies ",
                                                   args.frequency.size()));
  }
  const int64_t rows = args.u.rows;
  const int64_t width = CompressorWidth(args);
  ISTHMUS_RETURN_IF_ERROR(CheckF32Matrix("compressor: u", args.u, rows, width));
  ISTHMUS_RETURN_IF_ERROR(CheckF32Matrix("compressor: g", args.g, rows, width));
  ISTHMUS_RETURN_IF_ERROR(CheckF32Matrix("compressor: ape", args.ape, args.ratio, width));
  if (args.norm_weight.dtype != DType::kF32 || args.norm_weight.size != args.dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "compressor: norm_weight has ", args.norm_weight.size, " elements, dim is ", args.dim));
  }
  return absl::OkStatus();
}

// The format that entries have in this arithmetic, and its bytes per entry.
absl::Status ValidatePlanes(const CompressorArgs& args) {
  const bool reference = args.arithmetic == Arithmetic::kReference;
  EntryFormat format = EntryFormat::kKvF32;
  int64_t bytes = 4 * args.dim;
  if (args.is_index_key) {
    format = reference ? EntryFormat::kKeyFp4 : EntryFormat::kKeyF32;
    if (HasIndexKeyFormat(args.arithmetic, args.entry_plane.format)) {
      format = args.entry_plane.format;
    }
    bytes = IndexKeyBytes(format, args.dim);
  } else if (reference) {
    format = EntryFormat::kKvFp8;
    bytes = args.dim + args.rope_dim;
  }
  if (args.entry_plane.format != format || args.entry_plane.data_bytes != bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "compressor: entry_plane has format ", static_cast<int>(args.entry_plane.format), " with ",
        args.entry_plane.data_bytes, " bytes, needs format ", static_cast<int>(format), " with ",
        bytes));
  }
  const int64_t row_bytes = 8 * CompressorWidth(args);
  const int64_t ring = CompressorRing(args.ratio);
  if (args.state_plane.format != EntryFormat::kStateRow || args.state_plane.entries != ring ||
      args.state_plane.data_bytes != row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "compressor: state_plane has format ", static_cast<int>(args.state_plane.format), ", ",
        args.state_plane.entries, " rows of ", args.state_plane.data_bytes, " bytes, needs ", ring,
        " of ", row_bytes));
  }
  const bool is_paged = args.entry_kind >= 0 && args.entry_kind < kNumPagedKinds;
  if (!is_paged || (args.entry_kind == kIndexKey) != args.is_index_key) {
    return absl::InvalidArgumentError(absl::StrCat("compressor: entry_kind is ",
                                                   static_cast<int>(args.entry_kind),
                                                   ", is_index_key is ", args.is_index_key));
  }
  return absl::OkStatus();
}

// What the host can see of a batch in device memory.
absl::Status ValidateDeviceBatch(const CompressorArgs& args) {
  const DeviceBatch* batch = args.device_batch;
  if (batch == nullptr || !args.sequences.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("compressor: on a GPU device_batch is needed and sequences are none; it is ",
                     batch == nullptr ? "null" : "set", ", they are ", args.sequences.size()));
  }
  if (batch->rows != args.u.rows || batch->num_sequences < 0 || batch->max_rows_per_sequence < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "compressor: device_batch has ", batch->rows, " rows, ", batch->num_sequences,
        " sequences of at most ", batch->max_rows_per_sequence, " rows; u has ", args.u.rows));
  }
  if (args.entry_plane.entries <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("compressor: entry_plane has ", args.entry_plane.entries, " entries a page"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateCompressor(const CompressorArgs& args, int arch) {
  ISTHMUS_RETURN_IF_ERROR(ValidateShapes(args));
  ISTHMUS_RETURN_IF_ERROR(ValidatePlanes(args));
  if (IsDevice(arch)) return ValidateDeviceBatch(args);
  ISTHMUS_RETURN_IF_ERROR(CheckSequences("compressor", args.sequences, args.u.rows));
  for (const SequenceKv& seq : args.sequences) {
    if (seq.num_rows == 0) continue;
    if (seq.state == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("compressor: sequence at row ", seq.first_row, " has no state slot"));
    }
    const int64_t entries = (seq.start_position + seq.num_rows) / args.ratio;
    ISTHMUS_RETURN_IF_ERROR(
        CheckPages("compressor", seq, args.entry_kind, args.entry_plane, entries));
  }
  return absl::OkStatus();
}

std::span<const CompressorVariant> CompressorVariants() { return kVariants; }
std::span<const Patch* const> CompressorPatches() { return kPatches; }

absl::Status Compressor(const CompressorArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateCompressor(args, exec.arch));
  ISTHMUS_ASSIGN_OR_RETURN(const CompressorVariant* variant,
                           Choose(CompressorVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
