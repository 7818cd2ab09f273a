// SPDX-License-Identifier: Apache-2.0
// The steps of spec 7.2: merge, order, drop, render.
#include "services/text/chat_encoder.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"
#include "services/text/chat_message.h"
#include "services/text/encoder_text.h"

namespace isthmus::text {
namespace {

using nlohmann::ordered_json;

// Step 1a: tool results join the user message before them, if there is one; users in a row become
// one message, except behind one with a task. What a merged message said besides its content
// (its task) is lost, as in the official encoder.
std::vector<ChatMessage> MergeUserMessages(std::vector<ChatMessage> messages) {
  std::vector<ChatMessage> merged;
  for (ChatMessage& message : messages) {
    const bool is_tool = message.role == Role::kTool;
    if (!is_tool && message.role != Role::kUser) {
      merged.push_back(std::move(message));
      continue;
    }
    message.role = Role::kUser;
    const bool joins = !merged.empty() && merged.back().role == Role::kUser &&
                       (is_tool || merged.back().task.empty());
    if (!joins) {
      if (is_tool) message.task.clear();
      merged.push_back(std::move(message));
      continue;
    }
    for (ContentBlock& block : message.blocks) merged.back().blocks.push_back(std::move(block));
  }
  return merged;
}

// Step 1b: results follow the order of the calls in the last assistant message that made some.
// Unknown ids count as the first call; text blocks keep their places.
void OrderToolResults(std::vector<ChatMessage>* messages) {
  absl::flat_hash_map<std::string, size_t> order;
  for (ChatMessage& message : *messages) {
    if (message.role == Role::kAssistant && !message.tool_calls.empty()) {
      order.clear();
      for (size_t i = 0; i < message.tool_call_ids.size(); ++i) {
        if (!message.tool_call_ids[i].empty()) order[message.tool_call_ids[i]] = i;
      }
    }
    if (message.role != Role::kUser || order.empty()) continue;
    // Pairs of the call's place and the result's, so that equal places keep their order.
    std::vector<std::pair<size_t, size_t>> places;
    std::vector<ContentBlock> results;
    for (const ContentBlock& block : message.blocks) {
      if (!block.is_tool_result) continue;
      const auto found = order.find(block.tool_call_id);
      places.emplace_back(found == order.end() ? 0 : found->second, results.size());
      results.push_back(block);
    }
    std::sort(places.begin(), places.end());
    size_t next = 0;
    for (ContentBlock& block : message.blocks) {
      if (block.is_tool_result) block = std::move(results[places[next++].second]);
    }
  }
}

bool IsUserLike(const ChatMessage& message) {
  return message.role == Role::kUser || message.role == Role::kDeveloper;
}

// Index of the last user or developer message, -1 without one.
ptrdiff_t LastUserIndex(const std::vector<ChatMessage>& messages) {
  for (auto i = static_cast<ptrdiff_t>(messages.size()) - 1; i >= 0; --i) {
    if (IsUserLike(messages[static_cast<size_t>(i)])) return i;
  }
  return -1;
}

// Step 3: what only mattered to earlier turns. (Their reasoning is left out when rendering.)
std::vector<ChatMessage> DropEarlierDeveloperMessages(std::vector<ChatMessage> messages) {
  const ptrdiff_t last_user = LastUserIndex(messages);
  std::vector<ChatMessage> kept;
  for (size_t i = 0; i < messages.size(); ++i) {
    const bool is_earlier = static_cast<ptrdiff_t>(i) < last_user;
    if (is_earlier && messages[i].role == Role::kDeveloper) continue;
    kept.push_back(std::move(messages[i]));
  }
  return kept;
}

absl::StatusOr<std::string> EffortPrefix(const ChatOptions& options) {
  const std::string& effort = options.reasoning_effort;
  const EncoderProfile& encoder = options.encoder;
  const bool is_0731 = encoder.generation == EncoderGeneration::k0731;
  const bool is_max = effort == "max" || effort == "xhigh";
  const bool is_high = effort == "high";
  const bool is_low = effort == "low" && is_0731;
  if (!effort.empty() && effort != "none" && !is_low && !is_high && !is_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("reasoning_effort '", effort, "' is unknown to the ",
                     EncoderGenerationName(encoder.generation), " encoder; expected none, ",
                     is_0731 ? "low, " : "", "high or max"));
  }
  if (!options.thinking) return std::string();
  if (is_max) {
    if (encoder.max_effort_prefix.has_value()) return *encoder.max_effort_prefix;
    if (!is_0731) return std::string(kMaxEffortApril);
    return absl::FailedPreconditionError(
        absl::StrCat("reasoning_effort '", effort,
                     "' of the 0731 encoder needs the checkpoint's own "
                     "encoding_dsv4.py, and the checkpoint has none"));
  }
  if (is_high && is_0731) return encoder.high_effort_prefix.value_or(std::string(kMaxEffortApril));
  return std::string();
}

class Renderer {
 public:
  Renderer(const std::vector<ChatMessage>& messages, const ChatOptions& options, bool drop_thinking)
      : messages_(messages),
        options_(options),
        drop_thinking_(drop_thinking),
        last_user_(LastUserIndex(messages)) {}

  void Render(size_t index, std::string* out) const {
    const ChatMessage& message = messages_[index];
    switch (message.role) {
      case Role::kSystem:
        absl::StrAppend(out, message.content);
        AppendToolsAndFormat(message, out);
        break;
      case Role::kDeveloper:
        absl::StrAppend(out, kUser, message.content);
        AppendToolsAndFormat(message, out);
        break;
      case Role::kUser:
      case Role::kTool:
        AppendUser(message, out);
        break;
      case Role::kLatestReminder:
        absl::StrAppend(out, kLatestReminder, message.content);
        break;
      case Role::kAssistant:
        AppendAssistant(index, out);
        break;
    }
    AppendTransition(index, out);
  }

 private:
  static void AppendToolsAndFormat(const ChatMessage& message, std::string* out) {
    if (!message.tool_schemas.empty()) {
      absl::StrAppend(out, "\n\n", kToolsBeforeSchemas, message.tool_schemas, kToolsAfterSchemas);
    }
    if (!message.response_format.empty()) {
      absl::StrAppend(out, "\n\n", kResponseFormatHeading, message.response_format);
    }
  }

  static void AppendUser(const ChatMessage& message, std::string* out) {
    absl::StrAppend(out, kUser);
    for (size_t i = 0; i < message.blocks.size(); ++i) {
      const ContentBlock& block = message.blocks[i];
      if (i > 0) absl::StrAppend(out, "\n\n");
      if (block.is_tool_result) {
        absl::StrAppend(out, "<tool_result>", block.text, "</tool_result>");
      } else {
        absl::StrAppend(out, block.text);
      }
    }
  }

  void AppendAssistant(size_t index, std::string* out) const {
    const ChatMessage& message = messages_[index];
    // The answer to a task is a label: no reasoning comes before it.
    const bool answers_task = index > 0 && !messages_[index - 1].task.empty();
    const bool is_current = static_cast<ptrdiff_t>(index) > last_user_;
    if (options_.thinking && !answers_task && (!drop_thinking_ || is_current)) {
      absl::StrAppend(out, message.reasoning, kThinkEnd);
    }
    absl::StrAppend(out, message.content);
    if (!message.tool_calls.empty()) {
      absl::StrAppend(out, "\n\n", RenderToolCalls(message.tool_calls));
    }
    if (!message.ends_open) absl::StrAppend(out, kEos);
  }

  // Step 5 and 6: what makes the model speak next.
  void AppendTransition(size_t index, std::string* out) const {
    const bool is_last = index + 1 == messages_.size();
    if (is_last && !options_.add_generation) return;
    if (!is_last && messages_[index + 1].role != Role::kAssistant &&
        messages_[index + 1].role != Role::kLatestReminder) {
      return;
    }
    const ChatMessage& message = messages_[index];
    if (message.task == "action") {
      absl::StrAppend(out, kAssistant, options_.thinking ? kThinkBegin : kThinkEnd);
    }
    if (!message.task.empty()) {
      absl::StrAppend(out, "<｜", message.task, "｜>");
      return;
    }
    if (!IsUserLike(message)) return;
    const bool thinks =
        options_.thinking && (!drop_thinking_ || static_cast<ptrdiff_t>(index) >= last_user_);
    absl::StrAppend(out, kAssistant, thinks ? kThinkBegin : kThinkEnd);
  }

  const std::vector<ChatMessage>& messages_;
  const ChatOptions& options_;
  const bool drop_thinking_;
  const ptrdiff_t last_user_;
};

}  // namespace

absl::StatusOr<std::string> EncodeChat(const ordered_json& messages, const ChatOptions& options) {
  if (!messages.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat("messages must be a list, is ", messages.type_name()));
  }
  if (messages.empty()) return absl::InvalidArgumentError("messages is empty");
  ISTHMUS_ASSIGN_OR_RETURN(const std::string effort_prefix, EffortPrefix(options));
  std::vector<ChatMessage> read;
  bool has_tools = false;
  for (size_t i = 0; i < messages.size(); ++i) {
    ISTHMUS_ASSIGN_OR_RETURN(ChatMessage message,
                             ReadChatMessage(absl::StrCat("messages[", i, "]"), messages[i]));
    has_tools = has_tools || !message.tool_schemas.empty();
    read.push_back(std::move(message));
  }
  read = MergeUserMessages(std::move(read));
  OrderToolResults(&read);
  // Step 2: with tools a turn may go on over several replies, and its reasoning stays.
  const bool drop_thinking = options.drop_thinking && !has_tools;
  if (options.thinking && drop_thinking) read = DropEarlierDeveloperMessages(std::move(read));
  std::string prompt = absl::StrCat(kBos, effort_prefix);
  const Renderer renderer(read, options, drop_thinking);
  for (size_t i = 0; i < read.size(); ++i) renderer.Render(i, &prompt);
  return prompt;
}

}  // namespace isthmus::text
