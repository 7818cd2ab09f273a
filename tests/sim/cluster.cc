// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/cluster.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace isthmus::sim {
namespace {

// A bound on everything that is awaited besides requests.
constexpr absl::Duration kSettleSlack = absl::Seconds(10);

}  // namespace

Cluster::Cluster(const Scenario& scenario, const router::Acceptor* acceptor, Clock& clock,
                 Journal* journal)
    : scenario_(scenario),
      acceptor_(acceptor),
      clock_(clock),
      journal_(journal),
      watch_([journal](const std::string& text) { journal->Violate(text); }),
      calls_({absl::Milliseconds(50), Scenario::kKeepalive}, clock),
      random_(scenario.seed * 0x9e3779b97f4a7c15 + 7),
      num_router_runs_(static_cast<size_t>(scenario.num_routers), 0) {
  calls_.on_message = [this](const rpc::InProcessMessage& message) { return PassageOf(message); };
  pages_.before_post = [this](const transfer::LoopbackWrite& write) { return FateOf(write); };
  pages_.after_landing = [this](const transfer::LoopbackWrite& write, std::span<std::byte> landed) {
    watch_.NoteLanded(write);
    journal_->Count(write.is_abandoned ? "write landed late" : "write landed");
    MutexLock lock(mutex_);
    if (is_fair_ || landed.empty() || !random_.Chance(scenario_.weather.corrupt_write_share)) {
      return;
    }
    landed[random_.Below(landed.size())] ^= std::byte{4};
    watch_.NoteCorrupted(write);
    journal_->Note("a write is corrupted");
    journal_->Count("write corrupted");
  };
  for (int i = 0; i < scenario_.num_prefill + scenario_.num_decode; ++i) {
    auto slot = std::make_unique<Slot>();
    const bool is_prefill = i < scenario_.num_prefill;
    slot->role = is_prefill ? v1::WORKER_ROLE_PREFILL : v1::WORKER_ROLE_DECODE;
    slot->address = absl::StrCat(is_prefill ? "prefill" : "decode", i, ":1");
    slots_.push_back(std::move(slot));
  }
}

Cluster::~Cluster() {
  for (const auto& slot : slots_) Take(*slot).reset();
  for (int i = 0; i < scenario_.num_routers; ++i) routers_.Put(static_cast<size_t>(i), nullptr);
}

rpc::Passage Cluster::PassageOf(const rpc::InProcessMessage& message) {
  const Weather& weather = scenario_.weather;
  rpc::Passage passage;
  MutexLock lock(mutex_);
  passage.latency = random_.Between(absl::ZeroDuration(), weather.longest_latency);
  if (is_fair_) return passage;
  if (random_.Chance(weather.slow_share)) {
    passage.latency = random_.Between(absl::ZeroDuration(), weather.slow_latency);
  }
  passage.breaks = random_.Chance(weather.break_share);
  if (!message.is_answer && message.method != "Tokens" && random_.Chance(weather.repeat_share)) {
    passage.again_after =
        absl::Milliseconds(1) +
        random_.Between(absl::ZeroDuration(), weather.slow_latency + weather.longest_latency);
  }
  return passage;
}

transfer::LoopbackFate Cluster::FateOf(const transfer::LoopbackWrite& write) {
  watch_.NotePosted(write);
  const Weather& weather = scenario_.weather;
  transfer::LoopbackFate fate;
  MutexLock lock(mutex_);
  fate.latency = random_.Between(absl::ZeroDuration(), weather.longest_write);
  if (is_fair_) return fate;
  if (random_.Chance(weather.slow_write_share)) {
    const absl::Duration patience = write.deadline - write.posted;
    fate.latency = random_.Between(absl::ZeroDuration(), patience + Scenario::kLongestLateness / 2);
  }
  fate.is_lost = random_.Chance(weather.lost_write_share);
  if (random_.Chance(weather.failed_write_share)) {
    fate.error = absl::UnavailableError("the network failed");
  }
  return fate;
}

void Cluster::StartRouter(size_t index) {
  int number = 0;
  {
    MutexLock lock(mutex_);
    number = ++num_router_runs_[index];
  }
  routers_.Put(index, std::make_shared<RouterRun>(absl::StrCat("router", index, ".", number),
                                                  scenario_, acceptor_, &calls_, clock_));
}

void Cluster::StartWorker(Slot& slot) {
  pages_.Mend(slot.address);
  Put(slot, std::make_unique<WorkerRun>(
                slot.address, slot.role,
                Surroundings{&scenario_, &calls_, &pages_, &watch_, &routers_, journal_, &clock_}));
}

std::unique_ptr<WorkerRun> Cluster::Take(Slot& slot) {
  MutexLock lock(mutex_);
  return std::move(slot.run);
}

void Cluster::Put(Slot& slot, std::unique_ptr<WorkerRun> run) {
  MutexLock lock(mutex_);
  slot.run = std::move(run);
}

void Cluster::Start() {
  for (int i = 0; i < scenario_.num_routers; ++i) StartRouter(static_cast<size_t>(i));
  for (const auto& slot : slots_) StartWorker(*slot);
  Await("readiness", kSettleSlack, [this]() -> std::string {
    for (int i = 0; i < scenario_.num_routers; ++i) {
      const absl::Status status = routers_.at(static_cast<size_t>(i))->router().Readiness();
      if (!status.ok()) return status.ToString();
    }
    return "";
  });
}

void Cluster::Await(absl::string_view what, absl::Duration patience,
                    const std::function<std::string()>& problem) {
  const absl::Time deadline = clock_.Now() + patience;
  std::string left = problem();
  while (!left.empty() && clock_.Now() < deadline) {
    clock_.Sleep(absl::Milliseconds(20));
    left = problem();
  }
  if (left.empty()) return;
  journal_->Violate(
      absl::StrCat(what, ": not within ", absl::FormatDuration(patience), ": ", left));
}

void Cluster::Play() {
  std::vector<Thread> threads;
  for (size_t i = 0; i < scenario_.clients.size(); ++i) {
    threads.emplace_back(clock_, [this, i] { Ask(i); });
  }
  for (const Misfortune& misfortune : scenario_.misfortunes) {
    threads.emplace_back(clock_, [this, &misfortune] {
      clock_.Sleep(misfortune.at);
      Suffer(misfortune);
    });
  }
}

Excuses Cluster::ExcusesOf(const ClientPlan& plan) const {
  Excuses excuses;
  excuses.for_faults = !scenario_.is_fair();
  if (scenario_.is_fair() && !scenario_.is_planned) {
    excuses.patience = std::min(excuses.patience, scenario_.LongestWait());
  }
  const auto num_clients = static_cast<int64_t>(scenario_.clients.size());
  const int64_t places =
      scenario_.router.max_active_requests + scenario_.router.max_queued_requests;
  excuses.for_load = excuses.for_faults || num_clients > places * scenario_.num_routers ||
                     plan.read_pause > absl::ZeroDuration() ||
                     scenario_.router.max_behind_messages < 48;
  return excuses;
}

void Cluster::Ask(size_t index) {
  const ClientPlan& plan = scenario_.clients[index];
  clock_.Sleep(plan.arrives_at);
  const auto num_routers = static_cast<size_t>(scenario_.num_routers);
  std::shared_ptr<RouterRun> router = routers_.at(index % num_routers);
  // What stands before several routers does not send requests to one that is not ready.
  if (!router->router().Readiness().ok()) router = routers_.at((index + 1) % num_routers);
  const absl::Status status = RunClient(absl::StrCat("client", index), plan, scenario_,
                                        ExcusesOf(plan), *router, clock_, *journal_);
  if (status.ok()) ++num_replies_;
}

std::string Cluster::OpenEnds() {
  for (const auto& slot : slots_) {
    MutexLock lock(mutex_);
    if (slot->run == nullptr) return absl::StrCat(slot->address, " does not run");
    std::string missing = slot->run->MissingPages();
    if (!missing.empty()) return missing;
  }
  for (int i = 0; i < scenario_.num_routers; ++i) {
    const std::shared_ptr<RouterRun> run = routers_.at(static_cast<size_t>(i));
    if (run->router().num_open() > 0) {
      return absl::StrCat(run->name(), ": ", run->router().num_open(), " requests are open");
    }
    const absl::Status status = run->router().Readiness();
    if (!status.ok()) return absl::StrCat(run->name(), ": ", status.ToString());
    const v1::StatusReply reply = run->router().Status();
    for (const v1::WorkerStatus& worker : reply.workers()) {
      if (worker.requests_in_flight() > 0) {
        return absl::StrCat(run->name(), " has ", worker.requests_in_flight(), " requests at ",
                            worker.address());
      }
    }
  }
  if (pages_.num_under_way() > 0) return "page writes are under way";
  return "";
}

void Cluster::Settle() {
  journal_->Note("the weather is fair");
  is_fair_ = true;
  const worker::WorkerConfig& worker = scenario_.worker;
  Await("settling",
        worker.reservation_lease + worker.quarantine_time + worker.transfer_timeout + kSettleSlack,
        [this] { return OpenEnds(); });
  for (int i = 0; i < scenario_.num_routers; ++i) {
    ClientPlan plan;
    for (int32_t token = 2; token < 16; ++token) plan.prompt.push_back(token + 100 * i);
    plan.max_output_tokens = 5;
    Excuses none;
    none.patience = absl::Seconds(5);
    const absl::Status status = RunClient(absl::StrCat("fresh", i), plan, scenario_, none,
                                          *routers_.at(static_cast<size_t>(i)), clock_, *journal_);
    if (status.ok()) ++num_replies_;
  }
  Await("giving back after the last request", kSettleSlack, [this] { return OpenEnds(); });
  for (const auto& slot : slots_) {
    MutexLock lock(mutex_);
    if (slot->run != nullptr) journal_->Count("preemption", slot->run->num_preemptions());
  }
}

}  // namespace isthmus::sim
