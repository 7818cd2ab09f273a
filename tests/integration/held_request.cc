// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/held_request.h"

#include <signal.h>

#include <algorithm>

#include "absl/time/clock.h"
#include "services/model/scripted_forward.h"

namespace isthmus::testing {
namespace {

constexpr size_t kPromptTokens = 400;
constexpr uint32_t kOutputTokens = 40;
constexpr absl::Duration kPhasePatience = absl::Seconds(10);
// From a router that runs again to a call of its that has been sent.
constexpr absl::Duration kSendTime = absl::Milliseconds(150);

}  // namespace

const char* PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kQueued:
      return "Queued";
    case Phase::kPrefill:
      return "Prefill";
    case Phase::kTransfer:
      return "Transfer";
    case Phase::kHandover:
      return "Handover";
    case Phase::kDecode:
      return "Decode";
  }
  return "";
}

void PrintTo(Phase phase, std::ostream* out) { *out << PhaseName(phase); }
void PrintTo(Role role, std::ostream* out) { *out << RoleName(role); }

ClusterOptions ScriptedPair() {
  ClusterOptions options;
  options.workers = {"model.kind=scripted",     "scripted.vocab_size=2048",
                     "scripted.step_time=20ms", "scripted.prefill_token_time=2ms",
                     "page_tokens=128",         "cache_tokens=8192",
                     "max_sequences=4",         "chunk_tokens=64",
                     "transfer.timeout=2s",     "reservation_lease=5s",
                     "quarantine_time=2500ms",  "stop_patience=20s"};
  options.router = {"max_active_requests=1", "stop_patience=20s"};
  return options;
}

std::vector<uint32_t> ScriptedTokens(const v1::GenerateRequest& request,
                                     int32_t max_tokens_per_step) {
  model::ScriptedOptions options;
  options.vocab_size = 2048;
  options.page_tokens = 128;
  options.max_tokens_per_step = max_tokens_per_step;
  const auto& ids = request.token_ids().ids();
  const std::vector<int32_t> reply =
      model::ScriptedReply(options, std::vector<int32_t>(ids.begin(), ids.end()),
                           static_cast<int64_t>(request.sampling().max_output_tokens()));
  return {reply.begin(), reply.end()};
}

::testing::AssertionResult Serves(Cluster& cluster) {
  const v1::GenerateRequest asked = RequestOf(150, 5);
  RunningRequest request(cluster.router().address(), asked);
  const absl::Status status = request.Wait();
  if (!status.ok()) return ::testing::AssertionFailure() << status << "\n" << cluster.Logs();
  if (request.tokens() == ScriptedTokens(asked)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "wrong tokens: " << ::testing::PrintToString(request.tokens());
}

HeldRequest::HeldRequest(Cluster* cluster, Phase phase)
    : cluster_(cluster),
      asked_(RequestOf(kPromptTokens, kOutputTokens)),
      is_held_(::testing::AssertionFailure() << "never reached " << PhaseName(phase)) {
  const std::string& router = cluster_->router().address();
  if (phase == Phase::kQueued) {
    blocker_ = std::make_unique<RunningRequest>(router, asked_);
    if (!blocker_->WaitForTokens(1, kPhasePatience)) return;
  }
  request_ = std::make_unique<RunningRequest>(router, asked_);
  if (Reach(phase) && !request_->is_over()) {
    is_held_ = ::testing::AssertionSuccess();
  } else {
    is_held_ << "\n" << cluster_->Logs();
  }
}

bool HeldRequest::Reach(Phase phase) {
  Member& prefill = cluster_->prefill();
  if (phase == Phase::kDecode) return request_->WaitForTokens(3, kPhasePatience);
  if (phase == Phase::kQueued) {
    return WaitUntil(kPhasePatience, [this] {
      const auto status = cluster_->client().Status(kPhasePatience);
      return status.ok() && status->queued_requests() == 1;
    });
  }
  const bool computes = WaitUntil(kPhasePatience, [&] {
    const v1::WorkerLoad load = prefill.Load();
    const uint64_t pending = load.pending_prompt_tokens();
    // The end of the prompt alone, so that a write that a stopped peer delays is not one of long
    // ago.
    const uint64_t most = phase == Phase::kPrefill ? kPromptTokens - 1 : 150;
    return load.transfers() == 1 && pending > 0 && pending <= most;
  });
  if (!computes || phase == Phase::kPrefill) return computes;
  if (phase == Phase::kHandover) return ReachHandover();
  stopped_.push_back(&cluster_->decode());
  cluster_->decode().program().Signal(SIGSTOP);
  return WaitUntil(kPhasePatience, [&] {
    const v1::WorkerLoad load = prefill.Load();
    return load.transfers() == 1 && load.pending_prompt_tokens() == 0 &&
           load.active_sequences() == 0;
  });
}

bool HeldRequest::ReachHandover() {
  ServerProgram& router = cluster_->router().program();
  router.Signal(SIGSTOP);
  const bool is_written =
      WaitUntil(kPhasePatience, [this] { return cluster_->prefill().Load().transfers() == 0; });
  stopped_.push_back(&cluster_->decode());
  cluster_->decode().program().Signal(SIGSTOP);
  router.Signal(SIGCONT);
  absl::SleepFor(kSendTime);
  return is_written;
}

void HeldRequest::Release() {
  for (Member* member : stopped_) member->program().Signal(SIGCONT);
  stopped_.clear();
}

::testing::AssertionResult HeldRequest::HasRightTokens() {
  const std::vector<uint32_t> right = ScriptedTokens(asked_);
  const std::vector<uint32_t> streamed = request_->tokens();
  const bool is_whole = request_->Wait().ok();
  if (streamed.size() <= right.size() && (!is_whole || streamed.size() == right.size()) &&
      std::equal(streamed.begin(), streamed.end(), right.begin())) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << ::testing::PrintToString(streamed) << "\nwant (part of) "
                                       << ::testing::PrintToString(right);
}

}  // namespace isthmus::testing
