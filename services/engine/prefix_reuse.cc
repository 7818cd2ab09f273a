// SPDX-License-Identifier: Apache-2.0
#include "services/engine/prefix_reuse.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "services/base/status_macros.h"

namespace isthmus::engine {
namespace {

// The last multiple of a block that leaves at least one of `num_tokens` tokens to compute.
int64_t LastBoundary(int64_t num_tokens) {
  return std::max<int64_t>(num_tokens - 1, 0) / kPrefixBlockTokens * kPrefixBlockTokens;
}

std::optional<kv::SnapshotReason> ReasonAt(const kv::PrefixOptions& options,
                                           const Sequence& sequence, int64_t boundary) {
  if (boundary <= 0 || boundary % kPrefixBlockTokens != 0) return std::nullopt;
  if (boundary % options.snapshot_interval == 0) return kv::SnapshotReason::kInterval;
  const int64_t last = LastBoundary(sequence.num_prompt_tokens);
  const bool is_of_reply = sequence.num_output_tokens() > 0 && boundary > last;
  if (boundary == last || is_of_reply) return kv::SnapshotReason::kTail;
  if (boundary == sequence.prefix.branch) return kv::SnapshotReason::kBranch;
  return std::nullopt;
}

// Names all whole blocks of the first `num_tokens` tokens.
std::span<const PrefixHash> ChainOf(const kv::PrefixIndex& index, int64_t num_tokens,
                                    Sequence& sequence) {
  PrefixTrace& trace = sequence.prefix;
  if (trace.chain.empty()) trace.root = index.RootOf(sequence.cache_salt);
  const auto tokens = std::span<const int32_t>(sequence.tokens).first(size_t(num_tokens));
  ExtendChain(trace.root, tokens, trace.chain);
  return std::span(trace.chain).first(size_t(num_tokens / kPrefixBlockTokens));
}

// Into the open and empty cache. Anything but OK leaves it so.
absl::Status Adopt(kv::PrefixHit hit, int64_t num_tokens, Sequence& sequence) {
  ISTHMUS_RETURN_IF_ERROR(sequence.cache.Adopt(std::move(hit)));
  const absl::Status status = sequence.cache.Reserve(num_tokens);
  if (!status.ok()) sequence.cache.Reset();
  return status;
}

// Takes over what host memory makes longer than what was found in pages, into the open and empty
// cache, and makes it findable in pages again. Without that the cache stays empty.
void AdoptFromHost(kv::CachePool& pool, std::span<const PrefixHash> chain, int64_t num_tokens,
                   int64_t found, Sequence& sequence) {
  kv::PrefixIndex& index = *pool.prefixes();
  kv::HostHit hit = index.FindHost(sequence.prefix.root, chain, sequence.tokens, found,
                                   static_cast<int64_t>(sequence.tokens.size()) - 1);
  if (hit.num_tokens == 0) return;
  absl::Status status = sequence.cache.AdoptHost(hit, std::move(hit.pages));
  if (absl::IsDataLoss(status)) index.RefuseHost(hit);
  if (!status.ok()) return;
  status = sequence.cache.Reserve(num_tokens);
  if (!status.ok()) return sequence.cache.Reset();
  const std::span<const PrefixHash> blocks =
      chain.first(static_cast<size_t>(hit.num_tokens / kPrefixBlockTokens));
  index.Insert(sequence.prefix.root, blocks, sequence.tokens, sequence.cache.page_lists());
  if (!index.LacksSnapshot(blocks.back())) return;
  absl::StatusOr<kv::HeldPage> snapshot = pool.TakeSnapshot(sequence.cache);
  if (!snapshot.ok()) return;
  index.AddSnapshot(blocks.back(), *std::move(snapshot), kv::SnapshotReason::kTail);
}

absl::Status BeginWithPrefix(kv::CachePool& pool, int64_t num_tokens, Sequence& sequence) {
  ISTHMUS_ASSIGN_OR_RETURN(sequence.cache, pool.Open());
  sequence.prefix.branch = 0;
  sequence.prefix.num_published = 0;
  kv::PrefixIndex* const index = pool.prefixes();
  if (index == nullptr) return sequence.cache.Reserve(num_tokens);
  const auto known = static_cast<int64_t>(sequence.tokens.size());
  if (!sequence.lacks_prompt_logprobs()) {
    const std::span<const PrefixHash> chain = ChainOf(*index, known, sequence);
    kv::PrefixHit hit = index->FindState(sequence.prefix.root, chain, sequence.tokens, known - 1);
    if (hit.num_matched_tokens > hit.num_tokens) sequence.prefix.branch = hit.num_matched_tokens;
    AdoptFromHost(pool, chain, num_tokens, hit.num_tokens, sequence);
    if (hit.num_tokens > 0 && sequence.cache.num_tokens() == 0) {
      const absl::Status status = Adopt(std::move(hit), num_tokens, sequence);
      if (!status.ok() && !absl::IsResourceExhausted(status)) return status;
    }
  }
  // A hit holds pages while it is copied. What has room without one must not fail for that.
  ISTHMUS_RETURN_IF_ERROR(sequence.cache.Reserve(num_tokens));
  sequence.prefix.num_published = sequence.cache.num_tokens() / kPrefixBlockTokens;
  sequence.wanted_boundary = NextWantedBoundary(index->options(), sequence);
  return absl::OkStatus();
}

absl::Status BeginWithPages(kv::CachePool& pool, int64_t num_tokens, kv::PrefixHit found,
                            Sequence& sequence) {
  ISTHMUS_ASSIGN_OR_RETURN(sequence.cache, pool.Open());
  if (found.num_tokens > 0) ISTHMUS_RETURN_IF_ERROR(sequence.cache.Adopt(std::move(found)));
  return sequence.cache.Reserve(num_tokens);
}

}  // namespace

absl::Status OpenWithPrefix(kv::CachePool& pool, int64_t num_tokens, Sequence& sequence) {
  absl::Status status = BeginWithPrefix(pool, num_tokens, sequence);
  if (!status.ok()) sequence.cache = kv::SequenceCache();
  return status;
}

kv::PrefixHit FindPages(kv::CachePool& pool, Sequence& sequence) {
  kv::PrefixIndex* const index = pool.prefixes();
  if (index == nullptr) return {};
  const auto known = static_cast<int64_t>(sequence.tokens.size());
  const std::span<const PrefixHash> chain = ChainOf(*index, known, sequence);
  return index->FindPages(sequence.prefix.root, chain, sequence.tokens);
}

absl::Status OpenWithPages(kv::CachePool& pool, int64_t num_tokens, kv::PrefixHit found,
                           Sequence& sequence) {
  absl::Status status = BeginWithPages(pool, num_tokens, std::move(found), sequence);
  if (!status.ok()) sequence.cache = kv::SequenceCache();
  return status;
}

int64_t NextWantedBoundary(const kv::PrefixOptions& options, const Sequence& sequence) {
  const int64_t cached = sequence.cache.num_tokens();
  // A long prompt may have more tokens than it will ever reach of this; a step just never gets
  // there.
  int64_t next = (cached / options.snapshot_interval + 1) * options.snapshot_interval;
  const auto want = [&](int64_t boundary) {
    if (boundary > cached) next = std::min(next, boundary);
  };
  want(sequence.prefix.branch);
  want(LastBoundary(sequence.num_prompt_tokens));
  if (sequence.num_output_tokens() == 0) return next;
  // Of a reply that is computed again the last one counts, not each on the way.
  const int64_t last = LastBoundary(static_cast<int64_t>(sequence.tokens.size()));
  want(last > cached ? last : (cached / kPrefixBlockTokens + 1) * kPrefixBlockTokens);
  return next;
}

void PublishPrefix(kv::CachePool& pool, Sequence& sequence) {
  kv::PrefixIndex* const index = pool.prefixes();
  if (index == nullptr) return;
  const int64_t cached = sequence.cache.num_tokens();
  const int64_t num_blocks = cached / kPrefixBlockTokens;
  if (num_blocks > sequence.prefix.num_published) {
    const std::span<const PrefixHash> chain = ChainOf(*index, cached, sequence);
    index->Insert(sequence.prefix.root, chain, sequence.tokens, sequence.cache.page_lists());
    sequence.prefix.num_published = num_blocks;
    const std::optional<kv::SnapshotReason> reason = ReasonAt(index->options(), sequence, cached);
    if (reason.has_value() && index->LacksSnapshot(chain.back())) {
      absl::StatusOr<kv::HeldPage> snapshot = pool.TakeSnapshot(sequence.cache);
      if (snapshot.ok()) index->AddSnapshot(chain.back(), *std::move(snapshot), *reason);
    }
  }
  sequence.wanted_boundary = NextWantedBoundary(index->options(), sequence);
}

}  // namespace isthmus::engine
