// SPDX-License-Identifier: Apache-2.0
#include "router/cluster_view.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/base/log.h"
#include "services/base/version.h"
#include "services/rpc/identity.h"

namespace isthmus::router {
namespace {

constexpr absl::Duration kDescribeTimeout = absl::Seconds(2);
constexpr absl::Duration kStreamTimeout = absl::Seconds(5);
// A worker that is starting is asked more often, so that the cluster is ready soon after it is.
constexpr absl::Duration kEagerInterval = absl::Milliseconds(50);

absl::string_view RoleName(v1::WorkerRole role) {
  return role == v1::WORKER_ROLE_PREFILL ? "prefill" : "decode";
}

// Why a worker that answered cannot be used; empty when it can.
std::string ProblemOf(const v1::WorkerCard& card, v1::WorkerRole role) {
  if (card.protocol_version() != kProtocolVersion) {
    return absl::StrCat("protocol version differs: the worker's is ", card.protocol_version(),
                        ", ours ", kProtocolVersion);
  }
  if (card.role() != role) {
    return absl::StrCat("role differs: the worker's is ", RoleName(card.role()), ", configured is ",
                        RoleName(role));
  }
  return "";
}

}  // namespace

v1::WorkerStatus WorkerLink::status() const {
  MutexLock lock(mutex_);
  v1::WorkerStatus status = status_;
  status.set_address(client_->address());
  if (status.problem().empty() && role_ == v1::WORKER_ROLE_DECODE && !is_stream_open_) {
    status.set_problem("its token stream is not open");
  }
  return status;
}

void WorkerLink::SetDescribed(const absl::StatusOr<v1::DescribeReply>& reply) {
  MutexLock lock(mutex_);
  const bool was_usable = status_.is_reachable() && status_.problem().empty();
  const uint64_t known = status_.card().incarnation();
  if (reply.ok()) {
    status_.set_is_reachable(true);
    status_.set_problem(ProblemOf(reply->card(), role_));
    *status_.mutable_card() = reply->card();
    *status_.mutable_load() = reply->load();
  } else {
    status_.set_is_reachable(false);
    status_.set_problem(std::string(reply.status().message()));
  }
  const bool is_usable = status_.is_reachable() && status_.problem().empty();
  if (was_usable == is_usable && known == status_.card().incarnation()) return;
  LogInfo(
      is_usable ? "a worker can be used" : "a worker cannot be used",
      {{"address", client_->address()}, {"role", RoleName(role_)}, {"problem", status_.problem()}});
}

void WorkerLink::SetStreamOpen(bool is_open) {
  MutexLock lock(mutex_);
  is_stream_open_ = is_open;
}

ClusterView::ClusterView(const RouterConfig& config, Clock& clock)
    : config_(config), clock_(clock), incarnation_(rpc::NewIncarnation()) {
  for (const std::string& address : config.prefill_workers) {
    links_.push_back(
        std::make_shared<WorkerLink>(rpc::ConnectWorker(address), v1::WORKER_ROLE_PREFILL));
  }
  for (const std::string& address : config.decode_workers) {
    links_.push_back(
        std::make_shared<WorkerLink>(rpc::ConnectWorker(address), v1::WORKER_ROLE_DECODE));
  }
}

ClusterView::~ClusterView() { Stop(); }

void ClusterView::Start() {
  for (const std::shared_ptr<WorkerLink>& link : links_) {
    threads_.emplace_back([this, link] { Watch(*link); });
    if (link->role() != v1::WORKER_ROLE_DECODE) continue;
    threads_.emplace_back([this, link] { ReadTokens(*link); });
  }
}

void ClusterView::Stop() {
  {
    MutexLock lock(mutex_);
    stops_ = true;
  }
  stopped_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ClusterView::WaitOrStop(absl::Duration duration) {
  MutexLock lock(mutex_);
  stopped_.wait_for(lock, absl::ToChronoMilliseconds(duration), [this] { return stops_.load(); });
}

void ClusterView::Watch(WorkerLink& link) {
  while (!stops_) {
    const auto reply = link.client().Describe({kDescribeTimeout, [this] { return stops_.load(); }});
    if (stops_) return;
    link.SetDescribed(reply);
    WaitOrStop(reply.ok() ? config_.poll_interval
                          : std::min(kEagerInterval, config_.poll_interval));
  }
}

void ClusterView::ReadTokens(WorkerLink& link) {
  absl::Status last;
  while (!stops_) {
    const v1::WorkerStatus known = link.status();
    if (!known.is_reachable()) {
      WaitOrStop(kEagerInterval);
      continue;
    }
    v1::TokensHello hello;
    hello.set_router_incarnation(incarnation_);
    hello.set_worker_incarnation(known.card().incarnation());
    bool was_open = false;
    const absl::Status status = link.client().ReadTokens(
        hello, {kStreamTimeout, [this] { return stops_.load(); }},
        [&] {
          was_open = true;
          link.SetStreamOpen(true);
        },
        [&link](const v1::StepTokens& step) { link.relay().Deliver(step); });
    link.SetStreamOpen(false);
    link.relay().FailAll(status);
    if (stops_) return;
    // A worker that refuses the stream, of another role for example, is said once, not at every
    // try.
    if (was_open || status != last) {
      LogWarning("a token stream ended",
                 {{"address", link.client().address()}, {"status", status.ToString()}});
    }
    last = status;
    WaitOrStop(kEagerInterval);
  }
}

}  // namespace isthmus::router
