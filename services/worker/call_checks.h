// SPDX-License-Identifier: Apache-2.0
// What both services check and read of their calls.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "google/protobuf/repeated_field.h"
#include "proto/worker.pb.h"
#include "services/engine/sequence.h"

namespace isthmus::worker {

// InvalidArgument unless it has 16 bytes.
absl::Status CheckTransferId(const std::string& transfer_id);

// InvalidArgument when it has more than 128 bytes.
absl::Status CheckCacheSalt(const std::string& salt);

// InvalidArgument unless the lease is positive and at most a day.
absl::Status CheckLease(const v1::KvReservation& reservation);

// InvalidArgument for an id that no token has.
absl::StatusOr<std::vector<int32_t>> TokensOf(const google::protobuf::RepeatedField<uint32_t>& ids);

// Of the first reply, with the seeds of the others; without max_tokens. What is absent is what
// changes nothing; values out of range stay so, for the engine to refuse.
engine::SamplingParams SamplingOf(const v1::SamplingParams& params);

void ToWire(const kernels::TokenLogprobs& logprobs, v1::TokenLogprobs* wire);
kernels::TokenLogprobs FromWire(const v1::TokenLogprobs& wire);

// Unavailable with scope peer: routers go elsewhere.
absl::Status Draining();

}  // namespace isthmus::worker
