// SPDX-License-Identifier: Apache-2.0
#include "kernels/random_fill/random_fill.h"

#include "absl/strings/str_cat.h"
#include "kernels/random_fill/random_fill_variants.h"

namespace isthmus::kernels {

absl::Status RandomFill(const RandomFillArgs& args, const Exec& exec) {
  const bool is_aligned =
      args.first.bytes % 4 == 0 && args.second.bytes % 4 == 0 && args.plane_stride % 4 == 0;
  if (!is_aligned || args.planes < 0 || args.records < 0 || args.first.bytes < 0 ||
      args.second.bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("random_fill: ", args.planes, " planes ", args.plane_stride, " apart of ",
                     args.records, " records of ", args.first.bytes, " + ", args.second.bytes,
                     " bytes; sizes must be multiples of 4"));
  }
#if ISTHMUS_HAS_CUDA
  if (IsDevice(exec.arch)) return LaunchRandomFillCuda(args, exec);
#endif
  return absl::UnimplementedError(absl::StrCat("no variant for architecture ", exec.arch));
}

absl::Status ReadThrough(const std::byte* from, int64_t bytes, uint32_t* sink, const Exec& exec) {
#if ISTHMUS_HAS_CUDA
  if (IsDevice(exec.arch)) return LaunchReadThroughCuda(from, bytes, sink, exec);
#else
  (void)from;
  (void)bytes;
  (void)sink;
#endif
  return absl::UnimplementedError(absl::StrCat("no variant for architecture ", exec.arch));
}

}  // namespace isthmus::kernels
