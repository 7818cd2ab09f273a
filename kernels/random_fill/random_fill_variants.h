// SPDX-License-Identifier: Apache-2.0
// The launcher of random_fill: internal to this folder.
#pragma once

#include "kernels/random_fill/random_fill.h"

namespace isthmus::kernels {

absl::Status LaunchRandomFillCuda(const RandomFillArgs& args, const Exec& exec);
absl::Status LaunchReadThroughCuda(const std::byte* from, int64_t bytes, uint32_t* sink,
                                   const Exec& exec);

}  // namespace isthmus::kernels
