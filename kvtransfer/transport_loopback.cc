// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/transport_loopback.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/fault.h"
#include "services/base/status_macros.h"

namespace isthmus::transfer {
namespace {

absl::Status Unreachable(absl::string_view writer, absl::string_view target) {
  return WithFaultScope(
      absl::UnavailableError(absl::StrCat("loopback: ", writer, " cannot reach ", target)),
      FaultScope::kPeer);
}

}  // namespace

class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(LoopbackNetwork* network, std::string address, Clock& clock)
      : network_(network), address_(std::move(address)), clock_(clock) {}
  ~LoopbackTransport() override;

  absl::string_view name() const override { return "loopback"; }
  std::string lane() const override { return "loopback"; }
  absl::StatusOr<v1::TransferEndpoint> Publish(std::span<const LocalRegion> regions,
                                               const Identity& identity) override;
  absl::Status Poll(absl::Duration timeout) override;
  absl::Status Write(const v1::TransferEndpoint& target, std::span<const PageSpan> spans,
                     absl::Time deadline) override;

 private:
  using Call = LoopbackNetwork::Call;
  absl::Status Post(const LoopbackWrite& write, const std::shared_ptr<Call>& call);
  absl::Status Await(Call& call, absl::Time deadline);

  LoopbackNetwork* const network_;
  const std::string address_;
  Clock& clock_;
  uint32_t generation_ = 0;  // Guarded by the network's lock.
};

LoopbackTransport::~LoopbackTransport() {
  MutexLock lock(network_->mutex_);
  const auto own = network_->owners_.find(address_);
  if (own == network_->owners_.end() || own->second.transport != this) return;
  network_->owners_.erase(own);
  network_->FailCalls(address_, Unreachable("a writer", address_));
}

absl::StatusOr<v1::TransferEndpoint> LoopbackTransport::Publish(
    std::span<const LocalRegion> regions, const Identity& identity) {
  MutexLock lock(network_->mutex_);
  v1::TransferEndpoint endpoint;
  endpoint.set_transport("loopback");
  endpoint.set_address(address_);
  endpoint.set_worker_incarnation(identity.worker_incarnation);
  endpoint.set_layout_fingerprint(identity.layout_fingerprint);
  ++generation_;
  for (size_t i = 0; i < regions.size(); ++i) {
    v1::RegionCard* card = endpoint.add_regions();
    card->set_region(static_cast<uint32_t>(i));
    card->set_generation(generation_);
    card->set_unit_bytes(regions[i].unit_bytes);
    card->set_num_units(regions[i].num_units);
  }
  network_->owners_[address_] = {identity, generation_, {regions.begin(), regions.end()}, this};
  return endpoint;
}

absl::Status LoopbackTransport::Poll(absl::Duration timeout) {
  MutexLock lock(network_->mutex_);
  const absl::Time now = clock_.Now();
  network_->LandDue(now);
  const absl::Duration wait = std::min(timeout, network_->NextDue() - now);
  // Nothing ends it early: what is posted meanwhile is landed by its writer, or the next time.
  clock_.WaitFor(network_->changed_, lock, wait, [] { return false; });
  network_->LandDue(clock_.Now());
  return absl::OkStatus();
}

absl::Status LoopbackTransport::Write(const v1::TransferEndpoint& target,
                                      std::span<const PageSpan> spans, absl::Time deadline) {
  const absl::Time now = clock_.Now();
  const auto call = std::make_shared<Call>();
  call->writer = address_;
  call->target = target.address();
  call->num_left = spans.size();
  LoopbackWrite write = {address_, target.address(), target.worker_incarnation(), {},
                         now,      deadline};
  {
    MutexLock lock(network_->mutex_);
    network_->LandDue(now);
    ISTHMUS_RETURN_IF_ERROR(network_->CheckWrite(address_, target, spans));
    network_->calls_.push_back(call);
    write.call_number = network_->next_call_number_++;
  }
  absl::Status status;
  // Past the deadline nothing is posted.
  for (size_t i = 0; i < spans.size() && now < deadline && status.ok(); ++i) {
    write.span = spans[i];
    status = Post(write, call);
  }
  if (status.ok()) status = Await(*call, deadline);
  MutexLock lock(network_->mutex_);
  call->has_ended = true;
  std::erase(network_->calls_, call);
  return status;
}

absl::Status LoopbackTransport::Post(const LoopbackWrite& write,
                                     const std::shared_ptr<Call>& call) {
  LoopbackFate fate;
  if (network_->before_post) fate = network_->before_post(write);
  ISTHMUS_RETURN_IF_ERROR(fate.error);
  MutexLock lock(network_->mutex_);
  ISTHMUS_RETURN_IF_ERROR(call->failure);
  if (fate.is_lost || network_->cuts_.count(address_) != 0) return absl::OkStatus();
  LoopbackNetwork::Flight flight = {
      write, {write.span.bytes.begin(), write.span.bytes.end()}, call};
  const auto posted = network_->flights_.emplace(write.posted + fate.latency, std::move(flight));
  posted->second.write.span.bytes = posted->second.bytes;
  if (fate.latency <= absl::ZeroDuration()) network_->LandDue(write.posted);
  return absl::OkStatus();
}

absl::Status LoopbackTransport::Await(Call& call, absl::Time deadline) {
  MutexLock lock(network_->mutex_);
  absl::Time now = clock_.Now();
  while (true) {
    network_->LandDue(now);
    ISTHMUS_RETURN_IF_ERROR(call.failure);
    if (call.num_left == 0) return absl::OkStatus();
    if (now >= deadline) {
      return WithFaultScope(absl::DeadlineExceededError(absl::StrCat(
                                "loopback: ", call.num_left,
                                " page spans were not acknowledged by ", call.target, " in time")),
                            FaultScope::kPeer);
    }
    const absl::Time wake = std::min(deadline, network_->NextDue());
    const bool has_ended = clock_.WaitFor(network_->changed_, lock, wake - now, [&call] {
      return call.num_left == 0 || !call.failure.ok();
    });
    // A clock that stands still has waited as long all the same.
    now = has_ended ? clock_.Now() : std::max(wake, clock_.Now());
  }
}

absl::Status LoopbackNetwork::CheckWrite(const std::string& writer,
                                         const v1::TransferEndpoint& target,
                                         std::span<const PageSpan> spans) const {
  for (const std::string& address : {writer, target.address()}) {
    const auto cut = cuts_.find(address);
    if (cut == cuts_.end()) continue;
    if (cut->second == LoopbackCut::kReset) return Unreachable(writer, target.address());
    return absl::OkStatus();  // Nobody answers, not even with a refusal.
  }
  const auto found = owners_.find(target.address());
  if (found == owners_.end()) return Unreachable(writer, target.address());
  const Owner& owner = found->second;
  if (owner.identity.worker_incarnation != target.worker_incarnation()) {
    return WithFaultScope(absl::AbortedError(absl::StrFormat(
                              "worker at %s has incarnation %016x, want %016x", target.address(),
                              owner.identity.worker_incarnation, target.worker_incarnation())),
                          FaultScope::kPeer);
  }
  for (const PageSpan& span : spans) ISTHMUS_RETURN_IF_ERROR(CheckSpan(owner, span));
  return absl::OkStatus();
}

absl::Status LoopbackNetwork::CheckSpan(const Owner& owner, const PageSpan& span) {
  if (span.region_generation != owner.generation) {
    return WithFaultScope(absl::AbortedError(absl::StrCat(
                              "region ", span.region, " has generation ", owner.generation,
                              ", the write names ", span.region_generation)),
                          FaultScope::kPeer);
  }
  if (span.region >= owner.regions.size() || span.unit >= owner.regions[span.region].num_units ||
      span.bytes.size() > owner.regions[span.region].unit_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("page ", span.unit, " of region ", span.region,
                                                   " with ", span.bytes.size(),
                                                   " bytes: the owner has no such page"));
  }
  return absl::OkStatus();
}

void LoopbackNetwork::LandDue(absl::Time now) {
  while (!flights_.empty() && flights_.begin()->first <= now) {
    const auto due = flights_.extract(flights_.begin());
    LandOne(due.mapped());
  }
}

void LoopbackNetwork::LandOne(Flight& flight) {
  LoopbackWrite& write = flight.write;
  const LocalRegion* const region = Destination(flight);
  if (region == nullptr) return;
  std::byte* const to = region->base + write.span.unit * region->unit_bytes;
  if (!flight.bytes.empty()) std::memcpy(to, flight.bytes.data(), flight.bytes.size());
  write.is_abandoned = flight.call->has_ended || !flight.call->failure.ok();
  if (after_landing) after_landing(write, {to, flight.bytes.size()});
  if (--flight.call->num_left == 0) changed_.notify_all();
}

// Null when it cannot land: its key is dead once the process is another one or has published again.
const LocalRegion* LoopbackNetwork::Destination(const Flight& flight) const {
  const LoopbackWrite& write = flight.write;
  const auto found = owners_.find(write.target);
  if (found == owners_.end() || cuts_.count(write.target) != 0) return nullptr;
  const Owner& owner = found->second;
  if (owner.identity.worker_incarnation != write.target_incarnation) return nullptr;
  return CheckSpan(owner, write.span).ok() ? &owner.regions[write.span.region] : nullptr;
}

void LoopbackNetwork::FailCalls(const std::string& address, const absl::Status& failure) {
  for (const std::shared_ptr<Call>& call : calls_) {
    if (call->writer != address && call->target != address) continue;
    if (call->failure.ok()) call->failure = failure;
  }
  changed_.notify_all();
}

absl::Time LoopbackNetwork::NextDue() const {
  return flights_.empty() ? absl::InfiniteFuture() : flights_.begin()->first;
}

void LoopbackNetwork::Cut(const std::string& address, LoopbackCut how) {
  MutexLock lock(mutex_);
  cuts_[address] = how;
  if (how == LoopbackCut::kReset) FailCalls(address, Unreachable("a writer", address));
}

void LoopbackNetwork::Mend(const std::string& address) {
  MutexLock lock(mutex_);
  cuts_.erase(address);
}

void LoopbackNetwork::Land(absl::Time now) {
  MutexLock lock(mutex_);
  LandDue(now);
}

size_t LoopbackNetwork::num_under_way() const {
  MutexLock lock(mutex_);
  return flights_.size();
}

std::unique_ptr<Transport> MakeLoopbackTransport(LoopbackNetwork* network, std::string address,
                                                 Clock& clock) {
  return std::make_unique<LoopbackTransport>(network, std::move(address), clock);
}

}  // namespace isthmus::transfer
