// SPDX-License-Identifier: Apache-2.0
// A chat completion with a local engine: messages to prompt text, to tokens, to a streamed and
// parsed reply. The same texts and the same parser as behind the router.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/diag/local_engine.h"
#include "services/text/chat_encoder.h"
#include "services/text/chat_request.h"
#include "services/text/reply_parser.h"
#include "services/text/tokenizer.h"

namespace isthmus::diag {

struct ChatRequest {
  nlohmann::ordered_json body;  // OpenAI form: {"messages": [...], "tools": [...]}
  bool thinking = false;
  engine::SamplingParams sampling;
  std::vector<std::string> stops = {};  // Texts that end a reply of a local engine.
  bool keeps_stop = false;
};

struct ChatReply {
  std::string text;  // As generated, without the end token.
  text::ParsedReply message;
  std::string finish_reason;  // "stop", "length" or "tool_calls"
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;  // The end token included.
  double ttft_seconds = 0.0;  // From the call to the first token.
  double seconds = 0.0;
};

// Where a reply comes from: a local engine here, a router in cluster_chat.h. `on_text` gets the
// reply's text as it grows.
using ChatBackend = std::function<absl::StatusOr<ChatReply>(
    const ChatRequest& request, const std::function<void(absl::string_view)>& on_text)>;

// Gets a sequence that has ended while it still has its cache; its error is the run's.
using SequenceEnd = std::function<absl::Status(const engine::Sequence&)>;

class LocalChat {
 public:
  // Reads the tokenizer and the encoder generation of the checkpoint; `local` must outlive it.
  static absl::StatusOr<std::unique_ptr<LocalChat>> Create(LocalEngine* local,
                                                           const std::string& checkpoint);

  absl::StatusOr<ChatReply> Chat(const ChatRequest& request,
                                 const std::function<void(absl::string_view)>& on_text,
                                 const SequenceEnd& on_end = nullptr);

 private:
  LocalEngine* local_ = nullptr;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  text::ChatOptions options_;
};

// Gets every output token, the end token included, and says whether it wants more; else the run
// ends as kStop.
using TokenSink = std::function<bool(int32_t)>;

// Runs `prompt` to its end, and calls `on_end` with the sequence while it still has its cache.
// InvalidArgument: the prompt leaves no room in the cache; a reply that fills it ends as kLength.
struct TokenRun {
  int64_t output_tokens = 0;
  engine::FinishReason finish = engine::FinishReason::kNone;
  double ttft_seconds = 0.0;
  double seconds = 0.0;
};
absl::StatusOr<TokenRun> RunTokens(LocalEngine& local, std::vector<int32_t> prompt,
                                   const engine::SamplingParams& sampling,
                                   const TokenSink& on_token, const SequenceEnd& on_end = nullptr);

// The same from where `sequence` stands, and for the tokens that it gains.
absl::StatusOr<TokenRun> RunSequence(LocalEngine& local, engine::Sequence sequence,
                                     const TokenSink& on_token,
                                     const SequenceEnd& on_end = nullptr);

// {"role", "content", "reasoning_content", "tool_calls", "finish_reason", "usage"}.
nlohmann::ordered_json ReplyJson(const ChatReply& reply);

// The assistant message of a reply as the next request's history holds it.
nlohmann::ordered_json HistoryMessage(const ChatReply& reply);

}  // namespace isthmus::diag
