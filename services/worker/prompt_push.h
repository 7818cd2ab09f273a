// SPDX-License-Identifier: Apache-2.0
// One prompt's way into reserved pages, page by page as they fill: the digest of each page group,
// then the write. The caller's thread does both while the step loop computes what follows.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/sender.h"
#include "proto/worker.pb.h"
#include "services/worker/worker.h"

namespace isthmus::worker {

class PromptPush {
 public:
  // For the whole prompt of `call`, whose pages `cache` holds already: they must stay where they
  // are until the last push has returned. What transfer::Pusher::Open refuses, and InvalidArgument
  // for a reservation of another number of pages. What the reservation holds already is left out.
  static absl::StatusOr<PromptPush> Open(Worker& worker, const v1::PrefillCall& call,
                                         const kv::SequenceCache& cache);
  PromptPush(PromptPush&&) = default;

  // Whether PushFull would write anything.
  bool HasFull(int64_t num_cached) const;

  // Pushes every page that the first `num_cached` tokens fill and that was not pushed yet.
  absl::Status PushFull(int64_t num_cached, absl::Time deadline);

  // Pushes the rest: the last pages and the state slot. The whole prompt is cached.
  absl::Status PushRest(absl::Time deadline);

  // Whether a write that failed may still land.
  bool may_land() const { return may_land_; }

  // Time spent in writes, and when the last one was posted.
  absl::Duration write_time() const { return write_time_; }
  absl::Time last_posted() const { return last_posted_; }

  // Fills in the digests and the bytes.
  void Describe(v1::KvHandoff* handoff) const;

 private:
  // One page or the state slot: its bytes' destination and its groups.
  struct Unit {
    transfer::PageSpan span;
    std::vector<transfer::ExpectedGroup> groups;
    int64_t end_position = 0;  // Full once so many tokens are cached.
  };

  PromptPush(Worker& worker, std::string transfer_id, transfer::Pusher pusher)
      : clock_(&worker.clock()),
        staging_(worker.staging()),
        page_tokens_(worker.pool().layout().geometry.page_tokens),
        transfer_id_(std::move(transfer_id)),
        pusher_(std::move(pusher)) {}
  absl::Status PushUnits(size_t end, absl::Time deadline);
  absl::Status PushInHostMemory(const std::vector<Unit>& units, absl::Time deadline);

  Clock* clock_;
  PageStaging* staging_;  // Null when pages lie in host memory.
  int64_t page_tokens_;
  std::string transfer_id_;
  transfer::Pusher pusher_;
  std::vector<Unit> units_;  // By end_position; the state slot last.
  size_t num_pushed_ = 0;
  std::vector<v1::PageGroupDigest> digests_;
  bool may_land_ = false;
  absl::Duration write_time_;
  absl::Time last_posted_;
};

}  // namespace isthmus::worker
