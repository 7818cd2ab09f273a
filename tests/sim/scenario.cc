// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/scenario.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace isthmus::sim {
namespace {

// As many as tests/golden/tiny-recall/tokenizer.json has: the router compares them.
constexpr int32_t kVocabSize = 1920;

absl::Duration Scale(absl::Duration value, RandomSource& random) {
  return random.Between(absl::ZeroDuration(), value);
}

void DrawSizes(RandomSource& random, Scenario& scenario) {
  scenario.num_routers = random.Chance(0.2) ? 2 : 1;
  scenario.num_prefill = static_cast<int>(random.Between(1, 3));
  scenario.num_decode = static_cast<int>(random.Between(1, 3));

  model::ScriptedOptions& script = scenario.script;
  script.seed = random.Bits();
  script.vocab_size = kVocabSize;
  script.max_positions = 4096;
  script.page_tokens = random.Chance(0.8) ? 128 : 256;
  script.end_probability = random.Chance(0.5) ? 0.03 : 0.0;
  script.max_tokens_per_step = static_cast<int32_t>(random.Between(1, 4));
  script.step_time = random.Between(absl::Milliseconds(1), absl::Milliseconds(20));
  script.prefill_token_time = random.Between(absl::ZeroDuration(), absl::Microseconds(200));

  worker::WorkerConfig& worker = scenario.worker;
  worker.page_tokens = script.page_tokens;
  // Tight: three or four pages of a kind for all sequences together.
  worker.cache_tokens = random.Chance(0.5) ? 512 : 2048;
  worker.max_sequences = static_cast<int32_t>(random.Between(2, 6));
  worker.max_queued_sequences = static_cast<int32_t>(random.Between(1, 6));
  worker.chunk_tokens = random.Between(16, 256);
  worker.prefix_snapshots = static_cast<int32_t>(random.Between(0, 6));
  worker.prefix_snapshot_interval = 128 * random.Between(1, 4);
  worker.prefix_tails = static_cast<int32_t>(random.Between(1, 3));
  worker.threads = 1;
  worker.transfer_timeout = random.Between(absl::Milliseconds(300), absl::Seconds(1));
  worker.reservation_lease = random.Between(absl::Seconds(2), absl::Seconds(6));
  // The reservation's way to the prefill worker takes two messages.
  worker.quarantine_time = worker.transfer_timeout + 2 * Scenario::kLongestDelay +
                           Scenario::kLongestLateness + absl::Milliseconds(500);

  router::RouterConfig& router = scenario.router;
  router.max_active_requests = static_cast<int32_t>(random.Between(2, 10));
  router.max_queued_requests = static_cast<int32_t>(random.Between(1, 24));
  router.max_behind_messages = random.Chance(0.3) ? 24 : 2048;
  router.load_interval = random.Between(absl::Milliseconds(50), absl::Milliseconds(200));
  router.heartbeat_interval = absl::Milliseconds(500);
  router.lease = absl::Seconds(3);
  router.request_timeout = Scenario::kRequestTimeout;
}

// One decode worker of few pages that expects replies to be short, and they are not: it preempts.
void DrawPressure(RandomSource& random, Scenario& scenario) {
  scenario.num_decode = 1;
  worker::WorkerConfig& worker = scenario.worker;
  worker.cache_tokens = 128 * random.Between(4, 8);
  worker.max_sequences = static_cast<int32_t>(random.Between(3, 8));
  worker.max_queued_sequences = 16;
  worker.first_output_share = 0;
  worker.expected_output_quantile = random.Chance(0.5) ? 0 : 0.5;
  scenario.router.max_active_requests = static_cast<int32_t>(random.Between(8, 20));
  scenario.router.max_behind_messages = 2048;
}

void DrawWeather(RandomSource& random, Weather& weather) {
  weather.longest_latency = random.Between(absl::Microseconds(100), absl::Milliseconds(5));
  weather.longest_write = random.Between(absl::Microseconds(100), absl::Milliseconds(20));
  if (random.Chance(0.4)) {
    weather.slow_share = random.Chance(0.5) ? 0.05 : 0.3;
    weather.slow_latency = Scenario::kLongestLatency;
  }
  if (random.Chance(0.3)) weather.repeat_share = 0.1;
}

// Each kind of trouble comes in some seeds, rare or frequent.
double DrawShare(RandomSource& random) {
  if (!random.Chance(0.35)) return 0;
  return random.Chance(0.3) ? 0.1 : 0.01;
}

void DrawStorm(RandomSource& random, Weather& weather) {
  weather.break_share = DrawShare(random) / 4;
  weather.slow_write_share = DrawShare(random);
  weather.lost_write_share = DrawShare(random) / 2;
  weather.failed_write_share = DrawShare(random) / 2;
  weather.corrupt_write_share = DrawShare(random) / 2;
}

// Half of the prompts go on from an earlier one: from a part of it, from the whole, or from its
// reply as the next turn of a talk.
std::vector<int32_t> DrawPrompt(RandomSource& random, const Scenario& scenario, int64_t longest) {
  std::vector<int32_t> prompt;
  if (!scenario.clients.empty() && random.Chance(0.5)) {
    const ClientPlan& earlier = scenario.clients[random.Below(scenario.clients.size())];
    prompt = earlier.prompt;
    if (random.Chance(0.5)) {
      const std::vector<int32_t> reply =
          model::ScriptedReply(scenario.script, earlier.prompt, earlier.max_output_tokens);
      prompt.insert(prompt.end(), reply.begin(), reply.end());
    } else if (random.Chance(0.5)) {
      prompt.resize(random.Below(prompt.size()) + 1);
    }
    prompt.resize(std::min(prompt.size(), static_cast<size_t>(longest)));
  }
  const auto begun = static_cast<int64_t>(prompt.size());
  int64_t length = random.Chance(0.3) ? begun + random.Between(0, 8) : random.Between(1, longest);
  length = std::clamp<int64_t>(length, std::max<int64_t>(begun, 1), longest);
  while (static_cast<int64_t>(prompt.size()) < length) {
    prompt.push_back(static_cast<int32_t>(random.Between(2, kVocabSize - 1)));
  }
  return prompt;
}

ClientPlan DrawClient(RandomSource& random, const Scenario& scenario) {
  ClientPlan plan;
  plan.arrives_at = Scale(scenario.is_pressed ? absl::Seconds(1) : absl::Seconds(5), random);
  const int64_t room = std::min<int64_t>(scenario.worker.cache_tokens, 512);
  plan.max_output_tokens = scenario.is_pressed ? random.Between(40, 300) : random.Between(1, 48);
  plan.priority = static_cast<Priority>(random.Below(3));
  const int64_t longest = scenario.is_pressed ? 150 : room - plan.max_output_tokens - 1;
  plan.prompt = DrawPrompt(random, scenario, longest);
  if (random.Chance(0.2)) plan.cache_salt = "other";
  if (random.Chance(0.2)) plan.leaves_after = Scale(absl::Seconds(2), random);
  if (random.Chance(0.1)) plan.deadline = Scale(absl::Seconds(3), random);
  if (random.Chance(0.15)) plan.read_pause = Scale(absl::Milliseconds(200), random);
  if (random.Chance(0.2)) {
    plan.num_replies = static_cast<uint32_t>(random.Between(2, 4));
    LimitReplies(scenario.worker, &plan);
  }
  if (random.Chance(0.2)) plan.stops_at = random.Between(0, plan.max_output_tokens - 1);
  return plan;
}

Misfortune DrawMisfortune(RandomSource& random, const Scenario& scenario) {
  Misfortune misfortune;
  misfortune.at = Scale(absl::Seconds(6), random);
  constexpr MisfortuneKind kKinds[] = {
      MisfortuneKind::kKill,
      MisfortuneKind::kKill,
      MisfortuneKind::kPowerOff,
      MisfortuneKind::kDrain,
      MisfortuneKind::kResetCalls,
      MisfortuneKind::kSilentCalls,
      MisfortuneKind::kResetPages,
      MisfortuneKind::kSilentPages,
      MisfortuneKind::kLoseRegistration,
      MisfortuneKind::kRestartRouter,
  };
  misfortune.kind = kKinds[random.Below(std::size(kKinds))];
  misfortune.worker =
      static_cast<int>(random.Between(0, scenario.num_prefill + scenario.num_decode - 1));
  misfortune.router = static_cast<int>(random.Between(0, scenario.num_routers - 1));
  misfortune.lasts = Scale(absl::Seconds(3), random);
  return misfortune;
}

// A prefill and a decode worker, and a router of two, are drained and restarted while others of
// their role go on: no client may notice.
void DrawMaintenance(RandomSource& random, Scenario& scenario) {
  scenario.is_planned = true;
  scenario.num_prefill = std::max(scenario.num_prefill, 2);
  scenario.num_decode = std::max(scenario.num_decode, 2);
  for (const int worker : {0, scenario.num_prefill}) {
    Misfortune drain = DrawMisfortune(random, scenario);
    drain.kind = MisfortuneKind::kDrain;
    drain.worker = worker;
    scenario.misfortunes.push_back(drain);
  }
  if (scenario.num_routers < 2) return;
  Misfortune drain = DrawMisfortune(random, scenario);
  drain.kind = MisfortuneKind::kDrainRouter;
  scenario.misfortunes.push_back(drain);
}

}  // namespace

void LimitReplies(const worker::WorkerConfig& config, ClientPlan* plan) {
  const int64_t length = static_cast<int64_t>(plan->prompt.size()) + plan->max_output_tokens;
  const int64_t pages = (length + config.page_tokens - 1) / config.page_tokens;
  const int64_t most =
      std::min<int64_t>(config.max_sequences, config.cache_tokens / config.page_tokens / pages);
  plan->num_replies =
      std::min(plan->num_replies, static_cast<uint32_t>(std::max<int64_t>(1, most)));
}

absl::Duration Scenario::LongestWait() const {
  // Reserve, prefill, handoff and back, a page write after another, tokens, and polls in between.
  const absl::Duration latency = std::max(weather.longest_latency, weather.slow_latency);
  const absl::Duration around = 8 * latency + 12 * weather.longest_write + absl::Milliseconds(500);
  absl::Duration sum;
  for (const ClientPlan& client : clients) {
    const auto num_prompt_tokens = static_cast<int64_t>(client.prompt.size());
    const int64_t num_chunks = num_prompt_tokens / worker.chunk_tokens + 1;
    sum += around + (num_chunks + client.max_output_tokens) * script.step_time +
           num_prompt_tokens * script.prefill_token_time;
  }
  return 2 * sum + absl::Seconds(10);
}

absl::string_view MisfortuneName(MisfortuneKind kind) {
  switch (kind) {
    case MisfortuneKind::kKill:
      return "kill";
    case MisfortuneKind::kPowerOff:
      return "power off";
    case MisfortuneKind::kDrain:
      return "drain";
    case MisfortuneKind::kResetCalls:
      return "reset calls";
    case MisfortuneKind::kSilentCalls:
      return "silence calls";
    case MisfortuneKind::kResetPages:
      return "reset pages";
    case MisfortuneKind::kSilentPages:
      return "silence pages";
    case MisfortuneKind::kLoseRegistration:
      return "lose registration";
    case MisfortuneKind::kDrainRouter:
      return "drain router";
    default:
      return "restart router";
  }
}

Scenario DrawScenario(uint64_t seed) {
  RandomSource random(seed * 0x2545f4914f6cdd1d + 1);
  Scenario scenario;
  scenario.seed = seed;
  DrawSizes(random, scenario);
  scenario.is_pressed = random.Chance(0.3);
  if (scenario.is_pressed) DrawPressure(random, scenario);
  DrawWeather(random, scenario.weather);
  const int64_t num_clients = random.Between(4, 30);
  // A burst comes at once.
  const bool is_burst = random.Chance(0.2);
  for (int64_t i = 0; i < num_clients; ++i) {
    scenario.clients.push_back(DrawClient(random, scenario));
    if (is_burst) scenario.clients.back().arrives_at = absl::Milliseconds(500);
  }
  if (seed % 5 == 0) return scenario;  // Every fifth seed is load alone.
  if (seed % 5 == 1) {
    DrawMaintenance(random, scenario);
    return scenario;
  }
  DrawStorm(random, scenario.weather);
  // So short that it may end before a prompt is computed.
  if (random.Chance(0.3)) {
    scenario.worker.reservation_lease =
        random.Between(absl::Milliseconds(150), absl::Milliseconds(500));
  }
  // So slow that a prompt may outlast lease and quarantine together.
  if (random.Chance(0.1)) {
    scenario.script.step_time = random.Between(absl::Milliseconds(100), absl::Milliseconds(400));
    scenario.worker.chunk_tokens = 16;
    scenario.worker.reservation_lease =
        std::max(scenario.worker.reservation_lease, 3 * scenario.script.step_time);
    scenario.clients.resize(std::min<size_t>(scenario.clients.size(), 8));
  }
  const int64_t num_misfortunes = random.Between(0, 8);
  for (int64_t i = 0; i < num_misfortunes; ++i) {
    scenario.misfortunes.push_back(DrawMisfortune(random, scenario));
  }
  std::ranges::sort(scenario.misfortunes, {}, &Misfortune::at);
  return scenario;
}

std::string Describe(const Scenario& scenario) {
  const worker::WorkerConfig& worker = scenario.worker;
  const router::RouterConfig& router = scenario.router;
  const Weather& weather = scenario.weather;
  std::string text = absl::StrFormat(
      "seed %d: %d routers, %d prefill and %d decode workers, cache of %d tokens in pages of %d, "
      "%d slots, %d snapshots, %d queued, chunks of %d, lease %s, write timeout %s, quarantine %s, "
      "step %s + %s "
      "a token, 1 to %d tokens a step; %d active and %d queued requests, %d messages behind\n",
      scenario.seed, scenario.num_routers, scenario.num_prefill, scenario.num_decode,
      worker.cache_tokens, worker.page_tokens, worker.max_sequences, worker.prefix_snapshots,
      worker.max_queued_sequences, worker.chunk_tokens,
      absl::FormatDuration(worker.reservation_lease), absl::FormatDuration(worker.transfer_timeout),
      absl::FormatDuration(worker.quarantine_time), absl::FormatDuration(scenario.script.step_time),
      absl::FormatDuration(scenario.script.prefill_token_time), scenario.script.max_tokens_per_step,
      router.max_active_requests, router.max_queued_requests, router.max_behind_messages);
  absl::StrAppend(&text, "messages: up to ", absl::FormatDuration(weather.longest_latency),
                  ", slow ", weather.slow_share, ", break ", weather.break_share, ", twice ",
                  weather.repeat_share, "; writes: up to ",
                  absl::FormatDuration(weather.longest_write), ", slow ", weather.slow_write_share,
                  ", lost ", weather.lost_write_share, ", failed ", weather.failed_write_share,
                  ", corrupt ", weather.corrupt_write_share, "\n");
  for (size_t i = 0; i < scenario.clients.size(); ++i) {
    const ClientPlan& client = scenario.clients[i];
    absl::StrAppend(&text, "client ", i, " at ", absl::FormatDuration(client.arrives_at), ": ",
                    client.prompt.size(), " prompt tokens",
                    client.cache_salt.empty() ? "" : " under another salt", ", ",
                    client.max_output_tokens, " output tokens, ", client.num_replies,
                    " replies, stops at ", client.stops_at, ", priority ",
                    static_cast<int>(client.priority), ", leaves after ",
                    absl::FormatDuration(client.leaves_after), ", deadline ",
                    absl::FormatDuration(client.deadline), ", reads every ",
                    absl::FormatDuration(client.read_pause), "\n");
  }
  for (const Misfortune& misfortune : scenario.misfortunes) {
    absl::StrAppend(&text, MisfortuneName(misfortune.kind), " at ",
                    absl::FormatDuration(misfortune.at), ": worker ", misfortune.worker,
                    ", router ", misfortune.router, ", for ",
                    absl::FormatDuration(misfortune.lasts), "\n");
  }
  return text;
}

}  // namespace isthmus::sim
