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

// Every reply of the plan, its stop token at the end.
std::vector<int32_t> ScriptOf(const ClientPlan& plan, const Scenario& scenario) {
  std::vector<int32_t> script =
      model::ScriptedReply(scenario.script, plan.prompt, plan.max_output_tokens);
  if (plan.stops_at < 0 || plan.stops_at >= static_cast<int64_t>(script.size())) return script;
  const auto stop = std::ranges::find(script, script[static_cast<size_t>(plan.stops_at)]);
  script.erase(stop + 1, script.end());
  return script;
}

v1::GenerateRequest RequestOf(const std::string& name, const ClientPlan& plan,
                              const std::vector<int32_t>& script) {
  v1::GenerateRequest request;
  request.set_request_id(name);
  request.set_cache_salt(plan.cache_salt);
  for (const int32_t token : plan.prompt) {
    request.mutable_token_ids()->add_ids(static_cast<uint32_t>(token));
  }
  request.mutable_sampling()->set_temperature(0);
  request.set_priority(rpc::ToWire(plan.priority));
  request.mutable_sampling()->set_num_replies(plan.num_replies);
  if (plan.stops_at >= 0) {
    request.mutable_sampling()->add_stop_token_ids(static_cast<uint32_t>(script.back()));
  }
  request.mutable_sampling()->set_max_output_tokens(static_cast<uint32_t>(plan.max_output_tokens));
  return request;
}

// What a client has read of one reply.
struct ReplyReading {
  std::vector<int32_t> tokens;
  int num_ends = 0;
  bool reads_after_end = false;
};

// What a client has read.
struct Reading {
  std::vector<ReplyReading> replies;
  int num_finishes = 0;
  bool reads_after_finish = false;

  explicit Reading(uint32_t num_replies) : replies(num_replies) {}

  void Take(const v1::GenerateReply& event) {
    reads_after_finish = reads_after_finish || num_finishes > 0;
    if (event.has_finish()) ++num_finishes;
    if (event.has_reply_end()) ++replies.at(event.reply_end().reply_index()).num_ends;
    if (!event.has_delta()) return;
    ReplyReading& reply = replies.at(event.delta().reply_index());
    reply.reads_after_end = reply.reads_after_end || reply.num_ends > 0;
    for (const uint32_t token : event.delta().token_ids()) {
      reply.tokens.push_back(static_cast<int32_t>(token));
    }
  }
  size_t num_tokens() const {
    size_t sum = 0;
    for (const ReplyReading& reply : replies) sum += reply.tokens.size();
    return sum;
  }
};

// Why a reply is wrong; empty when it is not.
std::string Objection(const ReplyReading& reply, const std::vector<int32_t>& script, bool is_ok) {
  for (size_t i = 0; i < reply.tokens.size(); ++i) {
    if (i < script.size() && reply.tokens[i] == script[i]) continue;
    return absl::StrCat("token ", i, " is ", reply.tokens[i], ", want ",
                        i < script.size() ? absl::StrCat(script[i]) : "none");
  }
  if (reply.reads_after_end) return "a delta came after the reply's end";
  if (!is_ok) return reply.num_ends <= 1 ? "" : "a reply has several ends";
  if (reply.num_ends != 1) return absl::StrCat("a reply has ", reply.num_ends, " ends");
  if (reply.tokens.size() == script.size()) return "";
  return absl::StrCat("the reply has ", reply.tokens.size(), " tokens, want ", script.size());
}

// The same of all that was read.
std::string Objection(const Reading& reading, const std::vector<int32_t>& script, bool is_ok) {
  for (const ReplyReading& reply : reading.replies) {
    std::string objection = Objection(reply, script, is_ok);
    if (!objection.empty()) return objection;
  }
  if (reading.reads_after_finish) return "an event came after the finish";
  if (!is_ok) return reading.num_finishes == 0 ? "" : "an error came after the finish";
  if (reading.num_finishes == 1) return "";
  return absl::StrCat(reading.num_finishes, " finishes came");
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
  const std::vector<int32_t> script = ScriptOf(plan, scenario);
  Reading reading(plan.num_replies);
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
  const absl::Status status = router.router().Generate(RequestOf(name, plan, script), stream);
  const absl::Time end = clock.Now();
  journal.Note(absl::StrCat(name, ": ", reading.num_tokens(), " tokens, ", status.ToString()));

  journal.Count(absl::StrCat("request ", absl::StatusCodeToString(status.code())));

  const std::string objection = Objection(reading, script, status.ok());
  if (!objection.empty()) journal.Violate(absl::StrCat(name, ": ", objection));
  // The router keeps 2 % of a call's time, and at least 1 ms, for the way back.
  const absl::Duration allowed = std::min(plan.deadline, scenario.router.request_timeout);
  const bool is_late = end - start + absl::Milliseconds(2) >= 0.97 * allowed;
  // It may have begun to drain just when the client came.
  const bool is_turned_away = router.router().is_draining() && reading.num_tokens() == 0;
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
