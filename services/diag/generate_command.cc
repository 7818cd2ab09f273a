// SPDX-License-Identifier: Apache-2.0
// isthmus-diag generate: one reply, streamed to stdout; one line of figures on stderr.
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/status_macros.h"
#include "services/diag/chat.h"
#include "services/diag/commands.h"
#include "services/diag/dump.h"
#include "services/text/chat_json.h"

namespace isthmus::diag {
namespace {

struct GenerateFlags {
  std::string checkpoint;
  std::string message;
  std::optional<std::string> messages;
  std::optional<std::string> tokens;
  std::string arithmetic = "reference";
  std::string device = "cpu";
  std::vector<std::string> patches;
  bool thinking = false;
  bool json = false;
  engine::SamplingParams sampling;
  std::optional<int64_t> index_topk;
  int64_t chunk = 512;
  int64_t max_context = 65536;
  int threads = 0;
};

void PrintFigures(int64_t prompt_tokens, int64_t output_tokens, double ttft, double seconds) {
  const double decode = seconds - ttft;
  const double rate = decode > 0 ? static_cast<double>(output_tokens - 1) / decode : 0.0;
  std::cerr << absl::StrFormat(
      "prompt_tokens=%d output_tokens=%d ttft_ms=%.1f decode_tokens_per_s=%.1f\n", prompt_tokens,
      output_tokens, 1000 * ttft, rate);
}

absl::Status GenerateFromTokens(LocalEngine& local, const GenerateFlags& flags) {
  // NOLINTNEXTLINE(bugprone-unchecked-optional-access): the caller saw that it is given.
  ISTHMUS_ASSIGN_OR_RETURN(std::vector<int32_t> prompt, ReadTokenFile(*flags.tokens));
  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  std::vector<int32_t> output;
  ISTHMUS_ASSIGN_OR_RETURN(const TokenRun run,
                           RunTokens(local, std::move(prompt), flags.sampling, [&](int32_t token) {
                             output.push_back(token);
                             if (!flags.json)
                               std::cout << (output.size() == 1 ? "" : " ") << token << std::flush;
                           }));
  if (flags.json) {
    const nlohmann::ordered_json reply = {{"tokens", output},
                                          {"finish_reason", engine::FinishReasonName(run.finish)},
                                          {"usage",
                                           {{"prompt_tokens", prompt_tokens},
                                            {"completion_tokens", run.output_tokens},
                                            {"total_tokens", prompt_tokens + run.output_tokens}}}};
    std::cout << reply.dump();
  }
  std::cout << "\n";
  PrintFigures(prompt_tokens, run.output_tokens, run.ttft_seconds, run.seconds);
  return absl::OkStatus();
}

absl::StatusOr<nlohmann::ordered_json> ReadBody(const GenerateFlags& flags) {
  if (!flags.messages.has_value()) {
    return nlohmann::ordered_json{{"messages", {{{"role", "user"}, {"content", flags.message}}}}};
  }
  std::ifstream file(*flags.messages);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read \"", *flags.messages, "\""));
  std::stringstream text;
  text << file.rdbuf();
  return text::ParseChatJson(*flags.messages, text.str());
}

absl::Status GenerateFromChat(LocalEngine& local, const GenerateFlags& flags) {
  ChatRequest request;
  ISTHMUS_ASSIGN_OR_RETURN(request.body, ReadBody(flags));
  request.thinking = flags.thinking;
  request.sampling = flags.sampling;
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<LocalChat> chat,
                           LocalChat::Create(&local, flags.checkpoint));
  ISTHMUS_ASSIGN_OR_RETURN(const ChatReply reply, chat->Chat(request, [&](absl::string_view text) {
    if (!flags.json) std::cout << text << std::flush;
  }));
  if (flags.json) std::cout << ReplyJson(reply).dump();
  std::cout << "\n";
  PrintFigures(reply.prompt_tokens, reply.output_tokens, reply.ttft_seconds, reply.seconds);
  return absl::OkStatus();
}

// CLI11 alone would take -1 and what exceeds 64 bits for the largest number.
std::string SeedProblem(const std::string& text) {
  uint64_t seed = 0;
  if (absl::SimpleAtoi(text, &seed)) return "";
  return absl::StrCat("\"", text, "\" is not a number from 0 to 18446744073709551615");
}

absl::Status RunGenerate(const GenerateFlags& flags) {
  LocalEngineOptions options;
  options.checkpoint = flags.checkpoint;
  ISTHMUS_ASSIGN_OR_RETURN(options.arithmetic, ParseArithmetic(flags.arithmetic));
  options.device = flags.device;
  ISTHMUS_RETURN_IF_ERROR(ParseSwitches(flags.patches, &options.patches));
  options.index_topk = flags.index_topk;
  options.chunk_tokens = flags.chunk;
  options.max_tokens = flags.max_context;
  options.max_sequences = 1;
  options.threads = flags.threads;
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<LocalEngine> local, LocalEngine::Create(options));
  ISTHMUS_RETURN_IF_ERROR(flags.tokens.has_value() ? GenerateFromTokens(*local, flags)
                                                   : GenerateFromChat(*local, flags));
  // A reply that did not arrive is no success: a full disk, a closed pipe.
  if (!std::cout.flush()) return absl::UnavailableError("stdout: cannot write the whole reply");
  return absl::OkStatus();
}

}  // namespace

void AddGenerateCommand(CLI::App& app, absl::Status& status) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* command = app.add_subcommand("generate", "Generate one reply with a local engine");
  command->add_option("--checkpoint", flags->checkpoint, "Checkpoint directory")->required();
  CLI::Option_group* input = command->add_option_group("input", "What to reply to");
  input->add_option("--message", flags->message, "Text of one user message");
  input->add_option("--messages", flags->messages,
                    "File in the form of the OpenAI API: {\"messages\": [...], \"tools\": [...]}");
  input->add_option("--tokens", flags->tokens, "File of decimal token ids");
  input->require_option(1);
  command->add_flag("--thinking", flags->thinking, "Let the model reason first");
  command->add_option("--arithmetic", flags->arithmetic, "math or reference")
      ->capture_default_str();
  command->add_option("--device", flags->device, "cpu or cuda:<number>")->capture_default_str();
  command->add_option("--patches", flags->patches, "name=on or name=off, separated by commas")
      ->delimiter(',');
  command->add_option("--max-tokens", flags->sampling.max_tokens, "Most output tokens")
      ->capture_default_str();
  command->add_option("--temperature", flags->sampling.temperature, "0: greedy")
      ->capture_default_str();
  command->add_option("--top-p", flags->sampling.top_p, "In (0, 1]")->capture_default_str();
  command->add_option("--top-k", flags->sampling.top_k, "0: no limit")->capture_default_str();
  command->add_option("--seed", flags->sampling.seed, "Of the sampler")
      ->check(SeedProblem)
      ->capture_default_str();
  command
      ->add_option("--index-topk", flags->index_topk,
                   "Entries that the indexer chooses, instead of the checkpoint's")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  command->add_option("--chunk", flags->chunk, "Prompt tokens in one step")
      ->check(CLI::Range(int64_t{1}, int64_t{65536}))
      ->capture_default_str();
  command->add_option("--max-context", flags->max_context, "Tokens that the cache has room for")
      ->check(CLI::Range(int64_t{256}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "0: one per processor")
      ->check(CLI::Range(0, 256))
      ->capture_default_str();
  command->add_flag("--json", flags->json, "Print the parsed message as JSON");
  command->callback([flags, &status] { status = RunGenerate(*flags); });
}

}  // namespace isthmus::diag
