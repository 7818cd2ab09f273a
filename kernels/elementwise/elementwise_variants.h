// SPDX-License-Identifier: Apache-2.0
// The launchers of elementwise: internal to this folder and its tests. There is one path for the
// CPU and one for all GPUs, so there is no table.
#pragma once

#include "kernels/elementwise/elementwise.h"

namespace isthmus::kernels {

absl::Status LaunchEmbedTokensCpu(const EmbedTokensArgs& args, const Exec& exec);
absl::Status LaunchGatherRowsCpu(const GatherRowsArgs& args, const Exec& exec);
absl::Status LaunchRoundTripKvCpu(const RoundTripKvArgs& args, const Exec& exec);
absl::Status LaunchScaleRowsCpu(const ScaleRowsArgs& args, const Exec& exec);

absl::Status LaunchEmbedTokensCuda(const EmbedTokensArgs& args, const Exec& exec);
absl::Status LaunchGatherRowsCuda(const GatherRowsArgs& args, const Exec& exec);
absl::Status LaunchRoundTripKvCuda(const RoundTripKvArgs& args, const Exec& exec);
absl::Status LaunchScaleRowsCuda(const ScaleRowsArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
