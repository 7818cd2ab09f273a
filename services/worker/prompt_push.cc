// SPDX-License-Identifier: Apache-2.0
#include "services/worker/prompt_push.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "services/base/status_macros.h"
#include "services/worker/page_groups.h"

namespace isthmus::worker {

absl::StatusOr<PromptPush> PromptPush::Open(Worker& worker, const v1::PrefillCall& call,
                                            const kv::SequenceCache& cache) {
  const v1::KvReservation& reservation = call.reservation();
  ISTHMUS_ASSIGN_OR_RETURN(transfer::Pusher pusher,
                           transfer::Pusher::Open(worker.transport(), reservation, call.target(),
                                                  worker.identity().layout_fingerprint));
  kv::CachePool& pool = worker.pool();
  const int64_t num_tokens = call.prompt_token_ids_size();
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<transfer::PageSpan> spans,
                           SpansOf(pool, cache, num_tokens, reservation));
  const std::vector<transfer::ExpectedGroup> groups =
      GroupsOf(pool, cache, num_tokens, static_cast<int64_t>(reservation.held_tokens()));
  PromptPush push(worker, reservation.transfer_id(), std::move(pusher));
  // Both lists have the pages in the same order, and then the slot: one span, several groups.
  const size_t num_pages = spans.size() - 1;
  for (size_t i = 0; i < num_pages; ++i) {
    const auto end = static_cast<int64_t>(groups[i].first_position) + push.page_tokens_;
    push.units_.push_back({spans[i], {groups[i]}, end});
  }
  std::ranges::stable_sort(push.units_, {}, &Unit::end_position);
  push.units_.push_back({spans.back(),
                         {groups.begin() + static_cast<int64_t>(num_pages), groups.end()},
                         std::numeric_limits<int64_t>::max()});
  return push;
}

bool PromptPush::HasFull(int64_t num_cached) const {
  return num_pushed_ < units_.size() && units_[num_pushed_].end_position <= num_cached;
}

absl::Status PromptPush::PushFull(int64_t num_cached, absl::Time deadline) {
  size_t end = num_pushed_;
  while (end < units_.size() && units_[end].end_position <= num_cached) ++end;
  return PushUnits(end, deadline);
}

absl::Status PromptPush::PushRest(absl::Time deadline) {
  return PushUnits(units_.size(), deadline);
}

absl::Status PromptPush::PushUnits(size_t end, absl::Time deadline) {
  if (num_pushed_ >= end) return absl::OkStatus();
  std::vector<Unit> units(units_.begin() + static_cast<int64_t>(num_pushed_),
                          units_.begin() + static_cast<int64_t>(end));
  num_pushed_ = end;
  if (staging_ == nullptr) return PushInHostMemory(units, deadline);
  // Down into pinned memory first; the units then mean the copies.
  std::vector<std::pair<const std::byte*, int64_t>> pieces;
  int64_t bytes = 0;
  for (const Unit& unit : units) {
    pieces.emplace_back(unit.span.bytes.data(), static_cast<int64_t>(unit.span.bytes.size()));
    bytes += pieces.back().second;
  }
  ISTHMUS_ASSIGN_OR_RETURN(kernels::PinnedBuffer buffer, staging_->Borrow(bytes));
  absl::Status status = staging_->CopyDown(pieces, buffer);
  if (status.ok()) {
    const std::byte* at = buffer.data();
    for (Unit& unit : units) {
      const std::byte* const start = unit.span.bytes.data();
      for (transfer::ExpectedGroup& group : unit.groups) {
        group.bytes = {at + (group.bytes.data() - start), group.bytes.size()};
      }
      unit.span.bytes = {at, unit.span.bytes.size()};
      at += unit.span.bytes.size();
    }
    status = PushInHostMemory(units, deadline);
  }
  // A write that was given up may still read the memory: such a buffer is not used again.
  if (status.ok()) staging_->GiveBack(std::move(buffer));
  return status;
}

absl::Status PromptPush::PushInHostMemory(const std::vector<Unit>& units, absl::Time deadline) {
  std::vector<transfer::PageSpan> spans;
  for (const Unit& unit : units) {
    spans.push_back(unit.span);
    for (const transfer::ExpectedGroup& group : unit.groups) {
      v1::PageGroupDigest& digest = digests_.emplace_back();
      digest.set_cache_kind(group.cache_kind);
      digest.set_page_index(group.page_index);
      digest.set_first_layer(group.first_layer);
      digest.set_num_layers(group.num_layers);
      digest.set_first_position(group.first_position);
      digest.set_crc32c(DigestOf(transfer_id_, group));
    }
  }
  last_posted_ = clock_->Now();
  const absl::Status status = pusher_.Push(spans, deadline);
  write_time_ += clock_->Now() - last_posted_;
  // Whatever else is refused is refused before its first byte.
  may_land_ = may_land_ || absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status) ||
              absl::IsInternal(status) || absl::IsUnknown(status);
  return status;
}

void PromptPush::Describe(v1::KvHandoff* handoff) const {
  for (const v1::PageGroupDigest& digest : digests_) *handoff->add_digests() = digest;
  handoff->set_kv_bytes(pusher_.bytes());
}

}  // namespace isthmus::worker
