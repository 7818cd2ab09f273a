// SPDX-License-Identifier: Apache-2.0
#include <iostream>
#include <memory>

#include "CLI/CLI.hpp"
#include "services/base/status_macros.h"
#include "services/diag/commands.h"
#include "services/diag/dump.h"
#include "services/diag/local_engine.h"

namespace isthmus::diag {
namespace {

struct DumpFlags {
  std::string checkpoint;
  std::string tokens;
  std::string arithmetic = "reference";
  std::string device = "cpu";
  std::vector<std::string> patches;
  std::string set = "golden";
  std::string input_streams;
  std::string out;
  int64_t chunk = 0;
  int64_t decode = 0;
  int threads = 0;
};

absl::Status RunDumpCommand(const DumpFlags& flags) {
  DumpOptions options;
  ISTHMUS_ASSIGN_OR_RETURN(options.tokens, ReadTokenFile(flags.tokens));
  ISTHMUS_ASSIGN_OR_RETURN(options.set, ParseDumpSet(flags.set));
  options.chunk_tokens = flags.chunk;
  options.decode_tokens = flags.decode;
  options.input_streams = flags.input_streams;
  LocalEngineOptions engine;
  engine.checkpoint = flags.checkpoint;
  ISTHMUS_ASSIGN_OR_RETURN(engine.arithmetic, ParseArithmetic(flags.arithmetic));
  engine.device = flags.device;
  ISTHMUS_RETURN_IF_ERROR(ParseSwitches(flags.patches, &engine.patches));
  engine.max_tokens = std::max<int64_t>(static_cast<int64_t>(options.tokens.size()), 1);
  engine.max_sequences = 1;
  engine.threads = flags.threads;
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<LocalEngine> local, LocalEngine::Create(engine));
  ISTHMUS_ASSIGN_OR_RETURN(const Dump dump, RunDump(*local, options));
  ISTHMUS_RETURN_IF_ERROR(WriteDump(flags.out, dump, flags.arithmetic));
  std::cerr << "wrote " << dump.size() << " tensors of " << options.tokens.size() << " tokens to "
            << flags.out << "\n";
  return absl::OkStatus();
}

}  // namespace

void AddDumpCommand(CLI::App& app, absl::Status& status) {
  auto flags = std::make_shared<DumpFlags>();
  CLI::App* command =
      app.add_subcommand("dump", "Write every intermediate of a forward pass as safetensors");
  command->add_option("--checkpoint", flags->checkpoint, "Checkpoint directory")->required();
  command->add_option("--tokens", flags->tokens, "File of decimal token ids")->required();
  command->add_option("--arithmetic", flags->arithmetic, "math or reference")
      ->capture_default_str();
  command->add_option("--device", flags->device, "cpu or cuda:<number>")->capture_default_str();
  command->add_option("--patches", flags->patches, "name=on or name=off, separated by commas")
      ->delimiter(',');
  command->add_option("--set", flags->set, "golden, layers, stages or cache")
      ->capture_default_str();
  command->add_option("--chunk", flags->chunk, "Tokens in one step; 0: the whole prompt")
      ->capture_default_str();
  command->add_option("--decode", flags->decode, "Feed the last N tokens one at a time")
      ->capture_default_str();
  command->add_option("--input-streams", flags->input_streams,
                      "File with layerN.streams; layer N + 1 starts from it");
  command->add_option("--threads", flags->threads, "0: one per processor")
      ->check(CLI::Range(0, 256))
      ->capture_default_str();
  command->add_option("--out", flags->out, "File to write")->required();
  command->callback([flags, &status] { status = RunDumpCommand(*flags); });
}

}  // namespace isthmus::diag
