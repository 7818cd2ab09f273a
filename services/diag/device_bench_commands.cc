// SPDX-License-Identifier: Apache-2.0
// The subcommands of isthmus-diag bench that run on a GPU, and the list of patches.
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/patches.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"
#include "services/base/version.h"
#include "services/diag/all_reduce_bench.h"
#include "services/diag/commands.h"
#include "services/diag/kernel_bench.h"
#include "services/diag/local_engine.h"
#include "services/diag/sampling_bench.h"
#include "services/diag/step_bench.h"

namespace isthmus::diag {
namespace {

using nlohmann::ordered_json;

absl::Status WriteRecord(ordered_json record, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  record["version"] = std::string(SemanticVersion());
  record["date"] = absl::FormatTime(absl::RFC3339_sec, RealClock().Now(), absl::UTCTimeZone());
  std::ofstream file(path);
  file << record.dump(1) << "\n";
  file.flush();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

absl::Status RunStep(StepBenchFlags flags, const std::vector<std::string>& switches,
                     const std::string& json) {
  ISTHMUS_RETURN_IF_ERROR(ParseSwitches(switches, &flags.patches));
  ISTHMUS_ASSIGN_OR_RETURN(const ordered_json record, RunStepBench(flags));
  return WriteRecord(record, json);
}

void AddStepCommand(CLI::App* bench, absl::Status& status) {
  auto flags = std::make_shared<StepBenchFlags>();
  auto json = std::make_shared<std::string>();
  auto switches = std::make_shared<std::vector<std::string>>();
  CLI::App* command =
      bench->add_subcommand("step", "One decode step with random weights of real sizes, on a GPU");
  command->add_option("--shape", flags->shape, "v4-flash or miniature")->capture_default_str();
  command->add_option("--layers", flags->layers, "1 to 43")->capture_default_str();
  command->add_option("--tp", flags->tp, "Ranks, on a device each where there are as many")
      ->capture_default_str();
  command->add_flag("--rank-only", flags->is_rank_alone,
                    "One rank's share alone, without communication");
  command->add_option("--batch", flags->batch, "Sequences")->capture_default_str();
  command->add_option("--context", flags->context, "Tokens that each has cached")
      ->capture_default_str();
  command->add_option("--arithmetic", flags->arithmetic, "math or reference")
      ->capture_default_str();
  command->add_option("--experts", flags->experts, "nvfp4 or mxfp4")->capture_default_str();
  command
      ->add_option("--index-keys", flags->index_keys, "default, as the arithmetic has, or a format")
      ->capture_default_str();
  command->add_option("--device", flags->device, "cuda:<number>")->capture_default_str();
  command->add_option("--replays", flags->replays, "Timed replays, from 3")->capture_default_str();
  command->add_option("--seconds", flags->seconds, "For the replays of one set of patches, at most")
      ->capture_default_str();
  command->add_flag("--batch-invariant", flags->batch_invariant, "Fixed splits and tiles");
  command->add_flag("--operations,!--no-operations", flags->has_operations,
                    "Time each operation as well");
  command->add_flag("--ladder", flags->is_ladder,
                    "From all patches off to all on, one by one; those given as off stay off");
  command->add_option("--patches", *switches, "name=on, name=off, or all=on, all=off; repeatable")
      ->delimiter(',');
  command->add_option("--json", *json, "File for the record");
  command->callback(
      [flags, json, switches, &status] { status = RunStep(*flags, *switches, *json); });
}

absl::Status RunKernel(const KernelBenchFlags& flags, const std::string& json) {
  ISTHMUS_ASSIGN_OR_RETURN(const ordered_json record, RunKernelBench(flags));
  return WriteRecord(record, json);
}

void AddKernelCommand(CLI::App* bench, absl::Status& status) {
  auto flags = std::make_shared<KernelBenchFlags>();
  auto json = std::make_shared<std::string>();
  CLI::App* command = bench->add_subcommand(
      "kernel", "One operation, cold, in a chain: the trusted path and each patch, on a GPU");
  command->add_option("operation", flags->operation, absl::StrCat("all, ", KernelNames()))
      ->required();
  command->add_option("--shape", flags->shape, "v4-flash or miniature")->capture_default_str();
  command->add_option("--layers", flags->layers, "A call of the chain for each that has it")
      ->capture_default_str();
  command->add_option("--tp", flags->tp, "Ranks; the share of one runs")->capture_default_str();
  command->add_option("--batch", flags->batch, "Sequences")->capture_default_str();
  command->add_option("--context", flags->context, "Tokens that each has cached")
      ->capture_default_str();
  command->add_option("--arithmetic", flags->arithmetic, "math or reference")
      ->capture_default_str();
  command->add_option("--experts", flags->experts, "nvfp4 or mxfp4")->capture_default_str();
  command
      ->add_option("--index-keys", flags->index_keys, "default, as the arithmetic has, or a format")
      ->capture_default_str();
  command->add_option("--device", flags->device, "cuda:<number>")->capture_default_str();
  command->add_option("--rows", flags->rows, "New tokens of each sequence; from 2: prefill")
      ->capture_default_str();
  command->add_flag("--trusted,!--no-trusted", flags->has_trusted, "Time the trusted path as well");
  command->add_option("--rounds", flags->rounds, "Interleaved")->capture_default_str();
  command->add_option("--replays", flags->replays, "In each round")->capture_default_str();
  command->add_option("--seconds", flags->seconds, "For the replays of one path, at most")
      ->capture_default_str();
  command->add_option("--json", *json, "File for the record");
  command->callback([flags, json, &status] { status = RunKernel(*flags, *json); });
}

absl::Status RunAllReduce(const AllReduceBenchFlags& flags, const std::string& json) {
  ISTHMUS_ASSIGN_OR_RETURN(const ordered_json record, RunAllReduceBench(flags));
  return WriteRecord(record, json);
}

void AddAllReduceCommand(CLI::App* bench, absl::Status& status) {
  auto flags = std::make_shared<AllReduceBenchFlags>();
  auto json = std::make_shared<std::string>();
  CLI::App* command =
      bench->add_subcommand("all-reduce", "Sums over GPUs: the patch against NCCL, by size");
  command->add_option("--tp", flags->ranks, "Ranks, a GPU each")->capture_default_str();
  command->add_option("--rows", flags->rows, "Of --hidden bf16 numbers; several by commas")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--hidden", flags->hidden, "Numbers of a row")->capture_default_str();
  command->add_option("--calls", flags->calls, "In one graph")->capture_default_str();
  command->add_option("--rounds", flags->rounds, "Interleaved")->capture_default_str();
  command->add_option("--replays", flags->replays, "In each round")->capture_default_str();
  command->add_option("--json", *json, "File for the record");
  command->callback([flags, json, &status] { status = RunAllReduce(*flags, *json); });
}

absl::Status RunSampling(const SamplingBenchFlags& flags, const std::string& json) {
  ISTHMUS_ASSIGN_OR_RETURN(const ordered_json record, RunSamplingBench(flags));
  return WriteRecord(record, json);
}

void AddSamplingCommand(CLI::App* bench, absl::Status& status) {
  auto flags = std::make_shared<SamplingBenchFlags>();
  auto json = std::make_shared<std::string>();
  CLI::App* command =
      bench->add_subcommand("sampling", "Tokens from a step's logits: on a GPU against the host");
  command->add_option("--rows", flags->rows, "Sequences; several by commas")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--vocabulary", flags->vocabulary, "Logits of a row")->capture_default_str();
  command->add_option("--device", flags->device, "cuda:<number>")->capture_default_str();
  command->add_option("--threads", flags->threads, "Of the host; 0: one per processor")
      ->capture_default_str();
  command->add_option("--rounds", flags->rounds, "Timed")->capture_default_str();
  command->add_option("--json", *json, "File for the record");
  command->callback([flags, json, &status] { status = RunSampling(*flags, *json); });
}

}  // namespace

void AddDeviceBenchCommands(CLI::App* bench, absl::Status& status) {
  AddStepCommand(bench, status);
  AddAllReduceCommand(bench, status);
  AddKernelCommand(bench, status);
  AddSamplingCommand(bench, status);
}

void AddPatchesCommand(CLI::App& app) {
  CLI::App* command = app.add_subcommand("patches", "List the patches of this build");
  command->callback([] {
    for (const Patch* patch : kernels::AllPatches()) {
      std::cout << patch->name << (patch->default_on ? " (on)\n  " : " (off)\n  ") << patch->summary
                << "\n  " << patch->decision << "\n";
    }
  });
}

}  // namespace isthmus::diag
