// SPDX-License-Identifier: Apache-2.0
// What the router knows about the workers. They come and go by themselves: each holds a
// registration for as long as its stream is open. No gRPC type appears here (router_server.cc has
// them).
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/cluster.pb.h"
#include "proto/generate.pb.h"
#include "router/place.h"
#include "router/router_config.h"
#include "router/worker_link.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/base/thread.h"
#include "services/rpc/worker_client.h"

namespace isthmus::router {

// Thread-safe.
class ClusterView {
 public:
  // InvalidArgument: intervals under which every worker would be silent for too long.
  static absl::Status CheckConfig(const RouterConfig& config);

  // Makes a client of the worker at an address, without waiting for a connection.
  using Connect = std::function<std::unique_ptr<rpc::WorkerClient>(const std::string& address)>;

  ClusterView(const RouterConfig& config, Connect connect, Clock& clock);
  ~ClusterView();

  // A worker's open stream. When it is destroyed the worker becomes suspect at once. Must not
  // outlive the view.
  class Registration {
   public:
    Registration(ClusterView* view, std::shared_ptr<WorkerLink> link, uint64_t serial)
        : view_(view), link_(std::move(link)), serial_(serial) {}
    ~Registration();
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

    // What the stream says. False: another stream or run has taken its place, so it should end.
    bool Report(const v1::WorkerLoad& load);
    bool SetDraining(const std::string& reason);

   private:
    ClusterView* const view_;
    const std::shared_ptr<WorkerLink> link_;
    const uint64_t serial_;
  };

  // Takes a worker in. InvalidArgument: its card lacks its incarnation, role or address.
  // FailedPrecondition: its protocol version is not ours, or a value differs from a registered
  // worker's; both are named. AlreadyExists: this run has a stream. ResourceExhausted: max_workers
  // are registered. Another run at the same address is replaced at once, and its requests fail.
  absl::StatusOr<std::unique_ptr<Registration>> Register(const v1::WorkerCard& card);

  // The answer to a card that was taken.
  v1::Registered Welcome() const;

  // This run of the router, as the workers know it.
  uint64_t incarnation() const { return incarnation_; }

  // Registered workers and those that were lost lately, without having drained.
  Links links() const;

  // The same, and workers that were refused lately.
  std::vector<v1::WorkerStatus> Statuses() const;

  // The registered worker at an address; null when there is none.
  std::shared_ptr<WorkerLink> Find(const std::string& address) const;

  // Called by any thread, one at a time, whenever a placement that was not possible may have become
  // possible. Must not block or call the view. Once this has returned the former one is not called
  // any more.
  void OnChange(std::function<void()> on_change);

  // Ends the token streams; further registrations are refused.
  void Stop();

 private:
  struct TokenReader {
    std::shared_ptr<WorkerLink> link;
    Thread thread;
  };
  struct Refusal {
    v1::WorkerStatus status;
    absl::Time at;
  };

  absl::Status CheckCard(const v1::WorkerCard& card) const;
  absl::StatusOr<std::shared_ptr<WorkerLink>> Admit(const v1::WorkerCard& card, uint64_t serial);
  absl::Status CheckAgainstLocked(const v1::WorkerCard& card) const;
  void NoteRefusal(const v1::WorkerCard& card, const absl::Status& status);
  void ForgetLocked();
  void StartReader(const std::shared_ptr<WorkerLink>& link);
  void ReadTokens(const std::shared_ptr<WorkerLink>& link);
  bool EndsReader(const WorkerLink& link);
  void Changed();

  const RouterConfig config_;
  const Connect connect_;
  Clock& clock_;
  const uint64_t incarnation_;
  std::atomic<bool> stops_ = false;

  Mutex change_mutex_;
  std::function<void()> on_change_;  // Guarded by change_mutex_.

  mutable Mutex mutex_;
  CondVar stopped_;
  uint64_t next_serial_ = 1;          // Guarded by mutex_.
  Links links_;                       // Guarded by mutex_.
  std::deque<Refusal> refusals_;      // The latest last. Guarded by mutex_.
  std::vector<TokenReader> readers_;  // Guarded by mutex_.
};

}  // namespace isthmus::router
