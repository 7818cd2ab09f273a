// SPDX-License-Identifier: Apache-2.0
// Takes a reply of the model apart while it is generated: reasoning, content, tool calls (spec
// 7.5). However the text is split over Push calls, the concatenated deltas are the same. Text that
// may still turn out to begin a marker is held back, so no part of a marker is ever content.
//
// Real replies deviate from the grammar, and this parser forgives: a call while `</think>` is
// missing, an `invoke` without the block around it, a missing end of an `invoke`, V3.2's block name
// `function_calls`, text after the calls (it is content), parameters without `string=`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "services/text/tool_call_syntax.h"

namespace isthmus::text {

struct ReplyDelta {
  std::string reasoning;
  std::string content;
  std::vector<ToolCall> tool_calls;  // Whole calls only.

  bool empty() const { return reasoning.empty() && content.empty() && tool_calls.empty(); }
};

struct ParsedReply {
  std::string reasoning_content;
  std::string content;
  std::vector<ToolCall> tool_calls;
  bool has_incomplete_call = false;  // The reply ended inside a call, which is left out.
  bool is_malformed = false;         // Something had to be forgiven or was left out.
};

// One per reply; not for several threads at once. The text must be UTF-8.
class ReplyParser {
 public:
  // `thinking`: the prompt ended with `<think>`, so the reply starts with reasoning.
  explicit ReplyParser(bool thinking) : thinking_(thinking) {}

  // What became certain with this text. Text after the EOS marker is passed over.
  ReplyDelta Push(absl::string_view text);

  // The end of the reply: what was held back, without the beginning of a marker.
  ReplyDelta Finish();

  // All deltas so far; complete after Finish.
  const ParsedReply& reply() const { return reply_; }

 private:
  enum class State : uint8_t {
    kStart,
    kReasoning,
    kContent,
    kBetweenCalls,
    kInvokeHeader,
    kBody,
    kParameterHeader,
    kValue,
    kEnded
  };
  struct Parameter {
    std::string name;
    std::string json;
  };
  struct Marker;

  // Each takes one step and returns whether another may follow; false: more text is needed.
  bool Step();
  bool StepStart();
  bool StepText();
  bool StepBetweenCalls();
  bool StepInvoke();
  bool StepBody();
  bool StepParameter();
  bool StepValue();

  ReplyDelta Run();
  absl::string_view Rest() const { return absl::string_view(buffer_).substr(at_); }
  void Advance(size_t bytes, State next);
  void SkipBlank();
  bool StripsPartialMarker(absl::string_view rest) const;
  // The header that ends with `">`: its text, or nothing when more is needed or none can come.
  enum class Header : uint8_t { kFound, kPartial, kMissing };
  Header ReadHeader(absl::string_view* header);
  void EmitText(absl::string_view text);
  void AddParameter(absl::string_view value);
  void CompleteCall();

  const bool thinking_;
  bool at_end_ = false;
  State state_ = State::kStart;
  std::string buffer_;
  size_t at_ = 0;    // What lies before has been dealt with.
  size_t scan_ = 0;  // No marker begins between at_ and here.

  // The call being read.
  std::string call_name_;
  std::vector<Parameter> parameters_;
  absl::flat_hash_map<std::string, size_t> parameter_index_;
  std::string parameter_name_;
  bool parameter_is_string_ = true;

  ReplyDelta delta_;
  ParsedReply reply_;
};

// A whole reply at once.
ParsedReply ParseReply(absl::string_view text, bool thinking);

}  // namespace isthmus::text
