// SPDX-License-Identifier: Apache-2.0
// isthmus-diag bench step.
#include "services/diag/step_bench.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/patches.h"
#include "kernels/sampling/sampling.h"
#include "services/base/status_macros.h"
#include "services/diag/device_timing.h"
#include "services/diag/local_engine.h"
#include "services/diag/random_model.h"
#include "services/diag/rank_models.h"
#include "services/diag/step_cost.h"
#include "services/model/flash_config.h"

namespace isthmus::diag {
namespace {

using nlohmann::ordered_json;

// A fill of so many bytes keeps a device busy while a host enqueues what is timed behind it.
constexpr int64_t kDelayBytes = int64_t{2} << 30;
constexpr int kDelayFills = 12;
// Operations of a pass that are timed; a layer has about 35.
constexpr size_t kMaxMarks = 2048;

absl::StatusOr<RandomModelOptions> OptionsOf(const StepBenchFlags& flags) {
  RandomModelOptions options;
  if (flags.layers < 1 || flags.layers > 43 || flags.batch < 1 || flags.context < 1 ||
      flags.replays < 3) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layers ", flags.layers, " (1 to 43), batch ", flags.batch, " (from 1), context ",
        flags.context, " (from 1), replays ", flags.replays, " (from 3): one is out of range"));
  }
  if (flags.shape == "v4-flash") {
    options.config = model::FlashConfig(flags.layers);
  } else if (flags.shape == "miniature") {
    options.config = MiniatureConfig(flags.layers);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("shape is \"", flags.shape, "\", must be v4-flash or miniature"));
  }
  if (flags.experts != "nvfp4" && flags.experts != "mxfp4") {
    return absl::InvalidArgumentError(
        absl::StrCat("experts is \"", flags.experts, "\", must be nvfp4 or mxfp4"));
  }
  options.routed =
      flags.experts == "nvfp4" ? kernels::WeightFormat::kNvfp4 : kernels::WeightFormat::kMxfp4;
  ISTHMUS_ASSIGN_OR_RETURN(options.arithmetic, ParseArithmetic(flags.arithmetic));
  ISTHMUS_ASSIGN_OR_RETURN(options.device, model::ParseDevice(flags.device));
  ISTHMUS_ASSIGN_OR_RETURN(options.index_key_format,
                           KeyFormatOf(flags.index_keys, options.arithmetic));
  options.ranks = flags.tp;
  options.batch = flags.batch;
  options.context = flags.context;
  return options;
}

// Greedy draws of a step's tokens from its logits.
struct GreedyDraws {
  kernels::DeviceBuffer zeros;  // Every parameter of a greedy draw.
  kernels::DeviceBuffer tokens;
  kernels::SamplingBatchArgs args;
};

// Where `exec` has them made on the device (sampling.on_device) by a rank that has whole rows.
absl::StatusOr<std::optional<GreedyDraws>> DrawsOf(const RandomModel& model,
                                                   const kernels::Exec& exec) {
  const kernels::MatrixView& logits = model.inputs().logits;
  const bool has_whole_rows = logits.cols == model.config().vocab_size;
  if (!has_whole_rows || !kernels::DrawsOnDevice(logits.cols, exec)) return std::nullopt;
  GreedyDraws draws;
  ISTHMUS_ASSIGN_OR_RETURN(draws.zeros, kernels::DeviceBuffer::Allocate(8 * logits.rows));
  ISTHMUS_ASSIGN_OR_RETURN(draws.tokens, kernels::DeviceBuffer::Allocate(4 * logits.rows));
  ISTHMUS_RETURN_IF_ERROR(
      kernels::FillDevice(draws.zeros.data(), 0, draws.zeros.bytes(), exec.stream));
  draws.args = {.logits = logits,
                .temperature = draws.zeros.as<float>(),
                .top_p = draws.zeros.as<float>(),
                .top_k = draws.zeros.as<int32_t>(),
                .min_p = draws.zeros.as<float>(),
                .seed = draws.zeros.as<uint64_t>(),
                .counter = draws.zeros.as<uint64_t>(),
                .tokens = draws.tokens.as<int32_t>()};
  return draws;
}

struct StepTime {
  double median_ms = 0.0;
  std::vector<double> ms;
  int64_t nodes = 0;
};

// Ranks start each replay together, as far as threads can. What counts is the shortest of their
// times: the rank that started last waited for nobody.
absl::StatusOr<StepTime> TimeStep(RankModels& models, const StepBenchFlags& flags,
                                  const PatchSet& patches) {
  std::barrier together(static_cast<std::ptrdiff_t>(models.size()));
  std::atomic<bool> is_over = false;
  std::vector<std::vector<double>> ms(models.size());
  StepTime time;
  const auto replay = [&](size_t rank, const RandomModel& model) -> absl::Status {
    kernels::Exec exec = model.exec();
    exec.patches = &patches;
    exec.batch_invariant = flags.batch_invariant;
    ISTHMUS_ASSIGN_OR_RETURN(const std::optional<GreedyDraws> draws, DrawsOf(model, exec));
    model::ModelForward::StepInputs inputs = model.inputs();
    if (draws.has_value()) inputs.draws = &draws->args;
    const auto work = [&] { return model.forward().Enqueue(model.batch(), inputs, exec); };
    ISTHMUS_ASSIGN_OR_RETURN(const kernels::DeviceGraph graph,
                             CaptureGraph(work, model.device().stream()));
    if (rank == 0) time.nodes = graph.num_nodes();
    double spent = 0.0;
    for (int r = 0; r <= flags.replays && !is_over; ++r) {
      together.arrive_and_wait();
      ISTHMUS_ASSIGN_OR_RETURN(const double one, TimeReplay(graph, exec, model.device().stream()));
      if (r > 0) ms[rank].push_back(one);  // The first replay uploads the graph.
      spent += one;
      if (rank == 0 && r >= 3 && spent > flags.seconds * 1e3) is_over = true;
      together.arrive_and_wait();
    }
    return absl::OkStatus();
  };
  ISTHMUS_RETURN_IF_ERROR(models.ForEach([&](size_t rank, const RandomModel& model) {
    const absl::Status status = replay(rank, model);
    if (!status.ok()) together.arrive_and_drop();
    return status;
  }));
  for (size_t i = 0; i < ms[0].size(); ++i) {
    double shortest = ms[0][i];
    for (const std::vector<double>& of_rank : ms) shortest = std::min(shortest, of_rank[i]);
    time.ms.push_back(shortest);
  }
  time.median_ms = MedianOf(time.ms);
  return time;
}

struct OperationTime {
  std::string name;
  int64_t calls = 0;
  double us = 0.0;
};

// Events between the operations of one pass that is enqueued behind a delay, so that the host is
// ahead of the device and gaps of launching do not count.
absl::StatusOr<std::vector<OperationTime>> TimeOperations(const RandomModel& model,
                                                          const StepBenchFlags& flags,
                                                          const PatchSet& patches) {
  kernels::Exec exec = model.exec();
  exec.patches = &patches;
  exec.batch_invariant = flags.batch_invariant;
  std::vector<std::string> names;
  std::vector<kernels::DeviceEvent> events;
  events.reserve(kMaxMarks);
  absl::Status status;
  // Made before, so that the host stays ahead.
  std::vector<kernels::DeviceEvent> spare(kMaxMarks);
  for (kernels::DeviceEvent& event : spare) {
    ISTHMUS_ASSIGN_OR_RETURN(event, kernels::DeviceEvent::Create());
  }
  const auto mark = [&](absl::string_view name) {
    if (events.size() == spare.size()) return;
    events.push_back(std::move(spare[events.size()]));
    status.Update(events.back().Record(exec.stream));
    names.emplace_back(name);
  };
  const std::function<void(absl::string_view)> on_operation = mark;
  model::ModelForward::StepInputs inputs = model.inputs();
  inputs.on_operation = &on_operation;
  ISTHMUS_ASSIGN_OR_RETURN(const std::optional<GreedyDraws> draws, DrawsOf(model, exec));
  if (draws.has_value()) inputs.draws = &draws->args;
  const int64_t delay_bytes = kernels::IsRealDevice() ? kDelayBytes : 4096;
  kernels::DeviceBuffer delay;
  if (auto taken = kernels::DeviceBuffer::Allocate(delay_bytes); taken.ok()) {
    delay = *std::move(taken);
  }
  for (int i = 0; i < kDelayFills && delay.data() != nullptr; ++i) {
    ISTHMUS_RETURN_IF_ERROR(kernels::FillDevice(delay.data(), 0, delay_bytes, exec.stream));
  }
  ISTHMUS_RETURN_IF_ERROR(model.forward().Enqueue(model.batch(), inputs, exec));
  mark("end");
  ISTHMUS_RETURN_IF_ERROR(status);
  ISTHMUS_RETURN_IF_ERROR(model.device().stream().Synchronise());
  std::vector<OperationTime> times;
  for (size_t i = 0; i + 1 < events.size(); ++i) {
    ISTHMUS_ASSIGN_OR_RETURN(const double ms, events[i + 1].MillisecondsSince(events[i]));
    auto found = std::find_if(times.begin(), times.end(),
                              [&](const OperationTime& t) { return t.name == names[i]; });
    if (found == times.end()) found = times.insert(times.end(), {names[i], 0, 0.0});
    ++found->calls;
    found->us += ms * 1e3;
  }
  std::sort(times.begin(), times.end(),
            [](const OperationTime& a, const OperationTime& b) { return a.us > b.us; });
  return times;
}

double TokensPerSecond(const StepBenchFlags& flags, double ms) {
  return static_cast<double>(flags.batch) / ms * 1e3;
}

ordered_json Describe(const StepTime& time, const StepBenchFlags& flags, const StepCost& cost,
                      absl::string_view what) {
  const double share = cost.floor_ms() / time.median_ms;
  std::cout << absl::StreamFormat(
      "%-40s %9.3f ms a step, %9.1f tokens/s, %5.1f %% of the floor of %.3f ms, %d nodes\n", what,
      time.median_ms, TokensPerSecond(flags, time.median_ms), share * 100.0, cost.floor_ms(),
      time.nodes);
  std::cout.flush();
  return {{"name", std::string(what)},
          {"ms", time.median_ms},
          {"tokens_per_s", TokensPerSecond(flags, time.median_ms)},
          {"share_of_floor", share},
          {"graph_nodes", time.nodes},
          {"replays_ms", time.ms}};
}

// Off, one by one on in the order of registration, to all on.
absl::StatusOr<ordered_json> ClimbLadder(RankModels& models, const StepBenchFlags& flags,
                                         const StepCost& cost) {
  std::map<std::string, bool> config;
  for (const Patch* patch : kernels::AllPatches()) config[std::string(patch->name)] = false;
  ordered_json rungs = ordered_json::array();
  const auto climb = [&](absl::string_view what) -> absl::Status {
    ISTHMUS_ASSIGN_OR_RETURN(const PatchSet patches,
                             PatchSet::Resolve(kernels::AllPatches(), config));
    ISTHMUS_ASSIGN_OR_RETURN(const StepTime time, TimeStep(models, flags, patches));
    rungs.push_back(Describe(time, flags, cost, what));
    return absl::OkStatus();
  };
  ISTHMUS_RETURN_IF_ERROR(climb("all patches off"));
  for (const Patch* patch : kernels::AllPatches()) {
    if ((patch->phases & kPhaseDecode) == 0) continue;
    // What the caller switches off stays off: of alternatives one is chosen.
    const auto found = flags.patches.find(std::string(patch->name));
    if (found != flags.patches.end() && !found->second) continue;
    config[std::string(patch->name)] = true;
    ISTHMUS_RETURN_IF_ERROR(climb(absl::StrCat("+ ", patch->name)));
  }
  return rungs;
}

void PrintCost(const RandomModel& model, const StepCost& cost) {
  int64_t sum = 0;
  std::cout << "experts touched per layer:";
  for (const int64_t touched : cost.touched_experts) {
    std::cout << " " << touched;
    sum += touched;
  }
  const auto layers = static_cast<double>(cost.touched_experts.size());
  std::cout << absl::StreamFormat(
      " (mean %.1f)\nread a step: %.3f GB = experts %.3f + other weights %.3f + caches %.3f; "
      "weights held %.1f GB, caches %.1f GB\n",
      static_cast<double>(sum) / layers, static_cast<double>(cost.bytes()) / 1e9,
      static_cast<double>(cost.routed_bytes) / 1e9,
      static_cast<double>(cost.other_weight_bytes) / 1e9,
      static_cast<double>(cost.cache_bytes) / 1e9,
      static_cast<double>(model.weights().bytes()) / 1e9,
      static_cast<double>(model.cache_bytes()) / 1e9);
  std::cout.flush();
}

// Those of rank 0.
absl::StatusOr<ordered_json> MeasureOperations(RankModels& models, const StepBenchFlags& flags,
                                               const PatchSet& patches) {
  std::vector<OperationTime> times;
  ISTHMUS_RETURN_IF_ERROR(
      models.ForEach([&](size_t rank, const RandomModel& of_rank) -> absl::Status {
        ISTHMUS_ASSIGN_OR_RETURN(std::vector<OperationTime> found,
                                 TimeOperations(of_rank, flags, patches));
        if (rank == 0) times = std::move(found);
        return absl::OkStatus();
      }));
  ordered_json operations = ordered_json::array();
  for (const OperationTime& one : times) {
    const double each = one.us / static_cast<double>(one.calls);
    std::cout << absl::StreamFormat("  %-26s %5d calls %10.1f us %9.2f us each\n", one.name,
                                    one.calls, one.us, each);
    operations.push_back(
        {{"name", one.name}, {"calls", one.calls}, {"us", one.us}, {"us_each", each}});
  }
  return operations;
}

}  // namespace

absl::StatusOr<ordered_json> RunStepBench(const StepBenchFlags& flags) {
  ISTHMUS_ASSIGN_OR_RETURN(const RandomModelOptions options, OptionsOf(flags));
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<RankModels> models,
                           RankModels::Create(options, flags.is_rank_alone));
  const RandomModel& model = models->first();
  ISTHMUS_ASSIGN_OR_RETURN(const PatchSet patches,
                           PatchSet::Resolve(kernels::AllPatches(), flags.patches));
  const std::string communication = flags.tp == 1                  ? "none"
                                    : !models->has_communication() ? "none: one rank alone"
                                    : models->has_nccl()           ? "peer memory, NCCL"
                                                                   : "peer memory";
  ordered_json record = {{"bench", "step"},
                         {"device", model.device().properties().name},
                         {"shape", flags.shape},
                         {"layers", flags.layers},
                         {"tp", flags.tp},
                         {"communication", communication},
                         {"batch", flags.batch},
                         {"context", flags.context},
                         {"arithmetic", flags.arithmetic},
                         {"experts", flags.experts},
                         {"index_keys", flags.index_keys},
                         {"batch_invariant", flags.batch_invariant},
                         {"patches", patches.Describe()}};
  std::cout << absl::StreamFormat(
      "%s, %s, %d layers, tp %d (communication: %s), batch %d, context %d, %s, experts %s\n",
      model.device().properties().name, flags.shape, flags.layers, flags.tp, communication,
      flags.batch, flags.context, flags.arithmetic, flags.experts);
  StepCost cost;
  ISTHMUS_RETURN_IF_ERROR(
      models->ForEach([&](size_t rank, const RandomModel& of_rank) -> absl::Status {
        ISTHMUS_ASSIGN_OR_RETURN(StepCost found, CostOf(of_rank, patches));
        if (rank == 0) cost = std::move(found);
        return absl::OkStatus();
      }));
  PrintCost(model, cost);
  record["touched_experts"] = cost.touched_experts;
  record["bytes"] = {{"routed", cost.routed_bytes},
                     {"other_weights", cost.other_weight_bytes},
                     {"caches", cost.cache_bytes},
                     {"all", cost.bytes()}};
  record["floor_ms"] = cost.floor_ms();
  record["floor_bytes_per_s"] = kReadRate;
  if (flags.is_ladder) {
    ISTHMUS_ASSIGN_OR_RETURN(record["ladder"], ClimbLadder(*models, flags, cost));
    return record;
  }
  ISTHMUS_ASSIGN_OR_RETURN(const StepTime time, TimeStep(*models, flags, patches));
  record["step"] = Describe(time, flags, cost, "step");
  record["workspace_bytes"] = model.device().workspace_bytes();
  if (!flags.has_operations) return record;
  ISTHMUS_ASSIGN_OR_RETURN(record["operations"], MeasureOperations(*models, flags, patches));
  return record;
}

}  // namespace isthmus::diag
