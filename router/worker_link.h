// SPDX-License-Identifier: Apache-2.0
// One run of a worker as the router sees it: its card, its standing, its last load, and what this
// router has there. A restarted worker is another link.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/cluster.pb.h"
#include "proto/generate.pb.h"
#include "router/token_relay.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/rpc/worker_client.h"

namespace isthmus::router {

// What policies compare. Counts are of requests or tokens.
struct LinkLoad {
  v1::WorkerLoad reported;
  // Of this router, placed and not over yet.
  uint64_t requests_in_flight = 0;
  uint64_t prompt_tokens_in_flight = 0;
  // Of those, placed after the last report came: the report cannot know them.
  uint64_t requests_since_report = 0;
  uint64_t prompt_tokens_since_report = 0;
};

// Thread-safe.
class WorkerLink {
 public:
  // A worker that says nothing for longer than `lease` is suspect.
  WorkerLink(std::unique_ptr<rpc::WorkerClient> client, v1::WorkerCard card, absl::Duration lease,
             Clock& clock);

  rpc::WorkerClient& client() { return *client_; }
  const v1::WorkerCard& card() const { return card_; }
  v1::WorkerRole role() const { return card_.role(); }
  uint64_t incarnation() const { return card_.incarnation(); }
  const std::string& address() const { return card_.address(); }
  TokenRelay& relay() { return relay_; }

  // Ready, draining or suspect.
  v1::WorkerState state() const;
  // Why it gets no requests; empty when it is ready.
  std::string problem() const;
  // Not ready, but registered and not draining: its next report, or its token stream, may make it
  // so within moments.
  bool is_recovering() const;
  v1::WorkerStatus status() const;
  LinkLoad load() const;

  // OK while calls to this run may still be answered; Unavailable (scope peer) once another run
  // has its address or it was silent for longer than the lease.
  absl::Status Standing() const;
  bool is_replaced() const { return is_replaced_; }
  bool is_silent() const;
  // When it became suspect by losing its stream; infinitely late while it has one.
  absl::Time lost_at() const;

  // The registration stream: `serial` names one of the streams of this run, from 1 up.
  void SetRegistered(uint64_t serial);
  // False when another stream or run has taken over, and this one should end.
  bool SetLoad(uint64_t serial, const v1::WorkerLoad& load);
  bool SetDraining(uint64_t serial, const std::string& reason);
  void SetLost(uint64_t serial, const std::string& reason);
  bool is_registered() const;
  // It drained and then ended its stream, as it should: nothing to remember.
  bool has_left() const;

  // Another run has its address.
  void SetReplaced();

  // A call failed with scope peer: no requests until its next report.
  void SetFailed(const absl::Status& status);

  // Decode workers: whether tokens can flow; and that something came.
  void SetTokensOpen(bool is_open);
  void NoteTokens();

 private:
  friend class Charge;
  v1::WorkerState StateLocked(std::string* problem) const;

  const std::unique_ptr<rpc::WorkerClient> client_;
  const v1::WorkerCard card_;
  const absl::Duration lease_;
  Clock& clock_;
  TokenRelay relay_;
  std::atomic<bool> is_replaced_ = false;
  std::atomic<int64_t> heard_at_;  // Of anything from this run; nanoseconds since the Unix epoch.

  mutable Mutex mutex_;
  uint64_t serial_ = 0;           // Of the open registration stream; 0: none. Guarded by mutex_.
  bool is_draining_ = false;      // Guarded by mutex_.
  std::string drain_reason_;      // Guarded by mutex_.
  std::string lost_reason_;       // Guarded by mutex_.
  absl::Time lost_at_;            // Guarded by mutex_.
  std::string failure_;           // Of the last call; empty: none. Guarded by mutex_.
  bool are_tokens_open_ = false;  // Guarded by mutex_.
  absl::Time load_at_;            // Guarded by mutex_.
  LinkLoad load_;                 // Guarded by mutex_.
};

// One request on the books of a link while it lives.
class Charge {
 public:
  Charge() = default;
  Charge(std::shared_ptr<WorkerLink> link, uint64_t prompt_tokens);
  Charge(Charge&& other) noexcept
      : link_(std::move(other.link_)), prompt_tokens_(other.prompt_tokens_) {}
  Charge& operator=(Charge&& other) noexcept {
    Release();
    link_ = std::move(other.link_);
    prompt_tokens_ = other.prompt_tokens_;
    return *this;
  }
  ~Charge() { Release(); }
  void Release();

 private:
  std::shared_ptr<WorkerLink> link_;
  uint64_t prompt_tokens_ = 0;
};

}  // namespace isthmus::router
