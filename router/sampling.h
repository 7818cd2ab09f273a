// SPDX-License-Identifier: Apache-2.0
// What a client says about its tokens: checked, and completed with the router's defaults.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "proto/cluster.pb.h"
#include "proto/kv_reservation.pb.h"
#include "proto/request.pb.h"
#include "router/router_config.h"

namespace isthmus::router {

// Every optional field set, but for the log probabilities of a client that wants none;
// max_output_tokens is at most what the model leaves. InvalidArgument names the field, its value
// and what is allowed: numbers that are not finite or out of range, ids outside the vocabulary,
// lists that are too long or have something twice, a least length above the longest.
absl::StatusOr<v1::SamplingParams> CompleteSampling(const v1::SamplingParams& asked,
                                                    const RouterConfig& config,
                                                    const v1::ClusterValues& values,
                                                    uint64_t num_prompt_tokens);

// What workers need to know of it, before the first draw.
v1::SamplerState SamplerOf(const v1::SamplingParams& complete);

}  // namespace isthmus::router
