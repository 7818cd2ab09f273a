// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/cluster.h"

#include <signal.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace isthmus::testing {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(5);
constexpr absl::Duration kDescribePatience = absl::Seconds(1);
constexpr absl::Duration kStatusPatience = absl::Seconds(5);

const char* BinaryOf(Role role) {
  switch (role) {
    case Role::kRouter:
      return ISTHMUS_ROUTER_BINARY;
    case Role::kPrefill:
      return ISTHMUS_PREFILL_BINARY;
    case Role::kDecode:
      return ISTHMUS_DECODE_BINARY;
  }
  return "";
}

Assignments operator+(Assignments left, const Assignments& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

// What is not free; empty when all is.
std::string TakenOf(const v1::WorkerLoad& load) {
  const bool is_free = load.free_pages() == load.total_pages() && load.total_pages() > 0 &&
                       load.free_state_slots() == load.total_state_slots() &&
                       load.active_sequences() == 0 && load.queued_sequences() == 0 &&
                       load.transfers() == 0 && load.quarantined_pages() == 0;
  return is_free ? "" : load.ShortDebugString();
}

}  // namespace

std::string BundledCheckpoint() { return ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall"; }

const char* RoleName(Role role) {
  switch (role) {
    case Role::kRouter:
      return "router";
    case Role::kPrefill:
      return "prefill";
    case Role::kDecode:
      return "decode";
  }
  return "";
}

bool WaitUntil(absl::Duration patience, const std::function<bool()>& is_true) {
  const absl::Time deadline = absl::Now() + patience;
  while (!is_true()) {
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(kPoll);
  }
  return true;
}

Member::Member(Role role, std::string name, std::string folder, Assignments assignments)
    : role_(role),
      name_(std::move(name)),
      folder_(std::move(folder)),
      assignments_(std::move(assignments)) {
  Start();
}

void Member::Start() {
  Assignments assignments = assignments_;
  if (num_starts_ > 0) assignments.push_back("listen=" + address_);
  const std::string run = num_starts_ == 0 ? name_ : absl::StrCat(name_, "-", num_starts_);
  ++num_starts_;
  program_ = std::make_unique<ServerProgram>(BinaryOf(role_), run, folder_, assignments);
  const std::string address = program_->WaitForAddress(kStartPatience);
  EXPECT_NE(address, "") << run << " does not start:\n" << program_->Log();
  EXPECT_TRUE(address_.empty() || address == address_) << address << ", want " << address_;
  address_ = address;
  if (role_ != Role::kRouter) client_ = rpc::ConnectWorker(address_);
}

void Member::Kill() {
  program_->Signal(SIGKILL);
  EXPECT_EQ(program_->WaitForExit(absl::Seconds(10)), 128 + SIGKILL) << program_->Log();
}

void Member::Restart() {
  EXPECT_TRUE(program_->WaitForExit(absl::ZeroDuration()).has_value()) << name_ << " still runs";
  Start();
}

absl::StatusOr<v1::DescribeReply> Member::Describe() {
  if (program_->WaitForExit(absl::ZeroDuration()).has_value()) {
    return absl::UnavailableError(name_ + " has ended");
  }
  return client_->Describe({kDescribePatience, {}});
}

v1::WorkerLoad Member::Load() {
  const auto described = Describe();
  return described.ok() ? described->load() : v1::WorkerLoad();
}

Cluster::Cluster(ClusterOptions options) : options_(std::move(options)) {
  router_ = Make(Role::kRouter, "router", {});
  client_ = std::make_unique<rpc::RouterClient>(router_->address());
  for (int i = 0; i < options_.num_prefill; ++i) Add(Role::kPrefill, {});
  for (int i = 0; i < options_.num_decode; ++i) Add(Role::kDecode, {});
}

std::unique_ptr<Member> Cluster::Make(Role role, const std::string& name,
                                      const Assignments& assignments) {
  Assignments all = {"checkpoint=" + BundledCheckpoint()};
  if (role == Role::kRouter) {
    all = all + options_.router;
  } else {
    all = all + Assignments{"routers=" + router_->address()} + options_.workers +
          (role == Role::kPrefill ? options_.prefill : options_.decode);
  }
  return std::make_unique<Member>(role, name, folder_.path(), all + assignments);
}

Member& Cluster::Add(Role role, const Assignments& assignments) {
  auto& list = role == Role::kPrefill ? prefill_ : decode_;
  list.push_back(Make(role, absl::StrCat(RoleName(role), list.size()), assignments));
  return *list.back();
}

Member& Cluster::member(Role role) {
  if (role == Role::kRouter) return *router_;
  return role == Role::kPrefill ? *prefill_[0] : *decode_[0];
}

std::vector<Member*> Cluster::workers() {
  std::vector<Member*> all;
  for (const auto& member : prefill_) all.push_back(member.get());
  for (const auto& member : decode_) all.push_back(member.get());
  return all;
}

::testing::AssertionResult Cluster::WaitUntilReady(size_t num_workers) {
  if (num_workers == 0) num_workers = prefill_.size() + decode_.size();
  std::string reason;
  const bool is_ready = WaitUntil(kStartPatience, [&] {
    const auto status = client_->Status(kStatusPatience);
    if (!status.ok()) {
      reason = status.status().ToString();
      return false;
    }
    size_t usable = 0;
    for (const v1::WorkerStatus& worker : status->workers()) usable += worker.problem().empty();
    reason = absl::StrCat(status->not_ready_reason(), "; ", usable, " workers are usable, want ",
                          num_workers, "\n", status->DebugString());
    return status->is_ready() && usable == num_workers;
  });
  if (is_ready) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "not ready: " << reason << "\n" << Logs();
}

::testing::AssertionResult Cluster::WaitUntilFree(absl::Duration patience) {
  std::string taken;
  const bool is_free = WaitUntil(patience, [&] {
    taken.clear();
    for (Member* worker : workers()) {
      const auto described = worker->Describe();
      // A dead one has nothing; one that lives and does not answer is no proof of anything.
      if (worker->program().WaitForExit(absl::ZeroDuration()).has_value()) continue;
      const std::string of_worker =
          described.ok() ? TakenOf(described->load()) : described.status().ToString();
      if (!of_worker.empty()) absl::StrAppend(&taken, worker->address(), ": ", of_worker, "\n");
    }
    if (router_->program().WaitForExit(absl::ZeroDuration()).has_value()) return taken.empty();
    const auto status = client_->Status(kStatusPatience);
    if (!status.ok() || status->active_requests() + status->queued_requests() > 0) {
      absl::StrAppend(&taken, "router: ",
                      status.ok() ? status->ShortDebugString() : status.status().ToString());
    }
    return taken.empty();
  });
  if (is_free) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "still taken: " << taken << "\n" << Logs();
}

::testing::AssertionResult Cluster::WaitForProblem(const std::string& text) {
  std::string problems;
  const bool was_found = WaitUntil(kStartPatience, [&] {
    problems.clear();
    const auto status = client_->Status(kStatusPatience);
    if (!status.ok()) return false;
    for (const v1::WorkerStatus& worker : status->workers()) {
      absl::StrAppend(&problems, worker.address(), ": ", worker.problem(), "\n");
    }
    return absl::StrContains(problems, text);
  });
  if (was_found) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "no worker has the problem \"" << text << "\" but\n"
                                       << problems << Logs();
}

std::string Cluster::Logs() {
  std::string logs = "--- router\n" + router_->program().Log();
  for (Member* worker : workers()) {
    absl::StrAppend(&logs, "--- ", RoleName(worker->role()), " ", worker->address(), "\n",
                    worker->program().Log());
  }
  return logs;
}

}  // namespace isthmus::testing
