// SPDX-License-Identifier: Apache-2.0
// Workers for the router's tests: they live in memory, do what a test tells them and remember what
// they were asked.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "router/cluster_view.h"
#include "services/base/mutex.h"
#include "services/rpc/worker_client.h"

namespace isthmus::router::testing {

// One run of a worker. Members are guarded by `mutex` and may be changed at any time.
struct ScriptedWorker {
  ScriptedWorker(v1::WorkerRole role, uint64_t incarnation, const std::string& address);

  v1::WorkerCard card;
  Mutex mutex;
  CondVar changed;

  // What the next calls answer; the last entry stays. Empty: OK.
  std::deque<absl::Status> reserve_answers;
  std::deque<absl::Status> prefill_answers;
  std::deque<absl::Status> handoff_answers;
  std::deque<absl::Status> cancel_answers;

  // Calls wait, until they are cancelled, while this is set.
  bool holds_prefill = false;
  bool holds_cancel = false;
  // Decode: admitted sequences give all their tokens by themselves; else a test sends them.
  bool streams = true;
  uint64_t num_slots = 100;
  int num_give_way = 0;  // After so many calls that ask there is one slot more.

  // What happened: "reserve", "ask" with it, "prefill", "handoff", "cancel done", "cancel
  // not done", "drain".
  std::vector<std::string> calls;
  std::set<std::string> transfers;  // Held now.
  std::set<std::string> seen;       // Transfer ids of all attempts.
  std::deque<v1::StepTokens> steps;
  bool ends_stream = false;

  void Set(const std::function<void(ScriptedWorker&)>& change);
  size_t Count(const std::string& call);
  size_t num_held();
  void Send(const std::string& transfer_id, uint64_t first_index, uint64_t count,
            v1::SequenceEnd end);
};

// Connects to the workers that it was given, by address; the last one at an address counts.
class ScriptedNetwork {
 public:
  std::shared_ptr<ScriptedWorker> Add(v1::WorkerRole role, uint64_t incarnation,
                                      const std::string& address);
  ClusterView::Connect connect();

 private:
  Mutex mutex_;
  std::vector<std::shared_ptr<ScriptedWorker>> workers_;  // Guarded by mutex_.
};

// Waits, at most ten seconds.
bool Eventually(const std::function<bool()>& holds);

}  // namespace isthmus::router::testing
