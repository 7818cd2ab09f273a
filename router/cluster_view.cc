// SPDX-License-Identifier: Apache-2.0
#include "router/cluster_view.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/fault.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/base/version.h"
#include "services/rpc/channel.h"
#include "services/rpc/identity.h"
#include "services/rpc/wire.h"

namespace isthmus::router {
namespace {

// For opening a token stream, not for reading it.
constexpr absl::Duration kOpenTimeout = absl::Seconds(5);
constexpr absl::Duration kReopenPause = absl::Milliseconds(50);
// How long, and how many, workers are shown that are lost or refused.
constexpr absl::Duration kRemembrance = absl::Minutes(1);
constexpr size_t kMaxRemembered = 64;

}  // namespace

ClusterView::ClusterView(const RouterConfig& config, Connect connect, Clock& clock)
    : config_(config),
      connect_(std::move(connect)),
      clock_(clock),
      incarnation_(rpc::NewIncarnation()) {}

ClusterView::~ClusterView() { Stop(); }

void ClusterView::Stop() {
  std::vector<TokenReader> readers;
  {
    MutexLock lock(mutex_);
    stops_ = true;
    readers.swap(readers_);
  }
  stopped_.notify_all();
}

void ClusterView::OnChange(std::function<void()> on_change) {
  MutexLock lock(change_mutex_);
  on_change_ = std::move(on_change);
}

void ClusterView::Changed() {
  MutexLock lock(change_mutex_);
  if (on_change_) on_change_();
}

v1::Registered ClusterView::Welcome() const {
  v1::Registered welcome;
  welcome.set_router_incarnation(incarnation_);
  rpc::ToWire(config_.load_interval, welcome.mutable_load_interval());
  rpc::ToWire(config_.heartbeat_interval, welcome.mutable_heartbeat_interval());
  return welcome;
}

absl::Status ClusterView::CheckConfig(const RouterConfig& config) {
  if (config.load_interval > config.heartbeat_interval) {
    return absl::InvalidArgumentError(
        absl::StrCat("registration.load_interval: is ", absl::FormatDuration(config.load_interval),
                     ", want at most registration.heartbeat_interval, ",
                     absl::FormatDuration(config.heartbeat_interval)));
  }
  if (config.lease < 2 * config.heartbeat_interval) {
    return absl::InvalidArgumentError(
        absl::StrCat("registration.lease: is ", absl::FormatDuration(config.lease),
                     ", want at least twice registration.heartbeat_interval, ",
                     absl::FormatDuration(config.heartbeat_interval)));
  }
  return absl::OkStatus();
}

absl::Status ClusterView::CheckCard(const v1::WorkerCard& card) const {
  if (card.incarnation() == 0) return absl::InvalidArgumentError("card.incarnation: is 0");
  if (card.role() != v1::WORKER_ROLE_PREFILL && card.role() != v1::WORKER_ROLE_DECODE) {
    return absl::InvalidArgumentError(absl::StrCat("card.role: is ", card.role(), ", want ",
                                                   v1::WORKER_ROLE_PREFILL, " (prefill) or ",
                                                   v1::WORKER_ROLE_DECODE, " (decode)"));
  }
  if (!rpc::IsHostPort(card.address())) {
    return absl::InvalidArgumentError(
        absl::StrCat("card.address: is \"", card.address(), "\", want host:port"));
  }
  if (card.protocol_version() != kProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrCat("protocol version differs: the worker's is ",
                                                      card.protocol_version(), ", the router's ",
                                                      kProtocolVersion));
  }
  return absl::OkStatus();
}

absl::Status ClusterView::CheckAgainstLocked(const v1::WorkerCard& card) const {
  int num_registered = 0;
  for (const std::shared_ptr<WorkerLink>& link : links_) {
    // Its successor at the same address need not match it.
    if (link->address() == card.address() || !link->is_registered()) continue;
    ++num_registered;
    if (link->is_silent()) continue;
    ISTHMUS_RETURN_IF_ERROR(CheckMatch(
        card, "this worker's", link->card(),
        absl::StrCat("that of ", rpc::RoleName(link->role()), " worker ", link->address())));
  }
  if (num_registered < config_.max_workers) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(num_registered, " workers are registered, want at most ", config_.max_workers));
}

void ClusterView::ForgetLocked() {
  const absl::Time now = clock_.Now();
  while (!refusals_.empty() &&
         (refusals_.front().at < now - kRemembrance || refusals_.size() > kMaxRemembered)) {
    refusals_.pop_front();
  }
  size_t num_lost = 0;
  for (const std::shared_ptr<WorkerLink>& link : links_) num_lost += link->is_registered() ? 0 : 1;
  std::erase_if(links_, [&](const std::shared_ptr<WorkerLink>& link) {
    if (link->is_registered()) return false;
    const bool is_read = std::any_of(readers_.begin(), readers_.end(),
                                     [&](const TokenReader& r) { return r.link == link; });
    const bool is_recent = !link->has_left() && link->lost_at() > now - kRemembrance;
    if (is_read || (is_recent && num_lost <= kMaxRemembered)) return false;
    --num_lost;
    return true;
  });
}

absl::StatusOr<std::shared_ptr<WorkerLink>> ClusterView::Admit(const v1::WorkerCard& card,
                                                               uint64_t serial) {
  std::shared_ptr<WorkerLink> link =
      std::make_shared<WorkerLink>(connect_(card.address()), card, config_.lease, clock_);
  Links replaced;
  {
    MutexLock lock(mutex_);
    if (stops_) return absl::UnavailableError("the router stops");
    ForgetLocked();
    const auto same = std::find_if(links_.begin(), links_.end(), [&card](const auto& known) {
      return known->incarnation() == card.incarnation();
    });
    if (same != links_.end() && (*same)->is_registered() && !(*same)->is_silent()) {
      return absl::AlreadyExistsError(
          absl::StrFormat("the worker of incarnation %016x has a stream", card.incarnation()));
    }
    ISTHMUS_RETURN_IF_ERROR(CheckAgainstLocked(card));
    std::erase_if(refusals_,
                  [&card](const Refusal& r) { return r.status.address() == card.address(); });
    if (same != links_.end() && (*same)->address() == card.address()) {
      link = *same;  // Back again: the requests that it has go on.
    } else {
      std::erase_if(links_, [&](const std::shared_ptr<WorkerLink>& known) {
        const bool is_former =
            known->address() == card.address() || known->incarnation() == card.incarnation();
        if (is_former) replaced.push_back(known);
        return is_former;
      });
      links_.push_back(link);
    }
    link->SetRegistered(serial);
  }
  for (const std::shared_ptr<WorkerLink>& former : replaced) {
    LogWarning("a worker was replaced by another run",
               {{"address", former->address()},
                {"former", absl::StrFormat("%016x", former->incarnation())},
                {"incarnation", absl::StrFormat("%016x", card.incarnation())}});
    former->SetReplaced();
  }
  return link;
}

absl::StatusOr<std::unique_ptr<ClusterView::Registration>> ClusterView::Register(
    const v1::WorkerCard& card) {
  uint64_t serial = 0;
  {
    MutexLock lock(mutex_);
    serial = next_serial_++;
  }
  const absl::Status checked = CheckCard(card);
  absl::StatusOr<std::shared_ptr<WorkerLink>> link = checked.ok() ? Admit(card, serial) : checked;
  if (!link.ok()) {
    NoteRefusal(card, link.status());
    return link.status();
  }
  LogInfo("a worker has registered", {{"address", card.address()},
                                      {"role", rpc::RoleName(card.role())},
                                      {"incarnation", absl::StrFormat("%016x", card.incarnation())},
                                      {"lane", card.transfer_lane()}});
  if (card.role() == v1::WORKER_ROLE_DECODE) StartReader(*link);
  Changed();
  return std::make_unique<Registration>(this, *std::move(link), serial);
}

void ClusterView::NoteRefusal(const v1::WorkerCard& card, const absl::Status& status) {
  if (absl::IsAlreadyExists(status)) return;
  Refusal refusal;
  refusal.status.set_address(card.address());
  refusal.status.set_state(v1::WORKER_STATE_REFUSED);
  refusal.status.set_problem(absl::StrCat("refused: ", status.message()));
  *refusal.status.mutable_card() = card;
  refusal.at = clock_.Now();
  bool is_known = false;
  {
    MutexLock lock(mutex_);
    std::erase_if(refusals_, [&](const Refusal& r) {
      if (r.status.address() != card.address()) return false;
      is_known = is_known || r.status.problem() == refusal.status.problem();
      return true;
    });
    refusals_.push_back(refusal);
    ForgetLocked();
  }
  if (is_known) return;
  LogWarning("a worker was refused", {{"address", card.address()},
                                      {"role", rpc::RoleName(card.role())},
                                      {"status", status.ToString()}});
}

ClusterView::Registration::~Registration() {
  link_->SetLost(serial_, "its registration stream has ended");
  if (!link_->is_replaced() && !link_->is_registered()) {
    Log(link_->has_left() ? LogLevel::kInfo : LogLevel::kWarning,
        link_->has_left() ? "a drained worker has left" : "a worker's registration has ended",
        {{"address", link_->address()}, {"role", rpc::RoleName(link_->role())}});
  }
  view_->Changed();
}

bool ClusterView::Registration::Report(const v1::WorkerLoad& load) {
  if (!link_->SetLoad(serial_, load)) return false;
  view_->Changed();
  return true;
}

bool ClusterView::Registration::SetDraining(const std::string& reason) {
  if (!link_->SetDraining(serial_, reason)) return false;
  LogInfo("a worker drains", {{"address", link_->address()}, {"reason", reason}});
  view_->Changed();
  return true;
}

Links ClusterView::links() const {
  MutexLock lock(mutex_);
  return links_;
}

std::vector<v1::WorkerStatus> ClusterView::Statuses() const {
  std::vector<v1::WorkerStatus> statuses;
  const absl::Time now = clock_.Now();
  MutexLock lock(mutex_);
  for (const std::shared_ptr<WorkerLink>& link : links_) {
    if (link->has_left() || link->lost_at() <= now - kRemembrance) continue;
    statuses.push_back(link->status());
  }
  for (const Refusal& refusal : refusals_) {
    if (refusal.at > now - kRemembrance) statuses.push_back(refusal.status);
  }
  return statuses;
}

std::shared_ptr<WorkerLink> ClusterView::Find(const std::string& address) const {
  MutexLock lock(mutex_);
  for (const std::shared_ptr<WorkerLink>& link : links_) {
    if (link->address() == address && link->is_registered()) return link;
  }
  return nullptr;
}

void ClusterView::StartReader(const std::shared_ptr<WorkerLink>& link) {
  std::vector<TokenReader> ended;  // Joined when no lock is held.
  MutexLock lock(mutex_);
  if (stops_) return;
  for (const TokenReader& reader : readers_) {
    if (reader.link == link) return;
  }
  const auto first_ended = std::stable_partition(
      readers_.begin(), readers_.end(), [](const TokenReader& r) { return r.link != nullptr; });
  std::move(first_ended, readers_.end(), std::back_inserter(ended));
  readers_.erase(first_ended, readers_.end());
  readers_.push_back({link, Thread(clock_, [this, link] { ReadTokens(link); })});
}

void ClusterView::ReadTokens(const std::shared_ptr<WorkerLink>& link) {
  absl::Status last;
  do {
    // Of a worker that is not heard of there is nothing to read.
    if (!link->Standing().ok()) continue;
    v1::TokensHello hello;
    hello.set_router_incarnation(incarnation_);
    hello.set_worker_incarnation(link->incarnation());
    bool was_open = false;
    absl::Status status = link->client().ReadTokens(
        hello, {kOpenTimeout, [&] { return stops_ || !link->Standing().ok(); }},
        [&] {
          was_open = true;
          link->SetTokensOpen(true);
          Changed();
        },
        [&link](const v1::StepTokens& step) {
          link->NoteTokens();
          link->relay().Deliver(step);
        });
    link->SetTokensOpen(false);
    if (const absl::Status standing = link->Standing(); !standing.ok()) status = standing;
    // Only we may say that a request is cancelled; a worker that stops cancels its streams.
    status = absl::Status(
        absl::IsCancelled(status) ? absl::StatusCode::kUnavailable : status.code(),
        absl::StrCat("the decode worker's token stream has ended: ", status.message()));
    link->relay().FailAll(WithFaultScope(status, FaultScope::kPeer));
    // A worker that refuses the stream is said once, not at every try.
    if (!stops_ && (was_open || status != last)) {
      LogWarning("a token stream ended",
                 {{"address", link->address()}, {"status", status.ToString()}});
    }
    last = status;
  } while (!EndsReader(*link));
}

bool ClusterView::EndsReader(const WorkerLink& link) {
  MutexLock lock(mutex_);
  clock_.WaitFor(stopped_, lock, kReopenPause, [this] { return stops_.load(); });
  if (!stops_ && !link.is_replaced() && link.is_registered()) return false;
  for (TokenReader& reader : readers_) {
    if (reader.link.get() == &link) reader.link = nullptr;
  }
  return true;
}

}  // namespace isthmus::router
