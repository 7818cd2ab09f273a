// SPDX-License-Identifier: Apache-2.0
#include "router/stream.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/text/chat_json.h"

namespace isthmus::router {
namespace {

// The message of OpenAI's chat API; the same that a client sends back in the next turn.
std::string MessageJson(const text::ParsedReply& reply) {
  nlohmann::ordered_json message = {{"role", "assistant"}, {"content", reply.content}};
  if (!reply.reasoning_content.empty()) message["reasoning_content"] = reply.reasoning_content;
  for (size_t i = 0; i < reply.tool_calls.size(); ++i) {
    const text::ToolCall& call = reply.tool_calls[i];
    message["tool_calls"].push_back(
        {{"id", absl::StrCat("call_", i)},
         {"type", "function"},
         {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  return text::PythonJson(message);
}

}  // namespace

ReplyStream::ReplyStream(const text::Tokenizer* tokenizer, const RoutedRequest& request,
                         uint32_t end_token_id)
    : is_chat_(request.is_chat),
      request_id_(request.request_id),
      num_prompt_tokens_(request.prompt.size()),
      end_token_id_(end_token_id),
      detokenizer_(tokenizer),
      parser_(request.thinking) {}

void ReplyStream::AddText(const std::string& text, v1::TokenDelta* delta) {
  if (!is_chat_) {
    delta->mutable_content()->append(text);
    return;
  }
  const text::ReplyDelta parsed = parser_.Push(text);
  delta->mutable_content()->append(parsed.content);
  delta->mutable_reasoning_content()->append(parsed.reasoning);
}

v1::TokenDelta ReplyStream::Push(const v1::SequenceTokens& tokens) {
  v1::TokenDelta delta;
  *delta.mutable_token_ids() = tokens.token_ids();
  *delta.mutable_logits_crc32c() = tokens.logits_crc32c();
  for (const uint32_t id : tokens.token_ids()) {
    ++num_output_tokens_;
    if (id != end_token_id_) AddText(detokenizer_.Push(static_cast<int32_t>(id)), &delta);
  }
  return delta;
}

v1::TokenDelta ReplyStream::PushEnd() {
  v1::TokenDelta delta;
  AddText(detokenizer_.Finish(), &delta);
  if (!is_chat_) return delta;
  const text::ReplyDelta rest = parser_.Finish();
  delta.mutable_content()->append(rest.content);
  delta.mutable_reasoning_content()->append(rest.reasoning);
  return delta;
}

v1::Finish ReplyStream::Finish(v1::SequenceEnd end) const {
  v1::Finish finish;
  finish.set_request_id(request_id_);
  finish.mutable_usage()->set_prompt_tokens(num_prompt_tokens_);
  finish.mutable_usage()->set_output_tokens(num_output_tokens_);
  finish.set_finish_reason(end == v1::SEQUENCE_END_STOP ? v1::FINISH_REASON_STOP
                                                        : v1::FINISH_REASON_LENGTH);
  if (!is_chat_) return finish;
  if (end == v1::SEQUENCE_END_STOP && !parser_.reply().tool_calls.empty()) {
    finish.set_finish_reason(v1::FINISH_REASON_TOOL_CALLS);
  }
  finish.set_message_json(MessageJson(parser_.reply()));
  return finish;
}

}  // namespace isthmus::router
