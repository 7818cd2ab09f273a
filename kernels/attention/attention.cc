// SPDX-License-Identifier: Apache-2.0
// Validation and the variant table of attention.
#include "kernels/attention/attention.h"

#include "absl/strings/str_cat.h"
#include "kernels/attention/attention_variants.h"
#include "kernels/core/choose.h"
#include "kernels/core/sequence_check.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

// Head_dim 512 with entries of fp8 and bf16, everything aligned for loads of 16 bytes. That pages
// and slots begin at multiples of 16 is part of the contract.
bool SupportsAttentionMma(const AttentionArgs& args) {
  const auto is_aligned = [](const MatrixView& m) {
    return reinterpret_cast<uintptr_t>(m.data) % 16 == 0 &&
           m.row_stride % (m.dtype == DType::kBf16 ? 8 : 4) == 0;
  };
  const auto fits = [](const EntryPlane& plane) {
    return plane.format == EntryFormat::kKvFp8 && plane.data_offset % 16 == 0 &&
           plane.data_bytes % 16 == 0 && plane.scale_offset % 8 == 0 && plane.scale_bytes == 8;
  };
  return args.head_dim == 512 && args.rope_dim == 64 && args.arithmetic == Arithmetic::kReference &&
         is_aligned(args.q) && is_aligned(args.out) && fits(args.window_plane) &&
         (args.ratio == 0 || fits(args.entry_plane));
}

// Weights as f16 or bf16, q and the codes exact, sums in f32, the fast 2^x off by 2 ulp. In
// reference arithmetic the definition rounds p to bf16 below the final maximum, which a running
// maximum cannot repeat, and rounds out; both errors are of the size of a bf16 rounding (2e-3). The
// floor keeps the sum below the bound that DeepSeek holds its own kernels to: half the square at
// most 5e-6.
constexpr NumericBound kMmaBound = {NumericClass::kReducedPrecision, /*factor=*/1.5,
                                    /*floor=*/2.8e-3};

constexpr Patch kSplitMma = {
    .name = "attention.split_mma",
    .summary =
        "Decode on tensor cores over entries as stored, a row's keys cut into splits that a second "
        "launch adds up, so that a small batch fills the device.",
    .phases = kPhaseDecode,
    .default_on = true,
    .bound = kMmaBound,
    .test = "AttentionCudaTest",
    .decision = "kernels/attention/decisions/0001-split-mma.md"};

constexpr Patch kPrefillMma = {
    .name = "attention.prefill_mma",
    .summary =
        "Prefill with the same tensor-core kernel: a block per row and 32 heads, which gathers and "
        "converts each entry once for all of them.",
    .phases = kPhasePrefill,
    .default_on = false,
    .bound = kMmaBound,
    .test = "AttentionCudaTest",
    .decision = "kernels/attention/decisions/0001-split-mma.md"};

constexpr Patch kPrefillWidened = {
    .name = "attention.prefill_widened",
    .summary =
        "Prefill on tensor cores with a block per row and 64 heads, which widens each entry to "
        "bf16 once, scale and all, so that nothing but products is left to its warps.",
    .phases = kPhasePrefill,
    .default_on = false,
    .bound = kMmaBound,
    .test = "AttentionCudaTest",
    .decision = "kernels/attention/decisions/0002-widened-prefill.md"};

constexpr const Patch* kPatches[] = {&kSplitMma, &kPrefillWidened, &kPrefillMma};

// Fastest first within an architecture; each architecture ends in its trusted path.
constexpr AttentionVariant kVariants[] = {
    {&kSplitMma, kSm90Up, SupportsAttentionMma, LaunchAttentionMma},
    {&kPrefillWidened, kSm90Up, SupportsAttentionMma, LaunchAttentionPrefill},
    {&kPrefillMma, kSm90Up, SupportsAttentionMma, LaunchAttentionMma},
    {nullptr, kAnyCuda, nullptr, LaunchAttentionCuda},
    {nullptr, kCpuOnly, nullptr, LaunchAttentionCpu},
};

constexpr int64_t kPartialSums = 16;

// As CheckF32Matrix; on a GPU the activations may be bf16.
absl::Status CheckActivations(const char* name, MatrixView m, const AttentionArgs& args) {
  if (args.device_batch != nullptr && m.dtype == DType::kBf16) m.dtype = DType::kF32;
  return CheckF32Matrix(name, m, args.q.rows, args.num_heads * args.head_dim);
}

absl::Status ValidateShapes(const AttentionArgs& args) {
  if (args.num_heads < 1 || args.head_dim < kPartialSums || args.head_dim % kPartialSums != 0 ||
      args.rope_dim < 0 || args.rope_dim > args.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "attention: num_heads ", args.num_heads, ", head_dim ", args.head_dim, ", rope_dim ",
        args.rope_dim, "; head_dim must be a positive multiple of ", kPartialSums));
  }
  if (args.window < 1 || args.ratio < 0) {
    return absl::InvalidArgumentError(absl::StrCat("attention: window ", args.window,
                                                   " must be positive, ratio ", args.ratio,
                                                   " not negative"));
  }
  const int64_t rows = args.q.rows;
  ISTHMUS_RETURN_IF_ERROR(CheckActivations("attention: q", args.q, args));
  ISTHMUS_RETURN_IF_ERROR(CheckActivations("attention: out", args.out, args));
  ISTHMUS_RETURN_IF_ERROR(
      CheckF32Matrix("attention: chunk_kv", args.chunk_kv, rows, args.head_dim));
  if (args.out.data == args.q.data &&
      (args.out.row_stride != args.q.row_stride || args.out.dtype != args.q.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention: out is q with row_stride ", args.out.row_stride, " instead of ",
                     args.q.row_stride, ", dtype ", static_cast<int>(args.out.dtype),
                     " instead of ", static_cast<int>(args.q.dtype)));
  }
  if (args.sink.dtype != DType::kF32 || args.sink.size != args.num_heads) {
    return absl::InvalidArgumentError(absl::StrCat("attention: sink has ", args.sink.size,
                                                   " elements, num_heads is ", args.num_heads));
  }
  return absl::OkStatus();
}

// A plane of KV entries of this head_dim in one of the two KV formats.
absl::Status ValidatePlane(const char* name, const EntryPlane& plane, const AttentionArgs& args) {
  int64_t bytes = 0;
  if (plane.format == EntryFormat::kKvFp8) bytes = args.head_dim + args.rope_dim;
  if (plane.format == EntryFormat::kKvF32) bytes = 4 * args.head_dim;
  if (bytes != 0 && plane.data_bytes == bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("attention: ", name, " has format ",
                                                 static_cast<int>(plane.format), " with ",
                                                 plane.data_bytes, " bytes per entry, head_dim is ",
                                                 args.head_dim, ", rope_dim ", args.rope_dim));
}

absl::Status ValidateSelected(const AttentionArgs& args, const SequenceKv& seq) {
  for (int64_t i = 0; i < seq.num_rows; ++i) {
    const int64_t row = seq.first_row + i;
    const int64_t visible = VisibleEntries(seq.start_position + i, args.ratio);
    const int32_t* selected = args.selected + row * args.max_selected;
    for (int64_t k = 0; k < args.max_selected; ++k) {
      if (selected[k] >= -1 && selected[k] < visible) continue;
      return absl::InvalidArgumentError(absl::StrCat("attention: selected[", row, "][", k, "] is ",
                                                     selected[k], ", the row sees ", visible,
                                                     " entries"));
    }
  }
  return absl::OkStatus();
}

// What can be said of a device's batch without reading its memory.
absl::Status ValidateDeviceBatch(const AttentionArgs& args) {
  const DeviceBatch& batch = *args.device_batch;
  if (args.sequences.empty() && batch.rows == args.q.rows && batch.num_sequences >= 0 &&
      batch.max_rows_per_sequence >= 0 && batch.max_tokens >= 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("attention: device_batch has ", batch.rows, " rows of at most ",
                   batch.max_tokens, " tokens, q has ", args.q.rows, " rows, and ",
                   args.sequences.size(), " sequences of the host come with it"));
}

// Pages and selected entries of the host's sequences.
absl::Status ValidateSequences(const AttentionArgs& args) {
  for (const SequenceKv& seq : args.sequences) {
    if (seq.num_rows == 0) continue;
    if (seq.state == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("attention: sequence at row ", seq.first_row, " has no state slot"));
    }
    if (args.ratio == 0) continue;
    const int64_t visible = VisibleEntries(seq.start_position + seq.num_rows - 1, args.ratio);
    ISTHMUS_RETURN_IF_ERROR(
        CheckPages("attention", seq, args.entry_kind, args.entry_plane, visible));
    if (args.selected != nullptr) ISTHMUS_RETURN_IF_ERROR(ValidateSelected(args, seq));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateAttention(const AttentionArgs& args) {
  ISTHMUS_RETURN_IF_ERROR(ValidateShapes(args));
  if (args.device_batch != nullptr) {
    ISTHMUS_RETURN_IF_ERROR(ValidateDeviceBatch(args));
  } else {
    ISTHMUS_RETURN_IF_ERROR(CheckSequences("attention", args.sequences, args.q.rows));
  }
  ISTHMUS_RETURN_IF_ERROR(ValidatePlane("window_plane", args.window_plane, args));
  if (args.window_plane.entries != args.window) {
    return absl::InvalidArgumentError(absl::StrCat("attention: the ring has ",
                                                   args.window_plane.entries,
                                                   " entries, window is ", args.window));
  }
  if (args.ratio != 0) {
    if (args.entry_kind != kCsaKv && args.entry_kind != kHcaKv) {
      return absl::InvalidArgumentError(
          absl::StrCat("attention: entry_kind is ", static_cast<int>(args.entry_kind), ", must be ",
                       static_cast<int>(kCsaKv), " or ", static_cast<int>(kHcaKv)));
    }
    ISTHMUS_RETURN_IF_ERROR(ValidatePlane("entry_plane", args.entry_plane, args));
  }
  if (args.selected != nullptr && (args.max_selected < 1 || args.ratio == 0)) {
    return absl::InvalidArgumentError(absl::StrCat("attention: selected with max_selected ",
                                                   args.max_selected, " and ratio ", args.ratio));
  }
  return ValidateSequences(args);
}

std::span<const AttentionVariant> AttentionVariants() { return kVariants; }
std::span<const Patch* const> AttentionPatches() { return kPatches; }

absl::Status Attention(const AttentionArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateAttention(args));
  ISTHMUS_ASSIGN_OR_RETURN(const AttentionVariant* variant,
                           Choose(AttentionVariants(), args, exec));
  if (IsDevice(exec.arch) != (args.device_batch != nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("attention: architecture ", exec.arch,
                                                   IsDevice(exec.arch) ? " needs" : " takes no",
                                                   " device_batch"));
  }
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
