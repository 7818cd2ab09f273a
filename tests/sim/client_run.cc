// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/client_run.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "services/model/scripted_forward.h"
#include "services/rpc/wire.h"

namespace isthmus::sim {
namespace {

v1::GenerateRequest RequestOf(const std::string& name, const ClientPlan& plan) {
  v1::GenerateRequest request;
  request.set_request_id(name);
  request.set_cache_salt(plan.cache_salt);
  for (const int32_t token : plan.prompt) {
    request.mutable_token_ids()->add_ids(static_cast<uint32_t>(token));
  }
  request.mutable_sampling()->set_temperature(0);
  request.set_priority(rpc::ToWire(plan.priority));
  request.mutable_sampling()->set_max_output_tokens(static_cast<uint32_t>(plan.max_output_tokens));
  return request;
}

// What a client has read.
struct Reading {
  std::vector<int32_t> tokens;
  int num_finishes = 0;
  bool reads_after_finish = false;

  void Take(const v1::GenerateReply& reply) {
    reads_after_finish = reads_after_finish || num_finishes > 0;
    if (reply.has_finish()) ++num_finishes;
    for (const uint32_t token : reply.delta().token_ids()) {
      tokens.push_back(static_cast<int32_t>(token));
    }
  }
};

// Why the reading is wrong; empty when it is not.
std::string Objection(const Reading& reading, const std::vector<int32_t>& script, bool is_ok) {
  for (size_t i = 0; i < reading.tokens.size(); ++i) {
    if (i < script.size() && reading.tokens[i] == script[i]) continue;
    return absl::StrCat("token ", i, " is ", reading.tokens[i], ", want ",
                        i < script.size() ? absl::StrCat(script[i]) : "none");
  }
  if (reading.reads_after_finish) return "an event came after the finish";
  if (!is_ok) return reading.num_finishes == 0 ? "" : "an error came after the finish";
  if (reading.num_finishes != 1) return absl::StrCat(reading.num_finishes, " finishes came");
  if (reading.tokens.size() == script.size()) return "";
  return absl::StrCat("the reply has ", reading.tokens.size(), " tokens, want ", script.size());
}

bool IsExcused(const absl::Status& status, const Excuses& excuses, bool has_left, bool is_late,
               bool router_is_down) {
  // The script has met pages that are not those of its sequence, behind every check.
  if (absl::StrContains(status.message(), "scripted:")) return false;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return true;
    case absl::StatusCode::kCancelled:
      return has_left || router_is_down;
    case absl::StatusCode::kDeadlineExceeded:
      return is_late || router_is_down;
    case absl::StatusCode::kResourceExhausted:
      return excuses.for_load || router_is_down;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kDataLoss:
      return excuses.for_faults || router_is_down;
    default:
      return false;
  }
}

}  // namespace

absl::Status RunClient(const std::string& name, const ClientPlan& plan, const Scenario& scenario,
                       const Excuses& excuses, RouterRun& router, Clock& clock, Journal& journal) {
  const absl::Time start = clock.Now();
  const absl::Time leaves_at = start + plan.leaves_after;
  Reading reading;
  router::ClientStream stream;
  stream.deadline = start + plan.deadline;
  std::atomic<bool> was_cut = false;
  stream.is_cancelled = [&] { return clock.Now() >= leaves_at || was_cut || router.is_down(); };
  stream.cancel = [&] { was_cut = true; };
  stream.write = [&](const v1::GenerateReply& reply) {
    if (stream.is_cancelled()) return false;
    reading.Take(reply);
    if (plan.read_pause > absl::ZeroDuration()) clock.Sleep(plan.read_pause);
    return true;
  };
  journal.Note(absl::StrCat(name, " asks ", router.name()));
  const absl::Status status = router.router().Generate(RequestOf(name, plan), stream);
  const absl::Time end = clock.Now();
  journal.Note(absl::StrCat(name, ": ", reading.tokens.size(), " tokens, ", status.ToString()));

  journal.Count(absl::StrCat("request ", absl::StatusCodeToString(status.code())));

  const std::vector<int32_t> script =
      model::ScriptedReply(scenario.script, plan.prompt, plan.max_output_tokens);
  const std::string objection = Objection(reading, script, status.ok());
  if (!objection.empty()) journal.Violate(absl::StrCat(name, ": ", objection));
  // The router keeps 2 % of a call's time, and at least 1 ms, for the way back.
  const absl::Duration allowed = std::min(plan.deadline, scenario.router.request_timeout);
  const bool is_late = end - start + absl::Milliseconds(2) >= 0.97 * allowed;
  // It may have begun to drain just when the client came.
  const bool is_turned_away = router.router().is_draining() && reading.tokens.empty();
  if (!IsExcused(status, excuses, end >= leaves_at, is_late, router.is_down() || is_turned_away)) {
    journal.Violate(absl::StrCat(name, " ended with ", status.ToString()));
  }
  if (end - start > excuses.patience) {
    journal.Violate(
        absl::StrCat(name, " took ", absl::FormatDuration(end - start), ", ", status.ToString()));
  }
  return status;
}

}  // namespace isthmus::sim
