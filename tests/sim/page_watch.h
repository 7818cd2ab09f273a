// SPDX-License-Identifier: Apache-2.0
// Watches the pages of all decode workers of a cluster: who may write where, that nobody writes
// into a page that others share, and that no page is lost. What it finds is a bug of the project.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "absl/strings/string_view.h"
#include "kvtransfer/transport_loopback.h"
#include "proto/kv_reservation.pb.h"
#include "services/base/mutex.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::sim {

// Thread-safe.
class PageWatch {
 public:
  // `on_violation` is called with what was found, maybe under a lock.
  explicit PageWatch(std::function<void(const std::string&)> on_violation)
      : on_violation_(std::move(on_violation)) {}

  // A run of a worker, until it is forgotten. The pool must live as long.
  void Watch(uint64_t incarnation, kv::CachePool* pool);
  void Forget(uint64_t incarnation);

  // Before the reservation leaves its decode worker; before its handoff is answered with OK.
  void NoteReserved(const v1::KvReservation& reservation);
  void NoteRunning(const std::string& transfer_id);

  // The transfer that the calling thread writes for, from now on.
  static void WriteFor(const std::string& transfer_id);

  // A byte of the write that just landed was changed: its transfer must not run.
  void NoteCorrupted(const transfer::LoopbackWrite& write);

  // From LoopbackNetwork::before_post and after_landing.
  void NotePosted(const transfer::LoopbackWrite& write);
  void NoteLanded(const transfer::LoopbackWrite& write);

  // Every page of every pool is free once or held, and every hold of a prefix index is that of one
  // of its blocks; check-fails otherwise.
  void CheckPools() const;

  uint64_t num_landed() const;

 private:
  using Unit = std::tuple<uint64_t, uint32_t, uint32_t>;  // Incarnation, region, unit.

  const std::function<void(const std::string&)> on_violation_;
  mutable Mutex mutex_;
  std::map<uint64_t, kv::CachePool*> pools_;  // By incarnation. Guarded by mutex_.
  std::map<Unit, std::string> owners_;        // Transfer ids. Guarded by mutex_.
  std::map<uint64_t, std::string> writers_;   // By number of the Write. Guarded by mutex_.
  std::set<std::string> running_;             // By transfer id. Guarded by mutex_.
  std::set<std::string> corrupted_;           // Transfer ids. Guarded by mutex_.
  uint64_t num_landed_ = 0;                   // Guarded by mutex_.
};

}  // namespace isthmus::sim
