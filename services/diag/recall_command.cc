// SPDX-License-Identifier: Apache-2.0
// isthmus-diag recall: cases with known answers, on a local engine or through a router.
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/status_macros.h"
#include "services/diag/chat.h"
#include "services/diag/commands.h"
#include "services/diag/recall.h"
#ifdef ISTHMUS_WITH_RPC
#include "services/diag/cluster_chat.h"
#endif

namespace isthmus::diag {
namespace {

struct RecallFlags {
  std::string checkpoint;
  std::string cases;
  std::string server;
  std::string json;
  std::optional<int64_t> index_topk;
  std::string index_keys = "default";
  std::string device = "cpu";
  std::vector<std::string> patches;
  int64_t limit = 0;
  int threads = 0;
};

// A backend and what it needs to live.
struct Backend {
  std::unique_ptr<LocalEngine> local;
  std::unique_ptr<LocalChat> chat;
  ChatBackend run;
};

absl::StatusOr<Backend> OpenBackend(const RecallFlags& flags) {
  Backend backend;
  if (!flags.server.empty()) {
#ifdef ISTHMUS_WITH_RPC
    backend.run = ConnectClusterChat(flags.server);
    return backend;
#else
    return absl::UnimplementedError("this isthmus-diag was built with ISTHMUS_WITH_RPC=OFF");
#endif
  }
  LocalEngineOptions options;
  options.checkpoint = flags.checkpoint;
  options.index_topk = flags.index_topk;
  options.index_key_format = flags.index_keys;
  options.device = flags.device;
  ISTHMUS_RETURN_IF_ERROR(ParseSwitches(flags.patches, &options.patches));
  options.max_sequences = 1;
  options.threads = flags.threads;
  ISTHMUS_ASSIGN_OR_RETURN(backend.local, LocalEngine::Create(options));
  ISTHMUS_ASSIGN_OR_RETURN(backend.chat, LocalChat::Create(backend.local.get(), flags.checkpoint));
  backend.run = [chat = backend.chat.get()](const ChatRequest& request, const auto& on_text) {
    return chat->Chat(request, on_text);
  };
  return backend;
}

absl::Status RunRecall(const RecallFlags& flags) {
  if (flags.checkpoint.empty() == flags.server.empty()) {
    return absl::InvalidArgumentError("give either --checkpoint or --server");
  }
  if (!flags.server.empty() && flags.index_topk.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--index-topk is ", *flags.index_topk,
                     ", but behind --server the workers' model.index_topk decides"));
  }
  const bool is_default =
      flags.index_keys == "default" && flags.device == "cpu" && flags.patches.empty();
  if (!flags.server.empty() && !is_default) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--index-keys is ", flags.index_keys, ", --device ", flags.device, ", --patches has ",
        flags.patches.size(), ", but behind --server the workers' configuration decides"));
  }
  ISTHMUS_ASSIGN_OR_RETURN(const nlohmann::ordered_json cases, ReadCases(flags.cases));
  ISTHMUS_ASSIGN_OR_RETURN(const Backend backend, OpenBackend(flags));
  const size_t count =
      flags.limit > 0 ? std::min(cases.size(), static_cast<size_t>(flags.limit)) : cases.size();
  std::vector<CaseResult> results;
  size_t passed = 0;
  for (size_t i = 0; i < count; ++i) {
    ISTHMUS_ASSIGN_OR_RETURN(CaseResult result, RunCase(backend.run, cases[i]));
    passed += result.passed ? 1 : 0;
    std::cerr << absl::StrFormat("[%d/%d] %-28s %s  %6d tokens  %6.2f s\n", i + 1, count, result.id,
                                 result.passed ? "passed" : "FAILED", result.tokens,
                                 result.seconds);
    results.push_back(std::move(result));
  }
  std::ofstream file(flags.json);
  file << ResultsJson(results).dump(1) << "\n";
  if (!file.flush()) return absl::UnavailableError(absl::StrCat("cannot write ", flags.json));
  std::cout << passed << " of " << count << " passed\n";
  if (passed == count) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(count - passed, " of ", count, " cases failed"));
}

}  // namespace

void AddRecallCommand(CLI::App& app, absl::Status& status) {
  auto flags = std::make_shared<RecallFlags>();
  CLI::App* command = app.add_subcommand("recall", "Run cases whose answers are known");
  command->add_option("--checkpoint", flags->checkpoint, "Checkpoint directory: run locally");
  command->add_option("--server", flags->server, "host:port of a router");
  command->add_option("--cases", flags->cases, "JSON file with a list of cases")->required();
  command
      ->add_option("--index-topk", flags->index_topk,
                   "Entries that the indexer chooses, instead of the checkpoint's")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  command
      ->add_option("--index-keys", flags->index_keys, "How index keys are stored: fp8, bf16, ...")
      ->capture_default_str();
  command->add_option("--device", flags->device, "cpu or cuda:<number>")->capture_default_str();
  command->add_option("--patches", flags->patches, "name=on or name=off, separated by commas")
      ->delimiter(',');
  command->add_option("--limit", flags->limit, "Run the first N cases; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "0: one per processor")
      ->check(CLI::Range(0, 256))
      ->capture_default_str();
  command->add_option("--json", flags->json, "File for the results")->required();
  command->callback([flags, &status] { status = RunRecall(*flags); });
}

}  // namespace isthmus::diag
