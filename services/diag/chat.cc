// SPDX-License-Identifier: Apache-2.0
#include "services/diag/chat.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"
#include "services/text/detokenizer.h"
#include "services/text/stop_strings.h"

namespace isthmus::diag {

absl::StatusOr<TokenRun> RunTokens(LocalEngine& local, std::vector<int32_t> prompt,
                                   const engine::SamplingParams& sampling,
                                   const TokenSink& on_token, const SequenceEnd& on_end) {
  const int64_t room = local.cache_tokens() - static_cast<int64_t>(prompt.size());
  if (room < 1) {
    return absl::InvalidArgumentError(absl::StrCat("prompt: it has ", prompt.size(),
                                                   " tokens, the cache has room for ",
                                                   local.cache_tokens(), " with the output"));
  }
  engine::SamplingParams bounded = sampling;
  bounded.max_tokens = std::min(sampling.max_tokens, room);
  ISTHMUS_ASSIGN_OR_RETURN(engine::Sequence sequence,
                           local.engine().Admit("local", std::move(prompt), bounded));
  return RunSequence(local, std::move(sequence), on_token, on_end);
}

absl::StatusOr<TokenRun> RunSequence(LocalEngine& local, engine::Sequence sequence,
                                     const TokenSink& on_token, const SequenceEnd& on_end) {
  const absl::Time start = RealClock().Now();
  TokenRun run;
  engine::Sequence* const one = &sequence;
  while (!sequence.is_finished()) {
    const int64_t before = sequence.num_output_tokens();
    ISTHMUS_RETURN_IF_ERROR(local.engine().Step({&one, 1}));
    if (sequence.num_output_tokens() == before) continue;  // A chunk of the prompt.
    if (run.output_tokens++ == 0) {
      run.ttft_seconds = absl::ToDoubleSeconds(RealClock().Now() - start);
    }
    if (!on_token(sequence.tokens.back())) break;
  }
  run.finish = sequence.is_finished() ? sequence.finish : engine::FinishReason::kStop;
  run.seconds = absl::ToDoubleSeconds(RealClock().Now() - start);
  if (on_end != nullptr) ISTHMUS_RETURN_IF_ERROR(on_end(sequence));
  return run;
}

absl::StatusOr<std::unique_ptr<LocalChat>> LocalChat::Create(LocalEngine* local,
                                                             const std::string& checkpoint) {
  auto chat = std::make_unique<LocalChat>();
  chat->local_ = local;
  ISTHMUS_ASSIGN_OR_RETURN(chat->tokenizer_,
                           text::Tokenizer::Load(absl::StrCat(checkpoint, "/tokenizer.json")));
  const int32_t vocab = local->weights().config().vocab_size;
  if (chat->tokenizer_->vocab_size() > vocab) {
    return absl::InvalidArgumentError(absl::StrCat("tokenizer.json has ",
                                                   chat->tokenizer_->vocab_size(),
                                                   " ids, the model's vocabulary has ", vocab));
  }
  ISTHMUS_ASSIGN_OR_RETURN(chat->options_.encoder, text::LoadEncoderProfile(checkpoint));
  return chat;
}

absl::StatusOr<ChatReply> LocalChat::Chat(const ChatRequest& request,
                                          const std::function<void(absl::string_view)>& on_text,
                                          const SequenceEnd& on_end) {
  text::ChatOptions options = options_;
  options.thinking = request.thinking;
  ISTHMUS_ASSIGN_OR_RETURN(const nlohmann::ordered_json messages,
                           text::MessagesFromOpenAi(request.body));
  ISTHMUS_ASSIGN_OR_RETURN(const std::string prompt_text, text::EncodeChat(messages, options));
  ISTHMUS_ASSIGN_OR_RETURN(std::vector<int32_t> prompt, tokenizer_->Encode(prompt_text));

  ChatReply reply;
  reply.prompt_tokens = static_cast<int64_t>(prompt.size());
  text::Detokenizer detokenizer(tokenizer_.get());
  text::StopStrings stops(request.stops, request.keeps_stop);
  const auto add = [&](const std::string& text) {
    reply.text += text;
    if (!text.empty()) on_text(text);
  };
  const std::vector<int32_t>& stop_ids = request.sampling.stop_token_ids;
  const int32_t eos = local_->weights().config().eos_token_id;
  int64_t num_tokens = 0;
  const auto on_token = [&](int32_t token) {
    ++num_tokens;
    const bool is_stop = std::ranges::find(stop_ids, token) != stop_ids.end();
    if (token == eos || (is_stop && !request.keeps_stop)) return true;
    // No token before this one may complete a stop string.
    add(stops.Push(detokenizer.Push(token), num_tokens >= request.sampling.min_tokens));
    return !stops.match().has_value();
  };
  ISTHMUS_ASSIGN_OR_RETURN(const TokenRun run, RunTokens(*local_, std::move(prompt),
                                                         request.sampling, on_token, on_end));
  if (!stops.match().has_value()) {
    add(stops.Push(detokenizer.Finish(), num_tokens >= request.sampling.min_tokens));
  }
  add(stops.Finish());

  reply.message = text::ParseReply(reply.text, request.thinking);
  reply.output_tokens = run.output_tokens;
  reply.ttft_seconds = run.ttft_seconds;
  reply.seconds = run.seconds;
  reply.finish_reason = engine::FinishReasonName(run.finish);
  if (run.finish == engine::FinishReason::kStop && !reply.message.tool_calls.empty()) {
    reply.finish_reason = "tool_calls";
  }
  return reply;
}

namespace {

nlohmann::ordered_json ToolCallsJson(const text::ParsedReply& message) {
  nlohmann::ordered_json calls = nlohmann::ordered_json::array();
  for (size_t i = 0; i < message.tool_calls.size(); ++i) {
    const text::ToolCall& call = message.tool_calls[i];
    calls.push_back({{"id", absl::StrCat("call_", i)},
                     {"type", "function"},
                     {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  return calls;
}

}  // namespace

nlohmann::ordered_json ReplyJson(const ChatReply& reply) {
  return {{"role", "assistant"},
          {"content", reply.message.content},
          {"reasoning_content", reply.message.reasoning_content},
          {"tool_calls", ToolCallsJson(reply.message)},
          {"finish_reason", reply.finish_reason},
          {"usage",
           {{"prompt_tokens", reply.prompt_tokens},
            {"completion_tokens", reply.output_tokens},
            {"total_tokens", reply.prompt_tokens + reply.output_tokens}}}};
}

nlohmann::ordered_json HistoryMessage(const ChatReply& reply) {
  nlohmann::ordered_json message = {{"role", "assistant"}, {"content", reply.message.content}};
  if (!reply.message.reasoning_content.empty()) {
    message["reasoning_content"] = reply.message.reasoning_content;
  }
  if (!reply.message.tool_calls.empty()) message["tool_calls"] = ToolCallsJson(reply.message);
  return message;
}

}  // namespace isthmus::diag
