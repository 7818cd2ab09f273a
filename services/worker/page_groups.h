// SPDX-License-Identifier: Apache-2.0
// A sequence's cache as page groups and spans: the one place where the pages of services/kv and the
// regions of kvtransfer meet. Both sides of a transfer derive the same groups from the same counts.
//
// Region k < kNumPagedKinds holds the pages of paged kind k; region kNumPagedKinds holds the state
// slots. A paged kind's group is one page with all its layers; a state slot has one group for each
// of its fixed-size kinds.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/exec.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/region.h"
#include "proto/kv_reservation.pb.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::worker {

inline constexpr uint32_t kStateRegion = kernels::kNumPagedKinds;

// The arenas of `pool`, by region number.
std::vector<transfer::LocalRegion> RegionsOf(kv::CachePool& pool);

// Every group that `num_tokens` tokens of `cache` consist of, in a fixed order, without the pages
// of the first `held_tokens`, which are whole pages.
std::vector<transfer::ExpectedGroup> GroupsOf(kv::CachePool& pool, const kv::SequenceCache& cache,
                                              int64_t num_tokens, int64_t held_tokens = 0);

// The digest of a group as it lies in memory, under the canary of `transfer_id` (16 bytes).
uint32_t DigestOf(const std::string& transfer_id, const transfer::ExpectedGroup& group);

// What must be written where, so that `reservation` holds `num_tokens` tokens of `cache`: all but
// what it holds already. InvalidArgument names the cache kind whose number of reserved pages is
// another one, and held tokens that are not whole pages of the prompt.
absl::StatusOr<std::vector<transfer::PageSpan>> SpansOf(kv::CachePool& pool,
                                                        const kv::SequenceCache& cache,
                                                        int64_t num_tokens,
                                                        const v1::KvReservation& reservation);

// Names the pages and the slot of `cache` that `num_tokens` tokens need, in a reservation whose
// held_tokens say which of them need not be filled.
void DescribePages(kv::CachePool& pool, const kv::SequenceCache& cache, int64_t num_tokens,
                   uint32_t generation, v1::KvReservation* reservation);

}  // namespace isthmus::worker
