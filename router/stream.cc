// SPDX-License-Identifier: Apache-2.0
#include "router/stream.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/reply_seed.h"
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

bool HasContent(const v1::TokenDelta& delta) {
  return delta.token_ids_size() > 0 || !delta.content().empty() ||
         !delta.reasoning_content().empty();
}

}  // namespace

ReplyStream::ReplyStream(const text::Tokenizer* tokenizer, const RoutedRequest* request,
                         uint32_t end_token_id, uint32_t reply_index)
    : request_(request),
      end_token_id_(end_token_id),
      reply_index_(reply_index),
      detokenizer_(tokenizer),
      stops_({request->sampling.stop_strings().begin(), request->sampling.stop_strings().end()},
             request->sampling.include_stop_string()),
      parser_(request->thinking) {}

bool ReplyStream::IsStopToken(uint32_t id) const {
  const auto& stops = request_->sampling.stop_token_ids();
  return std::find(stops.begin(), stops.end(), id) != stops.end();
}

bool ReplyStream::IsText(uint32_t id) const {
  if (id == end_token_id_) return false;
  return request_->sampling.include_stop_string() || !IsStopToken(id);
}

void ReplyStream::AddText(const std::string& text, v1::TokenDelta* delta) {
  // No token before this one may complete a stop string.
  const bool may_match = num_output_tokens_ >= request_->sampling.min_output_tokens();
  AddCertain(stops_.Push(text, may_match), delta);
}

void ReplyStream::AddCertain(const std::string& text, v1::TokenDelta* delta) {
  if (!request_->is_chat) {
    delta->mutable_content()->append(text);
    return;
  }
  const text::ReplyDelta parsed = parser_.Push(text);
  delta->mutable_content()->append(parsed.content);
  delta->mutable_reasoning_content()->append(parsed.reasoning);
}

v1::TokenDelta ReplyStream::Push(const v1::SequenceTokens& tokens) {
  v1::TokenDelta delta;
  delta.set_reply_index(reply_index_);
  for (int i = 0; i < tokens.token_ids_size() && !has_stopped(); ++i) {
    last_token_id_ = tokens.token_ids(i);
    ++num_output_tokens_;
    delta.add_token_ids(last_token_id_);
    if (i < tokens.logits_crc32c_size()) delta.add_logits_crc32c(tokens.logits_crc32c(i));
    if (i < tokens.logprobs_size()) *delta.add_logprobs() = tokens.logprobs(i);
    if (!IsText(last_token_id_)) continue;
    AddText(detokenizer_.Push(static_cast<int32_t>(last_token_id_)), &delta);
  }
  return delta;
}

v1::TokenDelta ReplyStream::PushEnd() {
  v1::TokenDelta delta;
  delta.set_reply_index(reply_index_);
  if (!has_stopped()) AddText(detokenizer_.Finish(), &delta);
  AddCertain(stops_.Finish(), &delta);
  if (!request_->is_chat) return delta;
  const text::ReplyDelta rest = parser_.Finish();
  delta.mutable_content()->append(rest.content);
  delta.mutable_reasoning_content()->append(rest.reasoning);
  return delta;
}

v1::ReplyEnd ReplyStream::End(v1::SequenceEnd end) const {
  v1::ReplyEnd reply;
  reply.set_reply_index(reply_index_);
  reply.set_output_tokens(num_output_tokens_);
  reply.set_seed(ReplySeed(request_->sampling.seed(), reply_index_));
  const bool is_stop = has_stopped() || end == v1::SEQUENCE_END_STOP;
  reply.set_finish_reason(is_stop ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH);
  if (has_stopped()) {
    reply.set_stop_string(stops_.match().value_or(""));
  } else if (is_stop && IsStopToken(last_token_id_)) {
    reply.set_stop_token_id(last_token_id_);
  }
  if (!request_->is_chat) return reply;
  if (is_stop && !parser_.reply().tool_calls.empty()) {
    reply.set_finish_reason(v1::FINISH_REASON_TOOL_CALLS);
  }
  reply.set_message_json(MessageJson(parser_.reply()));
  return reply;
}

ReplySet::ReplySet(const text::Tokenizer* tokenizer, const RoutedRequest* request,
                   uint32_t end_token_id)
    : request_(request) {
  for (uint32_t i = 0; i < request->sampling.num_replies(); ++i) {
    replies_.emplace_back(tokenizer, request, end_token_id, i);
  }
  num_open_ = replies_.size();
  is_open_.assign(num_open_, true);
}

absl::StatusOr<ReplySet::Taken> ReplySet::Take(const v1::SequenceTokens& tokens) {
  const size_t index = tokens.reply_index();
  if (index >= replies_.size() || !is_open_[index]) {
    return absl::InternalError(
        absl::StrCat("tokens came for reply ", index, ", which is not open"));
  }
  ReplyStream& reply = replies_[index];
  if (tokens.token_ids_size() > 0 && tokens.first_index() != reply.num_output_tokens()) {
    return absl::InternalError(absl::StrCat("token ", tokens.first_index(), " of reply ", index,
                                            " came, want ", reply.num_output_tokens()));
  }
  Taken taken;
  const auto add = [&taken](v1::TokenDelta delta) {
    if (HasContent(delta)) *taken.events.emplace_back().mutable_delta() = std::move(delta);
  };
  add(reply.Push(tokens));
  const bool has_end = tokens.end() != v1::SEQUENCE_END_UNSPECIFIED;
  if (!has_end && !reply.has_stopped()) return taken;
  add(reply.PushEnd());
  *taken.events.emplace_back().mutable_reply_end() = reply.End(tokens.end());
  taken.must_be_cancelled = !has_end;
  is_open_[index] = false;
  --num_open_;
  return taken;
}

uint64_t ReplySet::num_output_tokens() const {
  uint64_t sum = 0;
  for (const ReplyStream& reply : replies_) sum += reply.num_output_tokens();
  return sum;
}

v1::Finish ReplySet::Finish() const {
  v1::Finish finish;
  finish.set_request_id(request_->request_id);
  finish.mutable_usage()->set_prompt_tokens(request_->prompt.size());
  finish.mutable_usage()->set_output_tokens(num_output_tokens());
  return finish;
}

}  // namespace isthmus::router
