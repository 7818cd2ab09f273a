// SPDX-License-Identifier: Apache-2.0
#include "services/diag/cluster_chat.h"

#include <grpcpp/client_context.h>

#include <chrono>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/generate.grpc.pb.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"
#include "services/rpc/channel.h"
#include "services/rpc/status.h"
#include "services/text/chat_json.h"

namespace isthmus::diag {
namespace {

constexpr auto kDeadline = std::chrono::minutes(10);

v1::ChatRequest RequestOf(const ChatRequest& request) {
  v1::ChatRequest out;
  out.set_conversation_json(text::PythonJson(request.body));
  out.set_thinking(request.thinking);
  v1::SamplingParams& sampling = *out.mutable_sampling();
  sampling.set_temperature(request.sampling.temperature);
  sampling.set_top_p(request.sampling.top_p);
  sampling.set_top_k(static_cast<uint32_t>(request.sampling.top_k));
  sampling.set_seed(request.sampling.seed);
  sampling.set_max_output_tokens(static_cast<uint32_t>(request.sampling.max_tokens));
  return out;
}

const char* ReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
      return "stop";
    case v1::FINISH_REASON_LENGTH:
      return "length";
    case v1::FINISH_REASON_TOOL_CALLS:
      return "tool_calls";
    default:
      return "";
  }
}

std::string TextMember(const nlohmann::ordered_json& message, const char* name) {
  const auto found = message.find(name);
  return found != message.end() && found->is_string() ? found->get<std::string>() : "";
}

absl::Status ReadFinish(const v1::Finish& finish, ChatReply& reply) {
  reply.finish_reason = ReasonName(finish.finish_reason());
  reply.prompt_tokens = static_cast<int64_t>(finish.usage().prompt_tokens());
  reply.output_tokens = static_cast<int64_t>(finish.usage().output_tokens());
  reply.ttft_seconds = finish.timings().ttft_ms() / 1000.0;
  ISTHMUS_ASSIGN_OR_RETURN(const nlohmann::ordered_json message,
                           text::ParseChatJson("message_json", finish.message_json()));
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

absl::StatusOr<ChatReply> ChatOnce(v1::Generation::Stub& stub, const std::string& address,
                                   const ChatRequest& request,
                                   const std::function<void(absl::string_view)>& on_text) {
  const absl::Time start = RealClock().Now();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  const auto stream = stub.Chat(&context, RequestOf(request));
  ChatReply reply;
  bool has_finish = false;
  absl::Status parsed;
  v1::GenerateReply event;
  while (stream->Read(&event)) {
    if (event.has_finish()) {
      has_finish = true;
      parsed = ReadFinish(event.finish(), reply);
      continue;
    }
    const std::string text =
        absl::StrCat(event.delta().reasoning_content(), event.delta().content());
    reply.text += text;
    on_text(text);
  }
  ISTHMUS_RETURN_IF_ERROR(rpc::FromGrpcStatus(stream->Finish(), context, address));
  ISTHMUS_RETURN_IF_ERROR(parsed);
  if (!has_finish) return absl::InternalError("the stream ended without a finish event");
  reply.seconds = absl::ToDoubleSeconds(RealClock().Now() - start);
  return reply;
}

}  // namespace

ChatBackend ConnectClusterChat(const std::string& address) {
  const std::shared_ptr<v1::Generation::Stub> stub =
      v1::Generation::NewStub(rpc::OpenChannel(address));
  return [stub, address](const ChatRequest& request, const auto& on_text) {
    return ChatOnce(*stub, address, request, on_text);
  };
}

}  // namespace isthmus::diag
