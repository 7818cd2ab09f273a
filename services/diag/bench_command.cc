// SPDX-License-Identifier: Apache-2.0
// isthmus-diag bench: speed of prefill and decode in this process (offline), or through a router
// (cluster).
//
// offline: tokens per second of prefill and decode of some sequences, without any process boundary.
// The prompt is random ids from a fixed seed: the work does not depend on what they mean. Rounds of
// both phases alternate and the median is reported, since machines are noisy.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"
#include "services/diag/commands.h"
#include "services/diag/decode_bench.h"
#include "services/diag/local_engine.h"
#ifdef ISTHMUS_WITH_RPC
#include "services/diag/bench_cluster.h"
#endif

namespace isthmus::diag {
namespace {

struct BenchFlags {
  std::string checkpoint;
  std::string arithmetic = "reference";
  std::string device = "cpu";
  std::vector<std::string> patches;
  std::string json;
  int64_t context = 1000;
  int64_t chunk = 512;
  int64_t decode = 64;
  int64_t rounds = 5;
  int64_t batch = 1;
  int threads = 0;
};

struct Round {
  double prefill_tokens_per_s = 0.0;
  double decode_tokens_per_s = 0.0;
};

absl::StatusOr<Round> RunRound(LocalEngine& local, const BenchFlags& flags) {
  std::mt19937 random(1);
  std::vector<engine::Sequence> sequences;
  std::vector<engine::Sequence*> pointers;
  for (int64_t b = 0; b < flags.batch; ++b) {
    std::vector<int32_t> prompt;
    prompt.reserve(static_cast<size_t>(flags.context));
    for (int64_t t = 0; t < flags.context; ++t) {
      prompt.push_back(static_cast<int32_t>(
          random() % static_cast<uint32_t>(local.weights().config().vocab_size)));
    }
    engine::SamplingParams sampling;
    sampling.max_tokens = flags.decode + 1;
    ISTHMUS_ASSIGN_OR_RETURN(engine::Sequence sequence,
                             local.engine().Admit("bench", std::move(prompt), sampling));
    sequences.push_back(std::move(sequence));
  }
  pointers.reserve(sequences.size());
  for (engine::Sequence& sequence : sequences) pointers.push_back(&sequence);

  Round round;
  const absl::Time start = RealClock().Now();
  for (engine::Sequence* sequence : pointers) {
    while (sequence->num_output_tokens() == 0) {
      ISTHMUS_RETURN_IF_ERROR(local.engine().Step({&sequence, 1}));
    }
  }
  const absl::Time decode_start = RealClock().Now();
  for (int64_t t = 0; t < flags.decode; ++t) {
    for (engine::Sequence* sequence : pointers) sequence->finish = engine::FinishReason::kNone;
    ISTHMUS_RETURN_IF_ERROR(local.engine().Step(pointers));
  }
  const absl::Time end = RealClock().Now();
  const auto batch = static_cast<double>(flags.batch);
  round.prefill_tokens_per_s =
      batch * static_cast<double>(flags.context) / absl::ToDoubleSeconds(decode_start - start);
  round.decode_tokens_per_s =
      batch * static_cast<double>(flags.decode) / absl::ToDoubleSeconds(end - decode_start);
  return round;
}

// To a file; nowhere when it has no name.
absl::Status WriteRecord(const nlohmann::ordered_json& record, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream file(path);
  file << record.dump(1) << "\n";
  file.flush();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

absl::Status RunBench(const BenchFlags& flags) {
  if (flags.context < 1 || flags.chunk < 1 || flags.decode < 1 || flags.rounds < 1 ||
      flags.batch < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("context ", flags.context, ", chunk ", flags.chunk, ", decode ", flags.decode,
                     ", rounds ", flags.rounds, ", batch ", flags.batch, ": all must be positive"));
  }
  LocalEngineOptions options;
  options.checkpoint = flags.checkpoint;
  ISTHMUS_ASSIGN_OR_RETURN(options.arithmetic, ParseArithmetic(flags.arithmetic));
  options.device = flags.device;
  ISTHMUS_RETURN_IF_ERROR(ParseSwitches(flags.patches, &options.patches));
  options.chunk_tokens = flags.chunk;
  options.threads = flags.threads;
  options.max_tokens = (flags.context + flags.decode + 512) * flags.batch;
  options.max_sequences = static_cast<int32_t>(flags.batch);
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<LocalEngine> local, LocalEngine::Create(options));
  std::vector<double> prefill;
  std::vector<double> decode;
  for (int64_t r = 0; r <= flags.rounds; ++r) {
    ISTHMUS_ASSIGN_OR_RETURN(const Round round, RunRound(*local, flags));
    if (r == 0) continue;  // Warm-up: memory is mapped and scratch grows.
    prefill.push_back(round.prefill_tokens_per_s);
    decode.push_back(round.decode_tokens_per_s);
  }
  const int threads = local->exec().threads->num_threads();
  const nlohmann::ordered_json record = {{"arithmetic", flags.arithmetic},
                                         {"threads", threads},
                                         {"batch", flags.batch},
                                         {"context", flags.context},
                                         {"chunk", flags.chunk},
                                         {"decode_steps", flags.decode},
                                         {"rounds", flags.rounds},
                                         {"prefill_tokens_per_s_median", Median(prefill)},
                                         {"decode_tokens_per_s_median", Median(decode)},
                                         {"prefill_tokens_per_s", prefill},
                                         {"decode_tokens_per_s", decode}};
  std::cout << absl::StrCat("prefill ", static_cast<int64_t>(Median(prefill)), " tokens/s, decode ",
                            static_cast<int64_t>(Median(decode)), " tokens/s (median of ",
                            flags.rounds, " rounds, ", threads, " threads, batch ", flags.batch,
                            ", context ", flags.context, ", chunk ", flags.chunk, ", ",
                            flags.arithmetic, ")\n");
  return WriteRecord(record, flags.json);
}

void AddOfflineCommand(CLI::App* bench, absl::Status& status) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command =
      bench->add_subcommand("offline", "Prefill and decode of a random prompt, in this process");
  command->add_option("--checkpoint", flags->checkpoint, "Checkpoint directory")->required();
  command->add_option("--arithmetic", flags->arithmetic, "math or reference")
      ->capture_default_str();
  command->add_option("--device", flags->device, "cpu or cuda:<number>")->capture_default_str();
  command->add_option("--patches", flags->patches, "name=on or name=off, separated by commas")
      ->delimiter(',');
  command->add_option("--context", flags->context, "Prompt tokens")->capture_default_str();
  command->add_option("--chunk", flags->chunk, "Prompt tokens in one step")->capture_default_str();
  command->add_option("--decode", flags->decode, "Decode steps")->capture_default_str();
  command->add_option("--rounds", flags->rounds, "Measured rounds, after one that is not")
      ->capture_default_str();
  command->add_option("--batch", flags->batch, "Sequences")->capture_default_str();
  command->add_option("--threads", flags->threads, "0: one per processor")
      ->check(CLI::Range(0, 256))
      ->capture_default_str();
  command->add_option("--json", flags->json, "File for the record");
  command->callback([flags, &status] { status = RunBench(*flags); });
}

#ifdef ISTHMUS_WITH_RPC
void AddClusterCommand(CLI::App* bench, absl::Status& status) {
  auto flags = std::make_shared<ClusterBenchFlags>();
  auto json = std::make_shared<std::string>();
  CLI::App* command = bench->add_subcommand("cluster", "Requests through a router, as JSON");
  command->add_option("--server", flags->server, "host:port of the router")->capture_default_str();
  command->add_option("--context", flags->context, "Prompt tokens")->capture_default_str();
  command->add_option("--vocab", flags->vocab_size, "Prompt ids are below")->capture_default_str();
  command->add_option("--decode", flags->decode, "Output tokens after the first")
      ->capture_default_str();
  command->add_option("--requests", flags->requests, "Measured requests")->capture_default_str();
  command->add_option("--concurrency", flags->concurrency, "Requests at one time")
      ->capture_default_str();
  command->add_option("--temperature", flags->temperature, "0 is greedy")->capture_default_str();
  command->add_option("--prefill-log", flags->prefill_log,
                      "Log of the prefill worker on this machine: measures the hand-over");
  command->add_option("--json", *json, "File for the record");
  command->callback([flags, json, &status] {
    const auto record = RunClusterBench(*flags);
    status = record.status();
    if (!record.ok()) return;
    std::cout << record->dump(1) << "\n";
    status = WriteRecord(*record, *json);
  });
}
#endif

}  // namespace

void AddBenchCommand(CLI::App& app, absl::Status& status) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed");
  bench->require_subcommand(1);
  AddOfflineCommand(bench, status);
  AddDecodeBenchCommands(bench, status);
  AddDeviceBenchCommands(bench, status);
#ifdef ISTHMUS_WITH_RPC
  AddClusterCommand(bench, status);
#endif
}

}  // namespace isthmus::diag
