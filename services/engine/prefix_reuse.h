// SPDX-License-Identifier: Apache-2.0
// What the engine does with the prefix index of its pool (services/kv/prefix_index.h): begin a
// sequence with what others have computed, and make findable what it computes itself. Nothing of it
// shows in the output, bit by bit. Without a prefix index a sequence just begins empty.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "services/engine/sequence.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::engine {

// Opens the sequence's cache, with room for `num_tokens` tokens, and takes over the longest prefix
// of its tokens that is known under its salt; at least one token is left to compute, and all of
// them while log probabilities of the prompt are wanted. Called again after the cache was given
// back. Thread-safe. On an error the cache is closed. ResourceExhausted: not enough pages even
// without sharing, or no state slot.
absl::Status OpenWithPrefix(kv::CachePool& pool, int64_t num_tokens, Sequence& sequence);

// The pages that are known of the sequence's tokens, held: full ones, without a snapshot. Nothing
// without a prefix index. Thread-safe.
kv::PrefixHit FindPages(kv::CachePool& pool, Sequence& sequence);

// Opens the sequence's cache for tokens and a state that a transfer brings, with room for
// `num_tokens`, and shares the pages that FindPages has found. Thread-safe. Errors as above.
absl::Status OpenWithPages(kv::CachePool& pool, int64_t num_tokens, kv::PrefixHit found,
                           Sequence& sequence);

// After tokens have come into the sequence's cache: makes its whole blocks findable, takes a
// snapshot when it stands where one is wanted, and says where it should stand next.
void PublishPrefix(kv::CachePool& pool, Sequence& sequence);

// The next number of cached tokens that a step should end at, so that a snapshot can be taken
// there: where another prompt left this one's, every snapshot_interval, the last multiple of 128
// inside a prompt, and every one of a reply.
int64_t NextWantedBoundary(const kv::PrefixOptions& options, const Sequence& sequence);

}  // namespace isthmus::engine
