// SPDX-License-Identifier: Apache-2.0
#include "router/worker_link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/fault.h"

namespace isthmus::router {

WorkerLink::WorkerLink(std::unique_ptr<rpc::WorkerClient> client, v1::WorkerCard card,
                       absl::Duration lease, Clock& clock)
    : client_(std::move(client)),
      card_(std::move(card)),
      lease_(lease),
      clock_(clock),
      heard_at_(absl::ToUnixNanos(clock.Now())),
      lost_at_(absl::InfiniteFuture()),
      load_at_(clock.Now()) {}

bool WorkerLink::is_silent() const {
  return clock_.Now() - absl::FromUnixNanos(heard_at_) > lease_;
}

v1::WorkerState WorkerLink::StateLocked(std::string* problem) const {
  if (is_replaced_) {
    *problem = "suspect: another run of the worker has its address";
    return v1::WORKER_STATE_SUSPECT;
  }
  if (serial_ == 0) {
    *problem = absl::StrCat("suspect: ", lost_reason_);
    return v1::WORKER_STATE_SUSPECT;
  }
  if (is_silent()) {
    *problem = absl::StrCat("suspect: silent for more than ", absl::FormatDuration(lease_));
    return v1::WORKER_STATE_SUSPECT;
  }
  if (is_draining_) {
    *problem = absl::StrCat("draining: ", drain_reason_);
    return v1::WORKER_STATE_DRAINING;
  }
  if (role() == v1::WORKER_ROLE_DECODE && !are_tokens_open_) {
    *problem = "suspect: its token stream is not open";
    return v1::WORKER_STATE_SUSPECT;
  }
  if (!failure_.empty()) {
    *problem = absl::StrCat("suspect until its next report: ", failure_);
    return v1::WORKER_STATE_SUSPECT;
  }
  problem->clear();
  return v1::WORKER_STATE_READY;
}

v1::WorkerState WorkerLink::state() const {
  std::string problem;
  MutexLock lock(mutex_);
  return StateLocked(&problem);
}

std::string WorkerLink::problem() const {
  std::string problem;
  MutexLock lock(mutex_);
  StateLocked(&problem);
  return problem;
}

bool WorkerLink::is_recovering() const {
  std::string problem;
  MutexLock lock(mutex_);
  return StateLocked(&problem) == v1::WORKER_STATE_SUSPECT && serial_ != 0 && !is_draining_ &&
         !is_replaced_ && !is_silent();
}

v1::WorkerStatus WorkerLink::status() const {
  v1::WorkerStatus status;
  std::string problem;
  MutexLock lock(mutex_);
  status.set_state(StateLocked(&problem));
  status.set_address(card_.address());
  status.set_is_reachable(serial_ != 0);
  status.set_problem(std::move(problem));
  *status.mutable_card() = card_;
  *status.mutable_load() = load_.reported;
  status.set_load_age_seconds(absl::ToDoubleSeconds(clock_.Now() - load_at_));
  status.set_requests_in_flight(load_.requests_in_flight);
  return status;
}

LinkLoad WorkerLink::load() const {
  MutexLock lock(mutex_);
  return load_;
}

absl::Status WorkerLink::Standing() const {
  if (!is_replaced_ && !is_silent()) return absl::OkStatus();
  const std::string text = is_replaced_ ? "another run of the worker has its address"
                                        : absl::StrCat("the worker was silent for more than ",
                                                       absl::FormatDuration(lease_));
  return WithFaultScope(absl::UnavailableError(absl::StrCat(address(), ": ", text)),
                        FaultScope::kPeer);
}

absl::Time WorkerLink::lost_at() const {
  MutexLock lock(mutex_);
  return lost_at_;
}

bool WorkerLink::is_registered() const {
  MutexLock lock(mutex_);
  return serial_ != 0;
}

bool WorkerLink::has_left() const {
  MutexLock lock(mutex_);
  return serial_ == 0 && is_draining_;
}

void WorkerLink::SetRegistered(uint64_t serial) {
  heard_at_ = absl::ToUnixNanos(clock_.Now());
  MutexLock lock(mutex_);
  serial_ = serial;
  lost_at_ = absl::InfiniteFuture();
  failure_.clear();  // But a run that drains never takes work again.
}

bool WorkerLink::SetLoad(uint64_t serial, const v1::WorkerLoad& load) {
  MutexLock lock(mutex_);
  if (serial != serial_ || is_replaced_) return false;
  load_at_ = clock_.Now();
  heard_at_ = absl::ToUnixNanos(load_at_);
  load_.reported = load;
  load_.requests_since_report = 0;
  load_.prompt_tokens_since_report = 0;
  failure_.clear();
  return true;
}

bool WorkerLink::SetDraining(uint64_t serial, const std::string& reason) {
  MutexLock lock(mutex_);
  if (serial != serial_ || is_replaced_) return false;
  heard_at_ = absl::ToUnixNanos(clock_.Now());
  is_draining_ = true;
  drain_reason_ = reason;
  return true;
}

void WorkerLink::SetLost(uint64_t serial, const std::string& reason) {
  MutexLock lock(mutex_);
  if (serial != serial_) return;
  serial_ = 0;
  lost_reason_ = reason;
  lost_at_ = clock_.Now();
}

void WorkerLink::SetReplaced() {
  is_replaced_ = true;
  relay_.FailAll(Standing());
  MutexLock lock(mutex_);
  lost_at_ = std::min(lost_at_, clock_.Now());
}

void WorkerLink::SetFailed(const absl::Status& status) {
  MutexLock lock(mutex_);
  failure_ = std::string(status.message());
}

void WorkerLink::SetTokensOpen(bool is_open) {
  MutexLock lock(mutex_);
  are_tokens_open_ = is_open;
}

void WorkerLink::NoteTokens() { heard_at_ = absl::ToUnixNanos(clock_.Now()); }

Charge::Charge(std::shared_ptr<WorkerLink> link, uint64_t prompt_tokens)
    : link_(std::move(link)), prompt_tokens_(prompt_tokens) {
  MutexLock lock(link_->mutex_);
  LinkLoad& load = link_->load_;
  load.requests_in_flight += 1;
  load.requests_since_report += 1;
  load.prompt_tokens_in_flight += prompt_tokens_;
  load.prompt_tokens_since_report += prompt_tokens_;
}

void Charge::Release() {
  if (link_ == nullptr) return;
  {
    MutexLock lock(link_->mutex_);
    LinkLoad& load = link_->load_;
    load.requests_in_flight -= 1;
    load.prompt_tokens_in_flight -= prompt_tokens_;
  }
  link_.reset();
}

}  // namespace isthmus::router
