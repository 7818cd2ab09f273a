// SPDX-License-Identifier: Apache-2.0
// Validation of elementwise, and the choice between the CPU and a GPU.
#include "kernels/elementwise/elementwise.h"

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "kernels/core/formats.h"
#include "kernels/elementwise/elementwise_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

absl::Status CheckMatrix(absl::string_view name, const MatrixView& m) {
  if (m.dtype != DType::kF32 || m.rows < 0 || m.cols < 1 || (m.rows > 1 && m.row_stride < m.cols)) {
    return absl::InvalidArgumentError(absl::StrCat("elementwise: ", name, " is [", m.rows, ", ",
                                                   m.cols, "] of type ", static_cast<int>(m.dtype),
                                                   " with row stride ", m.row_stride));
  }
  if (m.data == nullptr && m.rows > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("elementwise: ", name, " has ", m.rows, " rows and no data"));
  }
  return absl::OkStatus();
}

// Not deduced from, so that null is one, too.
template <typename Args>
using Launcher = std::type_identity_t<absl::Status (*)(const Args&, const Exec&)>;

template <typename Args>
absl::Status Run(Launcher<Args> cpu, Launcher<Args> cuda, const Args& args, const Exec& exec) {
  if (!IsDevice(exec.arch)) return cpu(args, exec);
  if (cuda != nullptr) return cuda(args, exec);
  return absl::UnimplementedError(absl::StrCat("no variant for architecture ", exec.arch));
}

}  // namespace

#if ISTHMUS_HAS_CUDA
#define ISTHMUS_CUDA_OR_NULL(launcher) launcher
#else
#define ISTHMUS_CUDA_OR_NULL(launcher) nullptr
#endif

absl::Status EmbedTokens(const EmbedTokensArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("streams", args.streams));
  const WeightView& w = args.table;
  if (w.format != WeightFormat::kBf16 || w.layout != WeightLayout::kRowMajor || w.cols < 1 ||
      args.streams.cols % w.cols != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("elementwise: the table is [", w.rows, ", ", w.cols, "] of format ",
                     static_cast<int>(w.format), ", streams have ", args.streams.cols, " columns"));
  }
  return Run(LaunchEmbedTokensCpu, ISTHMUS_CUDA_OR_NULL(LaunchEmbedTokensCuda), args, exec);
}

absl::Status GatherRows(const GatherRowsArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("x", args.x));
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("out", args.out));
  if (args.x.cols != args.out.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("elementwise: x has ", args.x.cols, " columns, out has ", args.out.cols));
  }
  return Run(LaunchGatherRowsCpu, ISTHMUS_CUDA_OR_NULL(LaunchGatherRowsCuda), args, exec);
}

absl::Status RoundTripKv(const RoundTripKvArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("x", args.x));
  const int64_t nope = args.x.cols - args.rope_dim;
  if (nope < 0 || nope % kKvNopeBlock != 0) {
    return absl::InvalidArgumentError(absl::StrCat("elementwise: ", args.x.cols, " columns less ",
                                                   args.rope_dim, " are not whole blocks"));
  }
  return Run(LaunchRoundTripKvCpu, ISTHMUS_CUDA_OR_NULL(LaunchRoundTripKvCuda), args, exec);
}

absl::Status ScaleRows(const ScaleRowsArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("x", args.x));
  return Run(LaunchScaleRowsCpu, ISTHMUS_CUDA_OR_NULL(LaunchScaleRowsCuda), args, exec);
}

}  // namespace isthmus::kernels
