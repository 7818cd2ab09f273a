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

// InvalidArgument unless the lease is positive and at most a day.
absl::Status CheckLease(const v1::KvReservation& reservation);

// InvalidArgument for an id that no token has.
absl::StatusOr<std::vector<int32_t>> TokensOf(const google::protobuf::RepeatedField<uint32_t>& ids);

// Without max_tokens. Values out of range stay so, for the engine to refuse.
engine::SamplingParams SamplingOf(const v1::SamplerState& state);

// Unavailable with scope peer: routers go elsewhere.
absl::Status Draining();

}  // namespace isthmus::worker
