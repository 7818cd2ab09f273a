// SPDX-License-Identifier: Apache-2.0
#include "services/diag/bench_cluster.h"

#include <algorithm>
#include <atomic>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/base/status_macros.h"
#include "services/base/thread.h"
#include "services/rpc/router_client.h"

namespace isthmus::diag {
namespace {

constexpr absl::Duration kTimeout = absl::Minutes(10);
constexpr int64_t kWarmUp = 5;
// One write of the prefill worker's log may still be under way when its request has ended.
constexpr absl::Duration kLogPatience = absl::Milliseconds(300);

// What one request showed.
struct Sample {
  std::string request_id;
  absl::Time first_token_at;
  double ttft_ms = 0.0;
  int64_t output_tokens = 0;
  double decode_seconds = 0.0;  // From the first token to the last.
};

double Quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(share * static_cast<double>(values.size()));
  return values[std::min(rank, values.size() - 1)];
}

v1::GenerateRequest RequestOf(const ClusterBenchFlags& flags, int64_t number) {
  v1::GenerateRequest request;
  request.set_request_id(absl::StrCat("bench-", absl::ToUnixMicros(absl::Now()), "-", number));
  std::mt19937 random(static_cast<uint32_t>(number));
  for (int64_t t = 0; t < flags.context; ++t) {
    request.mutable_token_ids()->add_ids(static_cast<uint32_t>(random() % flags.vocab_size));
  }
  rpc::SamplingOptions sampling;
  sampling.temperature = flags.temperature;
  sampling.seed = static_cast<uint64_t>(number);
  sampling.max_tokens = static_cast<uint32_t>(flags.decode + 1);
  *request.mutable_sampling() = rpc::ToSamplingParams(sampling);
  return request;
}

absl::StatusOr<Sample> RunOne(rpc::RouterClient& client, const v1::GenerateRequest& request) {
  Sample sample;
  sample.request_id = request.request_id();
  absl::Time last_at;
  const absl::Time start = absl::Now();
  const auto on_delta = [&](const v1::TokenDelta& delta) {
    if (delta.token_ids_size() == 0) return;
    last_at = absl::Now();
    if (sample.output_tokens == 0) sample.first_token_at = last_at;
    sample.output_tokens += delta.token_ids_size();
  };
  ISTHMUS_RETURN_IF_ERROR(client.Generate(request, kTimeout, on_delta).status());
  sample.ttft_ms = absl::ToDoubleMilliseconds(sample.first_token_at - start);
  sample.decode_seconds = absl::ToDoubleSeconds(last_at - sample.first_token_at);
  return sample;
}

// When the last write of each request was posted, as the prefill worker logged it.
std::map<std::string, absl::Time> ReadPostingTimes(const std::string& path) {
  std::map<std::string, absl::Time> times;
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const auto record = nlohmann::json::parse(line, nullptr, false);
    const auto posted = record.find("last_push_posted_unix_us");
    const auto id = record.find("request_id");
    if (posted == record.end() || id == record.end()) continue;
    times[*id] = absl::FromUnixMicros(posted->get<int64_t>());
  }
  return times;
}

absl::StatusOr<std::vector<Sample>> RunAll(const ClusterBenchFlags& flags, double* seconds) {
  rpc::RouterClient client(flags.server);
  for (int64_t i = 0; i < kWarmUp; ++i) {
    ISTHMUS_RETURN_IF_ERROR(RunOne(client, RequestOf(flags, -1 - i)).status());
  }
  Mutex mutex;
  std::vector<Sample> samples;
  absl::Status failure;
  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    rpc::RouterClient own(flags.server);
    for (int64_t number = next++; number < flags.requests; number = next++) {
      absl::StatusOr<Sample> sample = RunOne(own, RequestOf(flags, number));
      MutexLock lock(mutex);
      if (!sample.ok()) {
        failure = sample.status();
        next = flags.requests;
      } else {
        samples.push_back(*std::move(sample));
      }
    }
  };
  const absl::Time start = absl::Now();
  {
    std::vector<Thread> threads;
    threads.reserve(static_cast<size_t>(flags.concurrency));
    for (int64_t t = 0; t < flags.concurrency; ++t) threads.emplace_back(RealClock(), work);
  }
  *seconds = absl::ToDoubleSeconds(absl::Now() - start);
  ISTHMUS_RETURN_IF_ERROR(failure);
  return samples;
}

}  // namespace

absl::StatusOr<nlohmann::ordered_json> RunClusterBench(const ClusterBenchFlags& flags) {
  if (flags.context < 1 || flags.decode < 0 || flags.requests < 1 || flags.concurrency < 1 ||
      flags.vocab_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "context ", flags.context, ", decode ", flags.decode, ", requests ", flags.requests,
        ", concurrency ", flags.concurrency, ", vocab ", flags.vocab_size, ": must be positive"));
  }
  double seconds = 0.0;
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<Sample> samples, RunAll(flags, &seconds));
  std::vector<double> ttft;
  std::vector<double> speeds;
  int64_t tokens = 0;
  double decode_seconds = 0.0;
  int64_t decoded = 0;
  for (const Sample& sample : samples) {
    ttft.push_back(sample.ttft_ms);
    tokens += sample.output_tokens;
    // A reply that the model ended early says little about decoding.
    if (2 * (sample.output_tokens - 1) < flags.decode || sample.decode_seconds <= 0) continue;
    decoded += sample.output_tokens - 1;
    decode_seconds += sample.decode_seconds;
    speeds.push_back(static_cast<double>(sample.output_tokens - 1) / sample.decode_seconds);
  }
  const double mean = decode_seconds > 0 ? static_cast<double>(decoded) / decode_seconds : 0.0;
  nlohmann::ordered_json record = {{"context", flags.context},
                                   {"decode", flags.decode},
                                   {"requests", flags.requests},
                                   {"concurrency", flags.concurrency},
                                   {"output_tokens", tokens},
                                   {"ttft_ms_p50", Quantile(ttft, 0.5)},
                                   {"ttft_ms_p99", Quantile(ttft, 0.99)},
                                   {"decoded_requests", speeds.size()},
                                   {"decode_tokens_per_s_median", Quantile(speeds, 0.5)},
                                   {"decode_tokens_per_s_mean", mean},
                                   {"output_tokens_per_s", static_cast<double>(tokens) / seconds}};
  if (flags.prefill_log.empty()) return record;
  RealClock().Sleep(kLogPatience);
  const std::map<std::string, absl::Time> posted = ReadPostingTimes(flags.prefill_log);
  std::vector<double> handovers;
  for (const Sample& sample : samples) {
    const auto found = posted.find(sample.request_id);
    if (found == posted.end()) continue;
    handovers.push_back(absl::ToDoubleMilliseconds(sample.first_token_at - found->second));
  }
  record["handovers"] = handovers.size();
  record["handover_ms_p50"] = Quantile(handovers, 0.5);
  record["handover_ms_p99"] = Quantile(handovers, 0.99);
  return record;
}

}  // namespace isthmus::diag
