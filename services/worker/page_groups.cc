// SPDX-License-Identifier: Apache-2.0
#include "services/worker/page_groups.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/page_digest/page_digest.h"

namespace isthmus::worker {

using kernels::CacheKind;
using kernels::CacheKindIndex;
using kernels::kNumCacheKinds;
using kernels::kNumPagedKinds;

std::vector<transfer::LocalRegion> RegionsOf(kv::CachePool& pool) {
  std::vector<transfer::LocalRegion> regions;
  const auto add = [&regions](kv::PagePool& pages) {
    regions.push_back({pages.arena().data(), static_cast<uint64_t>(pages.page_bytes()),
                       static_cast<uint64_t>(pages.num_pages())});
  };
  for (int k = 0; k < kNumPagedKinds; ++k) add(pool.pages(static_cast<CacheKindIndex>(k)));
  add(pool.slots());
  return regions;
}

std::vector<transfer::ExpectedGroup> GroupsOf(kv::CachePool& pool, const kv::SequenceCache& cache,
                                              int64_t num_tokens, int64_t held_tokens) {
  const kernels::KvLayout& layout = pool.layout();
  std::vector<transfer::ExpectedGroup> groups;
  for (int k = 0; k < kNumCacheKinds; ++k) {
    const auto index = static_cast<CacheKindIndex>(k);
    const CacheKind& kind = layout.kinds[static_cast<size_t>(k)];
    const auto num_layers = static_cast<uint32_t>(kind.layers.size());
    const auto bytes = static_cast<size_t>(kind.bytes());
    if (bytes == 0) continue;
    if (k >= kNumPagedKinds) {
      const std::byte* slot = pool.slots().address(cache.slot());
      groups.push_back(
          {static_cast<uint32_t>(k), 0, 0, num_layers, 0, {slot + kind.offset, bytes}});
      continue;
    }
    const int64_t count = layout.PagesFor(index, num_tokens);
    const int64_t held = held_tokens / layout.geometry.page_tokens;
    for (int64_t page = held; page < count; ++page) {
      const int32_t unit = cache.pages(index)[static_cast<size_t>(page)];
      groups.push_back({static_cast<uint32_t>(k),
                        static_cast<uint32_t>(page - held),
                        0,
                        num_layers,
                        static_cast<uint64_t>(page * layout.geometry.page_tokens),
                        {pool.pages(index).address(unit), bytes}});
    }
  }
  return groups;
}

uint32_t DigestOf(const std::string& transfer_id, const transfer::ExpectedGroup& group) {
  kernels::PageCanary canary;
  std::copy_n(transfer_id.begin(), std::min(transfer_id.size(), canary.transfer_id.size()),
              canary.transfer_id.begin());
  canary.cache_kind = group.cache_kind;
  canary.first_layer = group.first_layer;
  canary.num_layers = group.num_layers;
  canary.first_position = group.first_position;
  kernels::Exec exec;
  exec.phase = kPhaseTransfer;
  return kernels::PageDigest(canary, group.bytes, exec);
}

absl::StatusOr<std::vector<transfer::PageSpan>> SpansOf(kv::CachePool& pool,
                                                        const kv::SequenceCache& cache,
                                                        int64_t num_tokens,
                                                        const v1::KvReservation& reservation) {
  const auto page_tokens = static_cast<uint64_t>(pool.layout().geometry.page_tokens);
  const uint64_t held_tokens = reservation.held_tokens();
  if (held_tokens % page_tokens != 0 || held_tokens > static_cast<uint64_t>(num_tokens)) {
    return absl::InvalidArgumentError(absl::StrCat("reservation.held_tokens: is ", held_tokens,
                                                   ", want whole pages of ", page_tokens,
                                                   " tokens, at most the prompt's ", num_tokens));
  }
  const auto held = static_cast<int64_t>(held_tokens / page_tokens);
  std::array<const v1::CachePages*, kNumPagedKinds> reserved{};
  for (const v1::CachePages& pages : reservation.pages()) {
    if (pages.cache_kind() >= kNumPagedKinds || reserved[pages.cache_kind()] != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("reservation.pages: cache kind ", pages.cache_kind(), " is ",
                       pages.cache_kind() >= kNumPagedKinds ? "not paged" : "listed twice"));
    }
    reserved[pages.cache_kind()] = &pages;
  }
  std::vector<transfer::PageSpan> spans;
  for (int k = 0; k < kNumPagedKinds; ++k) {
    const auto kind = static_cast<CacheKindIndex>(k);
    kv::PagePool& pages = pool.pages(kind);
    if (pages.page_bytes() == 0) continue;
    const int64_t count = pool.layout().PagesFor(kind, num_tokens) - held;
    const int64_t offered = reserved[k] == nullptr ? 0 : reserved[k]->pages_size();
    if (offered != count) {
      return absl::InvalidArgumentError(
          absl::StrCat("reservation.pages: cache kind ", k, " has ", offered, " pages, ",
                       num_tokens, " tokens of which ", held_tokens, " are held need ", count));
    }
    for (int64_t i = 0; i < count; ++i) {
      const v1::PageRef& ref = reserved[k]->pages(static_cast<int>(i));
      const std::byte* bytes = pages.address(cache.pages(kind)[static_cast<size_t>(held + i)]);
      spans.push_back({{bytes, static_cast<size_t>(pages.page_bytes())},
                       ref.region(),
                       ref.region_generation(),
                       ref.page()});
    }
  }
  const v1::StateSlotRef& state = reservation.state();
  spans.push_back(
      {{pool.slots().address(cache.slot()), static_cast<size_t>(pool.slots().page_bytes())},
       state.region(),
       state.region_generation(),
       state.slot()});
  return spans;
}

void DescribePages(kv::CachePool& pool, const kv::SequenceCache& cache, int64_t num_tokens,
                   uint32_t generation, v1::KvReservation* reservation) {
  for (int k = 0; k < kNumPagedKinds; ++k) {
    const auto kind = static_cast<CacheKindIndex>(k);
    if (pool.pages(kind).page_bytes() == 0) continue;
    v1::CachePages* list = reservation->add_pages();
    list->set_cache_kind(static_cast<uint32_t>(k));
    const int64_t count = pool.layout().PagesFor(kind, num_tokens);
    const auto held =
        static_cast<int64_t>(reservation->held_tokens()) / pool.layout().geometry.page_tokens;
    for (int64_t i = held; i < count; ++i) {
      v1::PageRef* ref = list->add_pages();
      ref->set_region(static_cast<uint32_t>(k));
      ref->set_region_generation(generation);
      ref->set_page(static_cast<uint32_t>(cache.pages(kind)[static_cast<size_t>(i)]));
    }
  }
  v1::StateSlotRef* state = reservation->mutable_state();
  state->set_region(kStateRegion);
  state->set_region_generation(generation);
  state->set_slot(static_cast<uint32_t>(cache.slot()));
}

}  // namespace isthmus::worker
