// SPDX-License-Identifier: Apache-2.0
// isthmus-diag generate: one reply, streamed to stdout; one line of figures on stderr.
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/status_macros.h"
#include "services/diag/chat.h"
#include "services/diag/commands.h"
#include "services/diag/dump.h"
#include "services/diag/generate_sampling.h"
#include "services/engine/image_file.h"
#include "services/engine/sequence_image.h"
#include "services/text/chat_json.h"

namespace isthmus::diag {
namespace {

struct GenerateFlags {
  std::string checkpoint;
  std::string message;
  std::optional<std::string> messages;
  std::optional<std::string> tokens;
  std::optional<std::string> restore;
  std::optional<std::string> save;
  std::string arithmetic = "reference";
  std::string device = "cpu";
  std::vector<std::string> patches;
  bool thinking = false;
  bool json = false;
  GenerateSampling sampling;
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

engine::ImageTerms TermsOf(const LocalEngine& local) {
  engine::ImageTerms terms;
  terms.weight_fingerprint = local.weights().fingerprint();
  return terms;
}

nlohmann::ordered_json LogprobJson(const kernels::TokenLogprob& token) {
  return {{"token", token.id}, {"logprob", token.logprob}};
}

nlohmann::ordered_json LogprobsJson(const std::vector<kernels::TokenLogprobs>& tokens) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const kernels::TokenLogprobs& token : tokens) {
    nlohmann::ordered_json one = LogprobJson(token.chosen);
    one["rank"] = token.rank;
    one["top"] = nlohmann::ordered_json::array();
    for (const kernels::TokenLogprob& top : token.top) one["top"].push_back(LogprobJson(top));
    all.push_back(std::move(one));
  }
  return all;
}

// Of a sequence that has ended: saves it, when that was asked for, and adds to its `reply` what was
// wanted beside the tokens.
SequenceEnd EndOf(LocalEngine& local, const GenerateFlags& flags, nlohmann::ordered_json* reply) {
  return [&local, &flags, reply](const engine::Sequence& sequence) -> absl::Status {
    if (sequence.sampling.top_logprobs.has_value()) {
      (*reply)["logprobs"] = LogprobsJson(sequence.logprobs);
    }
    if (sequence.sampling.top_prompt_logprobs.has_value()) {
      (*reply)["prompt_logprobs"] = LogprobsJson(sequence.prompt_logprobs);
    }
    if (!flags.save.has_value()) return absl::OkStatus();
    ISTHMUS_ASSIGN_OR_RETURN(const std::vector<std::byte> image,
                             WriteSequenceImage(sequence, local.pool(), TermsOf(local)));
    return engine::SaveImageFile(*flags.save, image);
  };
}

// The saved sequence, with more tokens to go when more were asked for.
absl::StatusOr<engine::Sequence> Restore(LocalEngine& local, const GenerateFlags& flags) {
  // NOLINTNEXTLINE(bugprone-unchecked-optional-access): the caller saw that it is given.
  const std::string& path = *flags.restore;
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<std::byte> image,
                           engine::LoadImageFile(path, local.pool().layout(), TermsOf(local)));
  absl::StatusOr<engine::Sequence> sequence =
      RestoreSequence(image, local.engine(), TermsOf(local));
  if (!sequence.ok()) {
    return absl::Status(sequence.status().code(),
                        absl::StrCat(path, ": ", sequence.status().message()));
  }
  if (flags.sampling.has_max_tokens) {
    sequence->sampling.max_tokens = flags.sampling.params.max_tokens;
  }
  const bool has_room = sequence->num_output_tokens() < sequence->sampling.max_tokens;
  if (sequence->finish == engine::FinishReason::kLength && has_room) {
    sequence->finish = engine::FinishReason::kNone;
  }
  return sequence;
}

absl::Status GenerateTokens(LocalEngine& local, const GenerateFlags& flags,
                            const engine::SamplingParams& sampling) {
  std::vector<int32_t> output;
  nlohmann::ordered_json further = nlohmann::ordered_json::object();
  const auto on_token = [&](int32_t token) {
    output.push_back(token);
    if (!flags.json) std::cout << (output.size() == 1 ? "" : " ") << token << std::flush;
    return true;
  };
  int64_t prompt_tokens = 0;
  TokenRun run;
  if (flags.restore.has_value()) {
    ISTHMUS_ASSIGN_OR_RETURN(engine::Sequence sequence, Restore(local, flags));
    prompt_tokens = sequence.num_prompt_tokens;
    ISTHMUS_ASSIGN_OR_RETURN(
        run, RunSequence(local, std::move(sequence), on_token, EndOf(local, flags, &further)));
  } else {
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): one of the two is given.
    ISTHMUS_ASSIGN_OR_RETURN(std::vector<int32_t> prompt, ReadTokenFile(*flags.tokens));
    prompt_tokens = static_cast<int64_t>(prompt.size());
    ISTHMUS_ASSIGN_OR_RETURN(run, RunTokens(local, std::move(prompt), sampling, on_token,
                                            EndOf(local, flags, &further)));
  }
  if (flags.json) {
    nlohmann::ordered_json reply = {{"tokens", output},
                                    {"finish_reason", engine::FinishReasonName(run.finish)},
                                    {"usage",
                                     {{"prompt_tokens", prompt_tokens},
                                      {"completion_tokens", run.output_tokens},
                                      {"total_tokens", prompt_tokens + run.output_tokens}}}};
    reply.update(further);
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

absl::Status GenerateFromChat(LocalEngine& local, const GenerateFlags& flags,
                              const engine::SamplingParams& sampling) {
  ChatRequest request;
  ISTHMUS_ASSIGN_OR_RETURN(request.body, ReadBody(flags));
  request.thinking = flags.thinking;
  request.sampling = sampling;
  request.stops = flags.sampling.stops;
  request.keeps_stop = flags.sampling.keeps_stop;
  nlohmann::ordered_json further = nlohmann::ordered_json::object();
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<LocalChat> chat,
                           LocalChat::Create(&local, flags.checkpoint));
  ISTHMUS_ASSIGN_OR_RETURN(const ChatReply reply, chat->Chat(
                                                      request,
                                                      [&](absl::string_view text) {
                                                        if (!flags.json)
                                                          std::cout << text << std::flush;
                                                      },
                                                      EndOf(local, flags, &further)));
  if (flags.json) {
    nlohmann::ordered_json json = ReplyJson(reply);
    json.update(further);
    std::cout << json.dump();
  }
  std::cout << "\n";
  PrintFigures(reply.prompt_tokens, reply.output_tokens, reply.ttft_seconds, reply.seconds);
  return absl::OkStatus();
}

absl::Status CheckFlags(const GenerateFlags& flags, bool has_tokens) {
  const engine::SamplingParams& params = flags.sampling.params;
  if (has_tokens && !flags.sampling.stops.empty()) {
    return absl::InvalidArgumentError("--stop: token ids have no text, use --stop-token");
  }
  if (flags.save.has_value() && flags.sampling.num_replies > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--save: takes one reply, --n is ", flags.sampling.num_replies));
  }
  if (!flags.json && (params.top_logprobs.has_value() || params.top_prompt_logprobs.has_value())) {
    return absl::InvalidArgumentError("--logprobs, --prompt-logprobs: are printed with --json");
  }
  return absl::OkStatus();
}

absl::Status RunGenerate(const GenerateFlags& flags) {
  const bool has_tokens = flags.tokens.has_value() || flags.restore.has_value();
  ISTHMUS_RETURN_IF_ERROR(CheckFlags(flags, has_tokens));
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
  for (int reply = 0; reply < flags.sampling.num_replies; ++reply) {
    ISTHMUS_ASSIGN_OR_RETURN(const engine::SamplingParams sampling,
                             ParamsOf(flags.sampling, reply));
    ISTHMUS_RETURN_IF_ERROR(has_tokens ? GenerateTokens(*local, flags, sampling)
                                       : GenerateFromChat(*local, flags, sampling));
  }
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
  CLI::Option* const restore = input->add_option(
      "--restore", flags->restore,
      "File that --save wrote: go on with it, and print the ids of what it gains");
  input->require_option(1);
  command->add_option("--save", flags->save, "Where to save the sequence when it has ended");
  command->add_flag("--thinking", flags->thinking, "Let the model reason first");
  command->add_option("--arithmetic", flags->arithmetic, "math or reference")
      ->capture_default_str();
  command->add_option("--device", flags->device, "cpu or cuda:<number>")->capture_default_str();
  command->add_option("--patches", flags->patches, "name=on or name=off, separated by commas")
      ->delimiter(',');
  AddSamplingFlags(command, restore, flags->sampling);
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
