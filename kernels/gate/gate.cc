// SPDX-License-Identifier: Apache-2.0
// Validation and the variant table of gate.
#include "kernels/gate/gate.h"

#include "absl/strings/str_cat.h"
#include "kernels/gate/gate_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

absl::Status CheckRows(absl::string_view name, const MatrixView& view) {
  if (view.dtype != DType::kF32) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate: ", name, " must be f32, has dtype ", static_cast<int>(view.dtype)));
  }
  if (view.rows > 1 && view.row_stride < view.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate: ", name, " has row stride ", view.row_stride, ", experts ", view.cols));
  }
  if (view.rows > 0 && view.data == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate: ", name, " has ", view.rows, " rows and null data"));
  }
  return absl::OkStatus();
}

// Every id that the step will use, before anything is written: a padding row must carry a valid
// token too (specification 10.4).
absl::Status CheckHashIds(const GateArgs& args, int arch) {
  const auto table = static_cast<int64_t>(args.hash_ids.size());
  if (table % args.k != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate: hash_ids has ", table, " entries, no multiple of k ", args.k));
  }
  if (static_cast<int64_t>(args.token_ids.size()) != args.logits.rows) {
    return absl::InvalidArgumentError(absl::StrCat("gate: logits has ", args.logits.rows,
                                                   " tokens, token_ids ", args.token_ids.size()));
  }
  if (args.bias.size != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate: hash layers have no bias, this one has size ", args.bias.size));
  }
  if (IsDevice(arch)) return absl::OkStatus();
  for (size_t t = 0; t < args.token_ids.size(); ++t) {
    const int64_t token = args.token_ids[t];
    if (token < 0 || token >= table / args.k) {
      return absl::InvalidArgumentError(absl::StrCat("gate: token id ", token, " of token ", t,
                                                     " is outside the table of ", table / args.k));
    }
    for (int64_t i = 0; i < args.k; ++i) {
      const int64_t expert = args.hash_ids[token * args.k + i];
      if (expert < 0 || expert >= args.logits.cols) {
        return absl::InvalidArgumentError(absl::StrCat("gate: hash_ids of token id ", token,
                                                       " names expert ", expert, " of ",
                                                       args.logits.cols));
      }
    }
  }
  return absl::OkStatus();
}

constexpr GateVariant kVariants[] = {
    {nullptr, kAnyCuda, nullptr, LaunchGateCuda},
    {nullptr, kCpuOnly, nullptr, LaunchGateCpu},
};

}  // namespace

std::span<const GateVariant> GateVariants() { return kVariants; }

absl::Status ValidateGate(const GateArgs& args, int arch) {
  ISTHMUS_RETURN_IF_ERROR(CheckRows("logits", args.logits));
  ISTHMUS_RETURN_IF_ERROR(CheckRows("scores", args.scores));
  if (args.scores.rows != args.logits.rows || args.scores.cols != args.logits.cols) {
    return absl::InvalidArgumentError(absl::StrCat("gate: logits is [", args.logits.rows, ", ",
                                                   args.logits.cols, "], scores is [",
                                                   args.scores.rows, ", ", args.scores.cols, "]"));
  }
  if (args.k < 1 || args.k > kMaxGateK || args.k > args.logits.cols) {
    return absl::InvalidArgumentError(absl::StrCat("gate: k is ", args.k, ", experts ",
                                                   args.logits.cols, "; k must be in [1, ",
                                                   kMaxGateK, "] and at most experts"));
  }
  if (args.logits.rows > 0 && (args.ids == nullptr || args.weights == nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate: ids or weights is null for ", args.logits.rows, " tokens"));
  }
  if (!args.hash_ids.empty()) return CheckHashIds(args, arch);
  if (IsDevice(arch) && !args.token_ids.empty() &&
      static_cast<int64_t>(args.token_ids.size()) != args.logits.rows) {
    return absl::InvalidArgumentError(absl::StrCat("gate: logits has ", args.logits.rows,
                                                   " tokens, token_ids ", args.token_ids.size()));
  }
  if (args.bias.size != args.logits.cols || args.bias.dtype != DType::kF32) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate: logits has ", args.logits.cols, " experts, bias ", args.bias.size,
                     " of dtype ", static_cast<int>(args.bias.dtype), "; bias must be f32"));
  }
  return absl::OkStatus();
}

absl::Status Gate(const GateArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateGate(args, exec.arch));
  ISTHMUS_ASSIGN_OR_RETURN(const GateVariant* variant, Choose(GateVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
