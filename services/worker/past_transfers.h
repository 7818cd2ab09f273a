// SPDX-License-Identifier: Apache-2.0
// Transfers that have ended at a worker, by id: a call that comes late, or twice, must not start
// one of them again. Ids are random and never used again, so to remember one for too long does no
// harm; the oldest are forgotten first.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <string>

namespace isthmus::worker {

// Not thread-safe.
class PastTransfers {
 public:
  explicit PastTransfers(size_t capacity = 16384) : capacity_(capacity) {}

  // `may_land`: a write of it may still be under way.
  void Add(const std::string& transfer_id, bool may_land) {
    const auto [entry, is_fresh] = may_land_.emplace(transfer_id, may_land);
    entry->second = entry->second || may_land;
    if (!is_fresh) return;
    order_.push_back(transfer_id);
    if (order_.size() <= capacity_) return;
    may_land_.erase(order_.front());
    order_.pop_front();
  }

  bool Contains(const std::string& transfer_id) const { return may_land_.count(transfer_id) != 0; }

  bool MayLand(const std::string& transfer_id) const {
    const auto found = may_land_.find(transfer_id);
    return found != may_land_.end() && found->second;
  }

 private:
  const size_t capacity_;
  std::map<std::string, bool> may_land_;
  std::deque<std::string> order_;  // The oldest first.
};

}  // namespace isthmus::worker
