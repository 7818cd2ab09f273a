// SPDX-License-Identifier: Apache-2.0
#include "services/diag/cluster_chat.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"
#include "services/rpc/router_client.h"
#include "services/text/chat_json.h"

namespace isthmus::diag {
namespace {

constexpr absl::Duration kTimeout = absl::Minutes(10);

v1::ChatRequest RequestOf(const ChatRequest& request) {
  v1::ChatRequest out;
  out.set_conversation_json(text::PythonJson(request.body));
  out.set_thinking(request.thinking);
  rpc::SamplingOptions sampling;
  sampling.temperature = request.sampling.temperature;
  sampling.top_p = request.sampling.top_p;
  sampling.top_k = static_cast<uint32_t>(request.sampling.top_k);
  sampling.seed = request.sampling.seed;
  sampling.max_tokens = static_cast<uint32_t>(request.sampling.max_tokens);
  *out.mutable_sampling() = rpc::ToSamplingParams(sampling);
  return out;
}

std::string TextMember(const nlohmann::ordered_json& message, const char* name) {
  const auto found = message.find(name);
  return found != message.end() && found->is_string() ? found->get<std::string>() : "";
}

absl::Status ReadOutcome(const rpc::Outcome& outcome, ChatReply& reply) {
  const v1::Finish& finish = outcome.finish;
  const v1::ReplyEnd& end = outcome.ends.front();
  reply.finish_reason = std::string(rpc::FinishReasonName(end.finish_reason()));
  reply.prompt_tokens = static_cast<int64_t>(finish.usage().prompt_tokens());
  reply.output_tokens = static_cast<int64_t>(finish.usage().output_tokens());
  reply.ttft_seconds = finish.timings().ttft_ms() / 1000.0;
  ISTHMUS_ASSIGN_OR_RETURN(const nlohmann::ordered_json message,
                           text::ParseChatJson("message_json", end.message_json()));
  reply.message.content = TextMember(message, "content");
  reply.message.reasoning_content = TextMember(message, "reasoning_content");
  const auto calls = message.find("tool_calls");
  if (calls == message.end() || !calls->is_array()) return absl::OkStatus();
  for (const nlohmann::ordered_json& call : *calls) {
    const auto function = call.find("function");
    if (function == call.end()) {
      return absl::InternalError("message_json: a tool call has no function");
    }
    text::ToolCall parsed;
    parsed.name = TextMember(*function, "name");
    parsed.arguments = TextMember(*function, "arguments");
    reply.message.tool_calls.push_back(std::move(parsed));
  }
  return absl::OkStatus();
}

absl::StatusOr<ChatReply> ChatOnce(rpc::RouterClient& client, const ChatRequest& request,
                                   const std::function<void(absl::string_view)>& on_text) {
  const absl::Time start = RealClock().Now();
  ChatReply reply;
  ISTHMUS_ASSIGN_OR_RETURN(
      const rpc::Outcome outcome,
      client.Chat(RequestOf(request), kTimeout, [&](const v1::TokenDelta& delta) {
        const std::string text = absl::StrCat(delta.reasoning_content(), delta.content());
        reply.text += text;
        on_text(text);
      }));
  ISTHMUS_RETURN_IF_ERROR(ReadOutcome(outcome, reply));
  reply.seconds = absl::ToDoubleSeconds(RealClock().Now() - start);
  return reply;
}

}  // namespace

ChatBackend ConnectClusterChat(const std::string& address) {
  const auto client = std::make_shared<rpc::RouterClient>(address);
  return [client](const ChatRequest& request, const auto& on_text) {
    return ChatOnce(*client, request, on_text);
  };
}

}  // namespace isthmus::diag
