// SPDX-License-Identifier: Apache-2.0
// isthmusctl: the client and the operator's tool.
//
// Exit codes: 0 done; 1 the cluster said no, or could not be asked, or (drain) something is left;
// 2 bad input: options, files, a request that the router calls invalid, a worker that it does not
// know. Answers go to stdout, figures and errors to stderr.
#include <google/protobuf/util/json_util.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/program.h"
#include "services/base/status_macros.h"
#include "services/ctl/sampling_flags.h"
#include "services/ctl/status_table.h"
#include "services/rpc/router_client.h"
#include "services/text/chat_json.h"

namespace isthmus::ctl {
namespace {

using Json = nlohmann::ordered_json;

struct Flags {
  std::string server = "127.0.0.1:7100";
  double timeout_seconds = 600;
  bool json = false;
  std::optional<std::string> message;
  std::optional<std::string> messages;
  std::string text;
  std::optional<std::string> tokens;
  bool thinking = false;
  std::string effort;
  std::string request_id;
  std::string cache_salt;
  SamplingFlags sampling;
  std::string priority = "normal";
  std::string worker;
  std::string wait = "60s";
  std::string reason = "isthmusctl drain";
};

v1::Priority PriorityOf(const Flags& flags) {
  if (flags.priority == "high") return v1::PRIORITY_HIGH;
  return flags.priority == "low" ? v1::PRIORITY_LOW : v1::PRIORITY_NORMAL;
}

absl::Duration TimeoutOf(const Flags& flags) { return absl::Seconds(flags.timeout_seconds); }

absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read \"", path, "\""));
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void PrintFigures(const v1::Finish& finish) {
  std::cerr << absl::StrFormat(
      "prompt_tokens=%d cached_prompt_tokens=%d output_tokens=%d ttft_ms=%.1f tokens_per_s=%.1f "
      "kv_bytes=%d "
      "digests_verified=%d\n",
      finish.usage().prompt_tokens(), finish.usage().cached_prompt_tokens(),
      finish.usage().output_tokens(), finish.timings().ttft_ms(), finish.timings().tokens_per_s(),
      finish.transfer().kv_bytes(), finish.transfer().digests_verified());
}

Json LogprobsJson(const v1::TokenLogprobs& logprobs) {
  Json json = {{"token", logprobs.chosen().token_id()},
               {"logprob", logprobs.chosen().logprob()},
               {"rank", logprobs.rank()},
               {"top", Json::array()}};
  for (const v1::TokenLogprob& one : logprobs.top()) {
    json["top"].push_back({{"token", one.token_id()}, {"logprob", one.logprob()}});
  }
  return json;
}

// How one reply ended.
void AddEnd(const v1::ReplyEnd& end, Json& out) {
  out["finish_reason"] = std::string(rpc::FinishReasonName(end.finish_reason()));
  if (end.has_stop_string()) out["stop"] = end.stop_string();
  if (end.has_stop_token_id()) out["stop"] = end.stop_token_id();
  out["seed"] = end.seed();
}

// The members that every --json output ends with, of the first reply where it is of one.
void AddFigures(const rpc::Outcome& outcome, Json& out) {
  const v1::Finish& finish = outcome.finish;
  const uint64_t prompt = finish.usage().prompt_tokens();
  const uint64_t output = finish.usage().output_tokens();
  AddEnd(outcome.ends.front(), out);
  out["usage"] = {
      {"prompt_tokens", prompt},
      {"prompt_tokens_details", {{"cached_tokens", finish.usage().cached_prompt_tokens()}}},
      {"completion_tokens", output},
      {"total_tokens", prompt + output}};
  out["timings"] = {{"ttft_ms", finish.timings().ttft_ms()},
                    {"tokens_per_s", finish.timings().tokens_per_s()}};
  out["transfer"] = {{"kv_bytes", finish.transfer().kv_bytes()},
                     {"digests_verified", finish.transfer().digests_verified()}};
  out["request_id"] = finish.request_id();
  for (const v1::TokenLogprobs& one : outcome.prompt_logprobs) {
    out["prompt_logprobs"].push_back(LogprobsJson(one));
  }
}

// One of several replies, beside its text.
void AddReply(const v1::ReplyEnd& end, Json reply, Json& out) {
  reply["index"] = end.reply_index();
  AddEnd(end, reply);
  out["replies"].push_back(std::move(reply));
}

// Several replies to one conversation, one after another.
absl::Status PrintChats(const rpc::Outcome& outcome, const Flags& flags) {
  Json out = Json::object();
  for (const v1::ReplyEnd& end : outcome.ends) {
    ISTHMUS_ASSIGN_OR_RETURN(Json message, text::ParseChatJson("message_json", end.message_json()));
    if (flags.json) {
      AddReply(end, std::move(message), out);
    } else {
      std::cout << "[" << end.reply_index() << "] " << text::PythonJson(message) << "\n";
    }
  }
  if (flags.json) {
    AddFigures(outcome, out);
    std::cout << text::PythonJson(out) << "\n";
  } else {
    PrintFigures(outcome.finish);
  }
  return absl::OkStatus();
}

// One completion of `conversation`; appends the reply to its messages, unless there are several.
absl::Status ChatOnce(rpc::RouterClient& client, const Flags& flags, Json& conversation) {
  v1::ChatRequest request;
  request.set_request_id(flags.request_id);
  request.set_conversation_json(text::PythonJson(conversation));
  request.set_thinking(flags.thinking);
  request.set_reasoning_effort(flags.effort);
  request.set_cache_salt(flags.cache_salt);
  request.set_priority(PriorityOf(flags));
  ISTHMUS_ASSIGN_OR_RETURN(*request.mutable_sampling(), ParamsOf(flags.sampling));
  const bool is_single = flags.sampling.num_replies == 1;
  Json logprobs = Json::array();
  ISTHMUS_ASSIGN_OR_RETURN(const rpc::Outcome outcome,
                           client.Chat(request, TimeoutOf(flags), [&](const v1::TokenDelta& delta) {
                             for (const v1::TokenLogprobs& one : delta.logprobs()) {
                               logprobs.push_back(LogprobsJson(one));
                             }
                             if (flags.json || !is_single) return;
                             std::cout << delta.reasoning_content() << delta.content()
                                       << std::flush;
                           }));
  if (!is_single) return PrintChats(outcome, flags);
  ISTHMUS_ASSIGN_OR_RETURN(
      Json message, text::ParseChatJson("message_json", outcome.ends.front().message_json()));
  conversation["messages"].push_back(message);
  if (flags.json) {
    if (!message.contains("reasoning_content")) message["reasoning_content"] = "";
    if (!message.contains("tool_calls")) message["tool_calls"] = Json::array();
    if (!logprobs.empty()) message["logprobs"] = std::move(logprobs);
    AddFigures(outcome, message);
    std::cout << text::PythonJson(message) << "\n";
  } else {
    if (message.contains("tool_calls")) std::cout << text::PythonJson(message["tool_calls"]);
    std::cout << "\n";
    PrintFigures(outcome.finish);
  }
  return absl::OkStatus();
}

absl::Status RunChat(const Flags& flags) {
  rpc::RouterClient client(flags.server);
  Json conversation = {{"messages", Json::array()}};
  if (flags.messages.has_value()) {
    ISTHMUS_ASSIGN_OR_RETURN(const std::string text, ReadWhole(*flags.messages));
    ISTHMUS_ASSIGN_OR_RETURN(conversation, text::ParseChatJson(*flags.messages, text));
    if (!conversation.is_object() || !conversation.contains("messages") ||
        !conversation["messages"].is_array()) {
      return absl::InvalidArgumentError(
          absl::StrCat(*flags.messages, ": want an object with a list of messages"));
    }
    return ChatOnce(client, flags, conversation);
  }
  if (flags.message.has_value()) {
    conversation["messages"].push_back({{"role", "user"}, {"content", *flags.message}});
    return ChatOnce(client, flags, conversation);
  }
  std::string line;
  while (std::cerr << "> " << std::flush && std::getline(std::cin, line)) {
    if (line.empty()) continue;
    conversation["messages"].push_back({{"role", "user"}, {"content", line}});
    ISTHMUS_RETURN_IF_ERROR(ChatOnce(client, flags, conversation));
  }
  return absl::OkStatus();
}

Json EmptyReply() { return {{"tokens", Json::array()}, {"content", ""}}; }

absl::Status RunGenerate(const Flags& flags) {
  v1::GenerateRequest request;
  request.set_request_id(flags.request_id);
  request.set_cache_salt(flags.cache_salt);
  ISTHMUS_ASSIGN_OR_RETURN(*request.mutable_sampling(), ParamsOf(flags.sampling));
  request.set_priority(PriorityOf(flags));
  const bool prints_ids = flags.tokens.has_value();
  if (prints_ids) {
    ISTHMUS_ASSIGN_OR_RETURN(const std::string text, ReadWhole(*flags.tokens));
    std::istringstream ids(text);
    std::string word;
    while (ids >> word) {
      uint32_t id = 0;
      if (!absl::SimpleAtoi(word, &id)) {
        return absl::InvalidArgumentError(
            absl::StrCat(*flags.tokens, ": \"", word, "\" is not a token id"));
      }
      request.mutable_token_ids()->add_ids(id);
    }
  } else {
    request.set_text(flags.text);
  }
  rpc::RouterClient client(flags.server);
  const bool is_single = flags.sampling.num_replies == 1;
  std::map<uint32_t, Json> replies;  // By index.
  ISTHMUS_ASSIGN_OR_RETURN(
      const rpc::Outcome outcome,
      client.Generate(request, TimeoutOf(flags), [&](const v1::TokenDelta& delta) {
        Json& out = replies.try_emplace(delta.reply_index(), EmptyReply()).first->second;
        for (const uint32_t id : delta.token_ids()) {
          if (!flags.json && is_single && prints_ids) {
            std::cout << (out["tokens"].empty() ? "" : " ") << id << std::flush;
          }
          out["tokens"].push_back(id);
        }
        out["content"].get_ref<std::string&>() += delta.content();
        for (const v1::TokenLogprobs& one : delta.logprobs()) {
          out["logprobs"].push_back(LogprobsJson(one));
        }
        if (!flags.json && is_single && !prints_ids) std::cout << delta.content() << std::flush;
      }));
  if (flags.json) {
    Json out = is_single ? replies[0] : Json::object();
    for (const v1::ReplyEnd& end : outcome.ends) {
      if (!is_single) AddReply(end, replies[end.reply_index()], out);
    }
    AddFigures(outcome, out);
    std::cout << text::PythonJson(out);
  } else if (!is_single) {
    for (const auto& [index, reply] : replies) {
      std::cout << "[" << index << "] " << text::PythonJson(reply) << "\n";
    }
  }
  std::cout << "\n";
  if (!flags.json) PrintFigures(outcome.finish);
  return absl::OkStatus();
}

absl::Status RunStatus(const Flags& flags) {
  rpc::RouterClient client(flags.server);
  ISTHMUS_ASSIGN_OR_RETURN(const v1::StatusReply status, client.Status(absl::Seconds(5)));
  if (!flags.json) {
    std::cout << StatusTable(status);
    return absl::OkStatus();
  }
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(status, &text, options).ok()) {
    return absl::InternalError("the status does not print as JSON");
  }
  std::cout << text << "\n";
  return absl::OkStatus();
}

absl::Status RunDrain(const Flags& flags) {
  absl::Duration wait;
  if (!absl::ParseDuration(flags.wait, &wait) || wait < absl::ZeroDuration() ||
      wait > absl::Hours(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--wait: is \"", flags.wait, "\", want a duration from 0s to 1h, as 60s"));
  }
  rpc::RouterClient client(flags.server);
  ISTHMUS_ASSIGN_OR_RETURN(const v1::DrainReply reply,
                           client.Drain(flags.worker, flags.reason, wait));
  const std::string& who = flags.worker.empty() ? flags.server : flags.worker;
  if (flags.json) {
    const Json out = {{"address", who}, {"left", reply.transfers()}};
    std::cout << text::PythonJson(out) << "\n";
  } else {
    std::cout << who << " drains: " << reply.transfers() << " left\n";
  }
  if (reply.transfers() == 0) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat(reply.transfers(), " are left at ", who, " after ", flags.wait));
}

void AddSampling(CLI::App* command, Flags& flags) {
  AddSamplingFlags(command, flags.sampling);
  command->add_option("--priority", flags.priority, "Who goes first: low, normal or high")
      ->check(CLI::IsMember({"low", "normal", "high"}))
      ->capture_default_str();
  command->add_option("--request-id", flags.request_id, "Name of the request in logs");
  command->add_option("--cache-salt", flags.cache_salt,
                      "Prefixes are shared only between requests with the same one");
  command->add_option("--timeout", flags.timeout_seconds, "Seconds until the last token")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
}

int Report(const absl::Status& status) {
  if (status.ok()) return 0;
  std::cerr << "isthmusctl: " << absl::StatusCodeToString(status.code()) << ": " << status.message()
            << "\n";
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ? 2 : 1;
}

int Main(int argc, const char* const* argv) {
  Flags flags;
  CLI::App app("Talks to an isthmus router.", "isthmusctl");
  AddVersionOption(app, "isthmusctl");
  app.footer(
      "Exit codes: 0 done; 2 bad input (options, files, what the router calls invalid or does not\n"
      "know); 1 anything else. Answers go to stdout, figures and errors to stderr.");
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--server", flags.server, "host:port of the router")->capture_default_str();
  app.add_flag("--json", flags.json, "Print the parsed reply with its figures as JSON");

  CLI::App* chat = app.add_subcommand(
      "chat", "One reply to --message or --messages; without either, a conversation on stdin");
  chat->add_option("--message", flags.message, "What the user says");
  chat->add_option("--messages", flags.messages, R"(File: {"messages": [...], "tools": [...]})");
  chat->add_flag("--thinking", flags.thinking, "Let the model reason first");
  chat->add_option("--effort", flags.effort, "Reasoning effort: none, low, high, max");
  AddSampling(chat, flags);

  CLI::App* generate = app.add_subcommand("generate", "Continue a text or token ids");
  auto* text = generate->add_option("--text", flags.text, "The prompt");
  generate->add_option("--tokens", flags.tokens, "File with decimal token ids; prints ids")
      ->excludes(text);
  AddSampling(generate, flags);

  CLI::App* status = app.add_subcommand("status", "What the router knows about the cluster");
  CLI::App* drain = app.add_subcommand(
      "drain",
      "Let a worker, or who listens at --server, finish what it has and take nothing more");
  drain->add_option("--worker", flags.worker, "host:port of a worker, as status shows it");
  drain->add_option("--wait", flags.wait, "How long to wait until nothing is left")
      ->capture_default_str();
  drain->add_option("--reason", flags.reason, "For logs and status")->capture_default_str();
  if (const std::optional<int> code = ParseCommandLine(app, argc, argv)) return *code;
  absl::Status result = *chat       ? RunChat(flags)
                        : *generate ? RunGenerate(flags)
                        : *status   ? RunStatus(flags)
                        : *drain    ? RunDrain(flags)
                                    : absl::InvalidArgumentError("no such command");
  // An answer that did not arrive is no success: a full disk, a closed pipe.
  if (result.ok() && !std::cout.flush()) {
    result = absl::UnavailableError("stdout: cannot write the whole answer");
  }
  return Report(result);
}

}  // namespace
}  // namespace isthmus::ctl

// NOLINTNEXTLINE(bugprone-exception-escape): an unforeseen exception ends the program.
int main(int argc, char** argv) { return isthmus::ctl::Main(argc, argv); }
