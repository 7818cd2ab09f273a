// SPDX-License-Identifier: Apache-2.0
// What must hold for any bytes.
#include "services/text/fuzz_targets.h"

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "services/base/check.h"
#include "services/text/chat_encoder.h"
#include "services/text/chat_json.h"
#include "services/text/chat_request.h"
#include "services/text/encoder_profile.h"
#include "services/text/encoder_text.h"
#include "services/text/pre_tokenizer.h"
#include "services/text/reply_parser.h"
#include "services/text/tokenizer.h"
#include "services/text/utf8.h"

namespace isthmus::text {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMaxFuzzedTextBytes = 64;  // Keeps one run of a hostile pattern short.

absl::string_view TakeLine(absl::string_view* input) {
  const size_t end = std::min(input->find('\n'), input->size());
  const absl::string_view line = input->substr(0, end);
  input->remove_prefix(std::min(end + 1, input->size()));
  return line;
}

// Pieces and segments are the text, in order.
void FuzzSplit(absl::string_view input) {
  const absl::string_view pattern = TakeLine(&input);
  const absl::string_view added = TakeLine(&input);
  const absl::string_view text = input.substr(0, kMaxFuzzedTextBytes);
  if (FirstInvalidUtf8(pattern).has_value() || FirstInvalidUtf8(text).has_value()) return;
  AddedTokenTrie trie;
  if (!added.empty()) trie.Insert(added, 1);
  std::string joined;
  for (const Segment& segment : trie.Cut({{text, -1}})) {
    ISTHMUS_CHECK(segment.token_id < 0 || segment.text == added);
    joined.append(segment.text.data(), segment.text.size());
  }
  ISTHMUS_CHECK(joined == text);
  const auto pre_tokenizer = PreTokenizer::Create({std::string(pattern)}, false);
  if (!pre_tokenizer.ok()) return;
  std::vector<absl::string_view> pieces;
  if (!pre_tokenizer->Split(text, &pieces).ok()) return;
  joined.clear();
  for (const absl::string_view piece : pieces) joined.append(piece.data(), piece.size());
  ISTHMUS_CHECK(joined == text);
}

void CheckPrompt(const ordered_json& messages) {
  for (const bool thinking : {false, true}) {
    ChatOptions options;
    options.thinking = thinking;
    const auto prompt = EncodeChat(messages, options);
    if (!prompt.ok()) continue;
    ISTHMUS_CHECK(absl::StartsWith(*prompt, kBos));
    ISTHMUS_CHECK(!FirstInvalidUtf8(*prompt).has_value());
  }
}

}  // namespace

void FuzzTokenizer(absl::string_view input) {
  if (input.size() > kMaxFuzzBytes) return;
  if (!absl::StartsWith(input, "{")) {
    FuzzSplit(input);
    return;
  }
  const auto tokenizer = Tokenizer::FromJson(input, /*jit=*/false);
  if (!tokenizer.ok()) return;
  static constexpr absl::string_view kText = "The  year 2024,\n<x> caf\xC3\xA9 \xF0\x9F\x99\x82";
  const auto ids = (*tokenizer)->Encode(kText);
  if (ids.ok()) ISTHMUS_CHECK((*tokenizer)->Decode(*ids) == kText);
}

void FuzzChat(absl::string_view input) {
  if (input.size() > kMaxFuzzBytes) return;
  if (!absl::StartsWith(input, "{") && !absl::StartsWith(input, "[")) {
    (void)ParseEncoderSource(input);
    return;
  }
  const auto request = ParseChatJson("request", input);
  if (!request.ok()) return;
  const std::string printed = PythonJson(*request);
  const auto again = ParseChatJson("printed", printed);
  ISTHMUS_CHECK(again.ok());
  ISTHMUS_CHECK(PythonJson(*again) == printed);
  if (request->is_array()) {
    CheckPrompt(*request);
    return;
  }
  const auto messages = MessagesFromOpenAi(*request);
  if (messages.ok()) CheckPrompt(*messages);
}

void FuzzReplyParser(absl::string_view input) {
  if (input.empty() || input.size() > kMaxFuzzBytes) return;
  const auto control = static_cast<uint8_t>(input.front());
  input.remove_prefix(1);
  const bool thinking = (control & 1u) != 0;
  const size_t piece_bytes = 1 + (control >> 1);
  const ParsedReply whole = ParseReply(input, thinking);
  ReplyParser parser(thinking);
  for (size_t at = 0; at < input.size(); at += piece_bytes) {
    parser.Push(input.substr(at, piece_bytes));
  }
  parser.Finish();
  const ParsedReply& reply = parser.reply();
  ISTHMUS_CHECK(reply.reasoning_content == whole.reasoning_content);
  ISTHMUS_CHECK(reply.content == whole.content);
  ISTHMUS_CHECK(reply.has_incomplete_call == whole.has_incomplete_call);
  ISTHMUS_CHECK(reply.is_malformed == whole.is_malformed);
  ISTHMUS_CHECK(reply.tool_calls.size() == whole.tool_calls.size());
  const bool is_utf8 = !FirstInvalidUtf8(input).has_value();
  for (size_t i = 0; i < reply.tool_calls.size(); ++i) {
    ISTHMUS_CHECK(reply.tool_calls[i].name == whole.tool_calls[i].name);
    ISTHMUS_CHECK(reply.tool_calls[i].arguments == whole.tool_calls[i].arguments);
    if (is_utf8) ISTHMUS_CHECK(IsJson(reply.tool_calls[i].arguments));
  }
}

}  // namespace isthmus::text
