// SPDX-License-Identifier: Apache-2.0
// What a scenario does to a cluster.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster.h"

namespace isthmus::sim {

void Cluster::Suffer(const Misfortune& misfortune) {
  Slot& slot = *slots_[static_cast<size_t>(misfortune.worker)];
  journal_->Note(absl::StrCat(MisfortuneName(misfortune.kind), ": ", slot.address, ", router ",
                              misfortune.router));
  switch (misfortune.kind) {
    case MisfortuneKind::kKill:
    case MisfortuneKind::kPowerOff:
      return Kill(slot, misfortune);
    case MisfortuneKind::kDrain:
      return Drain(slot, misfortune);
    case MisfortuneKind::kResetCalls:
    case MisfortuneKind::kSilentCalls:
      return CutCalls(slot, misfortune);
    case MisfortuneKind::kResetPages:
    case MisfortuneKind::kSilentPages:
      return CutPages(slot, misfortune);
    case MisfortuneKind::kLoseRegistration: {
      MutexLock lock(mutex_);
      if (slot.run != nullptr) slot.run->LoseRegistrations();
      return;
    }
    case MisfortuneKind::kRestartRouter:
    case MisfortuneKind::kDrainRouter:
      return RestartRouter(misfortune);
  }
}

void Cluster::Kill(Slot& slot, const Misfortune& misfortune) {
  std::unique_ptr<WorkerRun> run = Take(slot);
  if (run == nullptr) return;  // Somebody else is at it.
  const bool is_silent = misfortune.kind == MisfortuneKind::kPowerOff;
  pages_.Cut(slot.address,
             is_silent ? transfer::LoopbackCut::kSilent : transfer::LoopbackCut::kReset);
  const auto set_links = [&](rpc::LinkState state) {
    for (int i = 0; i < scenario_.num_routers; ++i) {
      calls_.SetLink(routers_.at(static_cast<size_t>(i))->name(), slot.address, state);
    }
  };
  set_links(is_silent ? rpc::LinkState::kSilent : rpc::LinkState::kReset);
  if (is_silent) clock_.Sleep(misfortune.lasts);
  run->Stop();
  run.reset();
  if (!is_silent) clock_.Sleep(misfortune.lasts);
  set_links(rpc::LinkState::kUp);
  StartWorker(slot);
}

void Cluster::Drain(Slot& slot, const Misfortune& misfortune) {
  v1::DrainTarget target;
  target.set_address(slot.address);
  target.set_reason("an operator asked");
  absl::StatusOr<v1::DrainReply> reply = absl::UnavailableError("not asked yet");
  // Where nobody may notice, an operator who got no answer, since the router was restarted, asks
  // again.
  for (int i = 0; !reply.ok() && i < (scenario_.is_fair() ? 50 : 1); ++i) {
    if (i > 0) clock_.Sleep(absl::Milliseconds(100));
    const auto router = routers_.at(static_cast<size_t>(misfortune.router));
    reply = router->router().Drain(target, absl::Seconds(60));
  }
  journal_->Note(absl::StrCat(slot.address, " has drained: ", reply.status().ToString(), ", ",
                              reply.ok() ? reply->transfers() : 0, " transfers left"));
  std::unique_ptr<WorkerRun> run = Take(slot);
  if (run == nullptr) return;
  run->Stop(absl::Seconds(1));
  run.reset();
  clock_.Sleep(misfortune.lasts);
  StartWorker(slot);
}

void Cluster::RestartRouter(const Misfortune& misfortune) {
  const auto index = static_cast<size_t>(misfortune.router);
  {
    const std::shared_ptr<RouterRun> run = routers_.at(index);
    if (misfortune.kind == MisfortuneKind::kDrainRouter) {
      const auto reply = run->router().Drain({}, Scenario::kRequestTimeout);
      journal_->Note(absl::StrCat(run->name(), " has drained, ", reply->transfers(), " are left"));
      if (scenario_.is_fair() && reply->transfers() > 0) {
        journal_->Violate(absl::StrCat(run->name(), " could not drain"));
      }
    }
    if (run->is_down()) return;  // Somebody else is at it.
    run->SetDown();
    for (const auto& slot : slots_) {
      calls_.SetLink(run->name(), slot->address, rpc::LinkState::kReset);
    }
  }
  clock_.Sleep(misfortune.lasts / 10);
  StartRouter(index);
}

void Cluster::CutCalls(Slot& slot, const Misfortune& misfortune) {
  const std::string router = routers_.at(static_cast<size_t>(misfortune.router))->name();
  const bool is_silent = misfortune.kind == MisfortuneKind::kSilentCalls;
  calls_.SetLink(router, slot.address,
                 is_silent ? rpc::LinkState::kSilent : rpc::LinkState::kReset);
  clock_.Sleep(is_silent ? misfortune.lasts : misfortune.lasts / 10);
  if (!routers_.at(static_cast<size_t>(misfortune.router))->is_down()) {
    calls_.SetLink(router, slot.address, rpc::LinkState::kUp);
  }
}

void Cluster::CutPages(Slot& slot, const Misfortune& misfortune) {
  const bool is_silent = misfortune.kind == MisfortuneKind::kSilentPages;
  pages_.Cut(slot.address,
             is_silent ? transfer::LoopbackCut::kSilent : transfer::LoopbackCut::kReset);
  clock_.Sleep(misfortune.lasts);
  pages_.Mend(slot.address);
}

}  // namespace isthmus::sim
