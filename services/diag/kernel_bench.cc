// SPDX-License-Identifier: Apache-2.0
// isthmus-diag bench kernel.
#include "services/diag/kernel_bench.h"

#include <iostream>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/patches.h"
#include "services/base/status_macros.h"
#include "services/diag/device_timing.h"
#include "services/diag/kernel_cases.h"
#include "services/diag/local_engine.h"
#include "services/diag/step_cost.h"
#include "services/model/flash_config.h"

namespace isthmus::diag {
namespace {

using nlohmann::ordered_json;

// A way to run a case: nothing on, or one patch.
struct Choice {
  std::string name;
  PatchSet patches = {};
  kernels::DeviceGraph graph = {};
  std::vector<double> us = {};  // Per call.
};

absl::StatusOr<PatchSet> OnlyOn(absl::string_view name) {
  std::map<std::string, bool> config;
  for (const Patch* patch : kernels::AllPatches()) {
    config[std::string(patch->name)] = patch->name == name;
  }
  return PatchSet::Resolve(kernels::AllPatches(), config);
}

absl::StatusOr<std::vector<Choice>> ChoicesOf(const KernelCase& one, uint32_t phase,
                                              bool has_trusted) {
  std::vector<Choice> choices;
  if (has_trusted && one.has_trusted) choices.push_back({.name = "trusted"});
  for (const Patch* patch : kernels::AllPatches()) {
    for (const std::string& prefix : one.patch_prefixes) {
      if (!absl::StartsWith(patch->name, prefix) || (patch->phases & phase) == 0) continue;
      choices.push_back({.name = std::string(patch->name)});
    }
  }
  for (Choice& choice : choices) {
    ISTHMUS_ASSIGN_OR_RETURN(choice.patches, OnlyOn(choice.name));
  }
  return choices;
}

absl::StatusOr<ordered_json> TimeCase(const KernelCase& one, const RandomModel& model,
                                      const CacheFlush& flush, const KernelBenchFlags& flags) {
  kernels::Exec exec = model.exec();
  ISTHMUS_ASSIGN_OR_RETURN(std::vector<Choice> choices,
                           ChoicesOf(one, exec.phase, flags.has_trusted));
  for (Choice& choice : choices) {
    exec.patches = &choice.patches;
    const auto chain = [&]() -> absl::Status {
      for (const auto& call : one.calls) ISTHMUS_RETURN_IF_ERROR(call(exec));
      return absl::OkStatus();
    };
    ISTHMUS_ASSIGN_OR_RETURN(choice.graph, CaptureGraph(chain, model.device().stream()));
  }
  const auto num_calls = static_cast<double>(one.calls.size());
  for (int round = 0; round < flags.rounds; ++round) {
    for (Choice& choice : choices) {
      ISTHMUS_ASSIGN_OR_RETURN(const std::vector<double> times,
                               TimeReplays(choice.graph, exec, model.device().stream(), &flush,
                                           flags.replays, flags.seconds));
      for (const double ms : times) choice.us.push_back(ms * 1e3 / num_calls);
    }
  }
  const double floor_us = static_cast<double>(one.bytes) / kReadRate * 1e6;
  ordered_json results = ordered_json::array();
  for (const Choice& choice : choices) {
    const double us = MedianOf(choice.us);
    const double tflops = static_cast<double>(one.operations) / us / 1e6;
    std::cout << absl::StreamFormat(
        "%-18s B %-4d %-34s %9.2f us a call, %7.1f GB/s, %6.1f TFLOP/s, %5.1f %% of the floor of "
        "%.2f us\n",
        one.name, flags.batch, choice.name, us, static_cast<double>(one.bytes) / us / 1e3, tflops,
        floor_us / us * 100.0, floor_us);
    std::cout.flush();
    results.push_back({{"path", choice.name},
                       {"us", us},
                       {"share_of_floor", floor_us / us},
                       {"tflops", tflops},
                       {"graph_nodes", choice.graph.num_nodes()}});
  }
  return ordered_json{{"operation", one.name}, {"calls_in_chain", one.calls.size()},
                      {"bytes", one.bytes},    {"operations", one.operations},
                      {"floor_us", floor_us},  {"results", std::move(results)}};
}

absl::StatusOr<RandomModelOptions> OptionsOf(const KernelBenchFlags& flags) {
  RandomModelOptions options;
  if (flags.layers < 1 || flags.layers > 43 || flags.batch < 1 || flags.context < 1 ||
      flags.rows < 1) {
    return absl::InvalidArgumentError(absl::StrCat("layers ", flags.layers, " (1 to 43), batch ",
                                                   flags.batch, ", context ", flags.context,
                                                   ", rows ", flags.rows, ": one is out of range"));
  }
  options.config =
      flags.shape == "miniature" ? MiniatureConfig(flags.layers) : model::FlashConfig(flags.layers);
  options.routed =
      flags.experts == "mxfp4" ? kernels::WeightFormat::kMxfp4 : kernels::WeightFormat::kNvfp4;
  ISTHMUS_ASSIGN_OR_RETURN(options.arithmetic, ParseArithmetic(flags.arithmetic));
  ISTHMUS_ASSIGN_OR_RETURN(options.device, model::ParseDevice(flags.device));
  ISTHMUS_ASSIGN_OR_RETURN(options.index_key_format,
                           KeyFormatOf(flags.index_keys, options.arithmetic));
  options.ranks = flags.tp;
  options.batch = flags.batch;
  options.context = flags.context;
  options.rows = flags.rows;
  return options;
}

}  // namespace

std::string KernelNames() { return absl::StrJoin(CaseNames(), ", "); }

absl::StatusOr<ordered_json> RunKernelBench(const KernelBenchFlags& flags) {
  ISTHMUS_ASSIGN_OR_RETURN(const RandomModelOptions options, OptionsOf(flags));
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<RandomModel> model, RandomModel::Create(options));
  ISTHMUS_ASSIGN_OR_RETURN(const CacheFlush flush, CacheFlush::Create());
  ordered_json record = {{"bench", "kernel"},
                         {"device", model->device().properties().name},
                         {"shape", flags.shape},
                         {"tp", flags.tp},
                         {"batch", flags.batch},
                         {"context", flags.context},
                         {"rows", flags.rows},
                         {"arithmetic", flags.arithmetic},
                         {"experts", flags.experts},
                         {"index_keys", flags.index_keys},
                         {"method", "chain of cold calls in one graph, L2 flushed"}};
  std::vector<std::string> names = {flags.operation};
  if (flags.operation == "all") names = CaseNames();
  ordered_json operations = ordered_json::array();
  for (const std::string& name : names) {
    CaseMemory memory(model->device().exec());
    ISTHMUS_ASSIGN_OR_RETURN(const KernelCase one, MakeCase(name, *model, &memory));
    if (one.calls.empty()) continue;
    ISTHMUS_ASSIGN_OR_RETURN(ordered_json result, TimeCase(one, *model, flush, flags));
    operations.push_back(std::move(result));
  }
  record["operations"] = std::move(operations);
  return record;
}

}  // namespace isthmus::diag
