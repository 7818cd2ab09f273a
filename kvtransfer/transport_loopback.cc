// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvtransfer/transport.h"
#include "services/base/fault.h"
#include "services/base/status_macros.h"

namespace isthmus::transfer {
namespace {

class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(LoopbackNetwork* network, std::string address)
      : network_(network), address_(std::move(address)) {}

  absl::string_view name() const override { return "loopback"; }
  std::string lane() const override { return "loopback"; }

  absl::StatusOr<v1::TransferEndpoint> Publish(std::span<const LocalRegion> regions,
                                               const Identity& identity) override {
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
    network_->Put(address_, {identity, generation_, {regions.begin(), regions.end()}});
    return endpoint;
  }

  absl::Status Poll(absl::Duration) override { return absl::OkStatus(); }

  absl::Status Write(const v1::TransferEndpoint& target, std::span<const PageSpan> spans,
                     absl::Time) override {
    ISTHMUS_ASSIGN_OR_RETURN(const LoopbackNetwork::Published owner,
                             network_->Find(target.address()));
    if (owner.identity.worker_incarnation != target.worker_incarnation()) {
      return WithFaultScope(
          absl::AbortedError(absl::StrCat("worker at ", target.address(), " has incarnation ",
                                          owner.identity.worker_incarnation, ", want ",
                                          target.worker_incarnation())),
          FaultScope::kPeer);
    }
    for (const PageSpan& span : spans) {
      if (network_->on_write) ISTHMUS_RETURN_IF_ERROR(network_->on_write(span));
      const LocalRegion& region = owner.regions[span.region];
      std::memcpy(region.base + span.unit * region.unit_bytes, span.bytes.data(),
                  span.bytes.size());
    }
    return absl::OkStatus();
  }

 private:
  LoopbackNetwork* const network_;
  const std::string address_;
  uint32_t generation_ = 0;
};

}  // namespace

void LoopbackNetwork::Put(const std::string& address, Published published) {
  MutexLock lock(mutex_);
  for (auto& [known, value] : published_) {
    if (known != address) continue;
    value = std::move(published);
    return;
  }
  published_.emplace_back(address, std::move(published));
}

absl::StatusOr<LoopbackNetwork::Published> LoopbackNetwork::Find(const std::string& address) const {
  MutexLock lock(mutex_);
  for (const auto& [known, value] : published_) {
    if (known == address) return value;
  }
  return WithFaultScope(
      absl::UnavailableError(absl::StrCat("nobody published memory at ", address)),
      FaultScope::kPeer);
}

std::unique_ptr<Transport> MakeLoopbackTransport(LoopbackNetwork* network, std::string address) {
  return std::make_unique<LoopbackTransport>(network, std::move(address));
}

}  // namespace isthmus::transfer
