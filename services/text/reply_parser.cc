// SPDX-License-Identifier: Apache-2.0
// A state machine over a buffer. A step either deals with text for good or waits for more; what it
// decides depends only on the bytes from at_ on, never on how they arrived.
#include "services/text/reply_parser.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "services/text/chat_json.h"
#include "services/text/encoder_text.h"

namespace isthmus::text {
namespace {

constexpr absl::string_view kBlockOpen = "<｜DSML｜tool_calls>";
constexpr absl::string_view kBlockClose = "</｜DSML｜tool_calls>";
constexpr absl::string_view kOtherBlockOpen = "<｜DSML｜function_calls>";
constexpr absl::string_view kOtherBlockClose = "</｜DSML｜function_calls>";
constexpr absl::string_view kInvokeOpen = "<｜DSML｜invoke name=\"";
constexpr absl::string_view kInvokeClose = "</｜DSML｜invoke>";
constexpr absl::string_view kParameterOpen = "<｜DSML｜parameter name=\"";
constexpr absl::string_view kParameterClose = "</｜DSML｜parameter>";
constexpr absl::string_view kHeaderEnd = "\">";

// Names of tools and parameters are short; beyond this a header is not one.
constexpr size_t kMaxHeaderBytes = 1024;

enum class Fit : uint8_t { kNone, kPartial, kWhole };

// How `marker` fits the beginning of `rest`; kPartial: `rest` is a proper prefix of it.
Fit FitOf(absl::string_view rest, absl::string_view marker) {
  if (absl::StartsWith(rest, marker)) return Fit::kWhole;
  return absl::StartsWith(marker, rest) ? Fit::kPartial : Fit::kNone;
}

// The end of `text` without the blank line that the format puts before a block.
size_t WithoutBlankLine(absl::string_view text) {
  size_t end = text.size();
  for (int i = 0; i < 2 && end > 0 && text[end - 1] == '\n'; ++i) --end;
  return end;
}

}  // namespace

// A marker and the state behind it. `bytes`: how much of it is consumed.
struct ReplyParser::Marker {
  absl::string_view text;
  State next;
};

ReplyDelta ReplyParser::Push(absl::string_view text) {
  if (state_ == State::kEnded) return {};
  absl::StrAppend(&buffer_, text);
  return Run();
}

ReplyDelta ReplyParser::Finish() {
  at_end_ = true;
  ReplyDelta delta = Run();
  const bool is_in_call = state_ == State::kInvokeHeader || state_ == State::kBody ||
                          state_ == State::kParameterHeader || state_ == State::kValue;
  if (is_in_call) reply_.has_incomplete_call = true;
  state_ = State::kEnded;
  return delta;
}

ReplyDelta ReplyParser::Run() {
  // Every step that asks for another consumes text or changes to a state that will.
  while (Step()) {
  }
  if (at_ > buffer_.size() / 2) {
    buffer_.erase(0, at_);
    scan_ -= at_;
    at_ = 0;
  }
  reply_.reasoning_content += delta_.reasoning;
  reply_.content += delta_.content;
  reply_.tool_calls.insert(reply_.tool_calls.end(), delta_.tool_calls.begin(),
                           delta_.tool_calls.end());
  return std::exchange(delta_, {});
}

bool ReplyParser::Step() {
  switch (state_) {
    case State::kStart:
      return StepStart();
    case State::kReasoning:
    case State::kContent:
      return StepText();
    case State::kBetweenCalls:
      return StepBetweenCalls();
    case State::kInvokeHeader:
      return StepInvoke();
    case State::kBody:
      return StepBody();
    case State::kParameterHeader:
      return StepParameter();
    case State::kValue:
      return StepValue();
    case State::kEnded:
      Advance(Rest().size(), State::kEnded);
      return false;
  }
  return false;
}

void ReplyParser::Advance(size_t bytes, State next) {
  at_ += bytes;
  scan_ = at_;
  state_ = next;
}

void ReplyParser::SkipBlank() {
  while (at_ < buffer_.size() && absl::ascii_isspace(static_cast<unsigned char>(buffer_[at_]))) {
    ++at_;
  }
  scan_ = at_;
}

void ReplyParser::EmitText(absl::string_view text) {
  absl::StrAppend(state_ == State::kReasoning ? &delta_.reasoning : &delta_.content, text);
}

// Whether a reply that ends with `rest` (a proper prefix of a marker) ends without it: a marker cut
// off is no text, but a lone `<` or `</` may well be.
bool ReplyParser::StripsPartialMarker(absl::string_view rest) const {
  return absl::StartsWith(rest, kDsmlOpen.substr(0, 4)) ||
         absl::StartsWith(rest, kDsmlClose.substr(0, 5));
}

// The prompt ends with a think tag; some replies repeat it or open their reasoning after all.
bool ReplyParser::StepStart() {
  const absl::string_view rest = Rest();
  const Fit begins = FitOf(rest, kThinkBegin);
  const Fit ends = thinking_ ? Fit::kNone : FitOf(rest, kThinkEnd);
  if (begins == Fit::kWhole) {
    reply_.is_malformed = true;
    Advance(kThinkBegin.size(), State::kReasoning);
    return true;
  }
  if (ends == Fit::kWhole) {
    reply_.is_malformed = true;
    Advance(kThinkEnd.size(), State::kContent);
    return true;
  }
  if (!at_end_ && (begins == Fit::kPartial || ends == Fit::kPartial)) return false;
  Advance(0, thinking_ ? State::kReasoning : State::kContent);
  return true;
}

bool ReplyParser::StepText() {
  static constexpr Marker kMarkers[] = {{kEos, State::kEnded},
                                        {kBlockOpen, State::kBetweenCalls},
                                        {kOtherBlockOpen, State::kBetweenCalls},
                                        {kInvokeOpen, State::kInvokeHeader},
                                        {kThinkEnd, State::kContent}};
  const size_t num_markers = std::size(kMarkers) - (state_ == State::kReasoning ? 0 : 1);
  size_t hold = buffer_.size();  // Where an unfinished marker begins.
  for (size_t i = buffer_.find('<', scan_); i != std::string::npos; i = buffer_.find('<', i + 1)) {
    const absl::string_view here = absl::string_view(buffer_).substr(i);
    bool is_partial = false;
    for (size_t m = 0; m < num_markers; ++m) {
      const Fit fit = FitOf(here, kMarkers[m].text);
      is_partial = is_partial || fit == Fit::kPartial;
      if (fit != Fit::kWhole) continue;
      absl::string_view before = Rest().substr(0, i - at_);
      const State next = kMarkers[m].next;
      if (next == State::kBetweenCalls || next == State::kInvokeHeader) {
        before = before.substr(0, WithoutBlankLine(before));
        if (state_ == State::kReasoning || next == State::kInvokeHeader) reply_.is_malformed = true;
      }
      EmitText(before);
      Advance(i + kMarkers[m].text.size() - at_, next);
      return true;
    }
    if (is_partial) {
      hold = i;
      break;
    }
  }
  absl::string_view decided = Rest().substr(0, hold - at_);
  if (at_end_ && !StripsPartialMarker(Rest().substr(decided.size()))) {
    decided = Rest();
  } else {
    decided = decided.substr(0, WithoutBlankLine(decided));
  }
  EmitText(decided);
  Advance(at_end_ ? Rest().size() : decided.size(), state_);
  scan_ = std::max(at_, hold);
  return false;
}

bool ReplyParser::StepBetweenCalls() {
  static constexpr Marker kMarkers[] = {
      {kInvokeOpen, State::kInvokeHeader},      {kBlockOpen, State::kBetweenCalls},
      {kBlockClose, State::kBetweenCalls},      {kOtherBlockOpen, State::kBetweenCalls},
      {kOtherBlockClose, State::kBetweenCalls}, {kEos, State::kEnded}};
  SkipBlank();
  const absl::string_view rest = Rest();
  if (rest.empty()) return false;
  bool is_partial = false;
  for (const Marker& marker : kMarkers) {
    const Fit fit = FitOf(rest, marker.text);
    is_partial = is_partial || fit == Fit::kPartial;
    if (fit != Fit::kWhole) continue;
    Advance(marker.text.size(), marker.next);
    return true;
  }
  if (is_partial && !at_end_) return false;
  if (is_partial && StripsPartialMarker(rest)) {
    Advance(rest.size(), State::kBetweenCalls);
    return false;
  }
  reply_.is_malformed = true;
  Advance(0, State::kContent);
  return true;
}

ReplyParser::Header ReplyParser::ReadHeader(absl::string_view* header) {
  const absl::string_view rest = Rest();
  const size_t end = rest.substr(0, kMaxHeaderBytes).find(kHeaderEnd);
  if (end != absl::string_view::npos) {
    *header = rest.substr(0, end);
    return Header::kFound;
  }
  return rest.size() < kMaxHeaderBytes ? Header::kPartial : Header::kMissing;
}

bool ReplyParser::StepInvoke() {
  absl::string_view header;
  const Header found = ReadHeader(&header);
  if (found == Header::kPartial) return false;
  if (found == Header::kMissing || header.find('\n') != absl::string_view::npos) {
    // Not a call after all: the reply said so literally.
    reply_.is_malformed = true;
    Advance(0, State::kContent);
    EmitText(kInvokeOpen);
    return true;
  }
  call_name_ = std::string(header);
  Advance(header.size() + kHeaderEnd.size(), State::kBody);
  return true;
}

bool ReplyParser::StepBody() {
  static constexpr Marker kMarkers[] = {
      {kInvokeClose, State::kBetweenCalls},     {kParameterOpen, State::kParameterHeader},
      {kInvokeOpen, State::kInvokeHeader},      {kBlockClose, State::kBetweenCalls},
      {kOtherBlockClose, State::kBetweenCalls}, {kEos, State::kEnded}};
  SkipBlank();
  const absl::string_view rest = Rest();
  if (rest.empty()) return false;
  bool is_partial = false;
  for (const Marker& marker : kMarkers) {
    const Fit fit = FitOf(rest, marker.text);
    is_partial = is_partial || fit == Fit::kPartial;
    if (fit != Fit::kWhole) continue;
    if (marker.next != State::kParameterHeader) {
      if (marker.text != kInvokeClose) reply_.is_malformed = true;
      CompleteCall();
    }
    Advance(marker.text.size(), marker.next);
    return true;
  }
  if (is_partial) return false;
  // Text outside parameters has no meaning; the next `<` may begin one again.
  reply_.is_malformed = true;
  const size_t next = rest.find('<', 1);
  Advance(next == absl::string_view::npos ? rest.size() : next, State::kBody);
  return true;
}

bool ReplyParser::StepParameter() {
  absl::string_view header;
  const Header found = ReadHeader(&header);
  if (found == Header::kPartial) return false;
  if (found == Header::kMissing) {
    reply_.is_malformed = true;
    Advance(0, State::kBody);
    return true;
  }
  absl::string_view name = header;
  if (absl::ConsumeSuffix(&name, "\" string=\"false")) {
    parameter_is_string_ = false;
  } else {
    parameter_is_string_ = true;
    if (!absl::ConsumeSuffix(&name, "\" string=\"true")) reply_.is_malformed = true;
  }
  parameter_name_ = std::string(name);
  Advance(header.size() + kHeaderEnd.size(), State::kValue);
  return true;
}

bool ReplyParser::StepValue() {
  const size_t close = buffer_.find(kParameterClose.data(), scan_, kParameterClose.size());
  const size_t eos = buffer_.find(kEos.data(), scan_, kEos.size());
  if (eos < close) {
    // The model stopped inside a value.
    reply_.has_incomplete_call = true;
    Advance(eos + kEos.size() - at_, State::kEnded);
    return true;
  }
  if (close == std::string::npos) {
    const size_t overlap = std::max(kParameterClose.size(), kEos.size()) - 1;
    scan_ = std::max(at_, buffer_.size() - std::min(buffer_.size(), overlap));
    return false;
  }
  AddParameter(Rest().substr(0, close - at_));
  Advance(close + kParameterClose.size() - at_, State::kBody);
  return true;
}

void ReplyParser::AddParameter(absl::string_view value) {
  std::string json;
  if (!parameter_is_string_ && IsJson(value)) {
    json = std::string(absl::StripAsciiWhitespace(value));
  } else {
    if (!parameter_is_string_) reply_.is_malformed = true;
    json = PythonJsonString(value);
  }
  // As in a Python dictionary: the last of equal names gives the value, the first the place.
  const auto [index, inserted] = parameter_index_.try_emplace(parameter_name_, parameters_.size());
  if (inserted) {
    parameters_.push_back({parameter_name_, std::move(json)});
  } else {
    parameters_[index->second].json = std::move(json);
  }
}

void ReplyParser::CompleteCall() {
  ToolCall call;
  call.name = std::exchange(call_name_, {});
  call.arguments.push_back('{');
  for (const Parameter& parameter : parameters_) {
    absl::StrAppend(&call.arguments, call.arguments.size() > 1 ? ", " : "",
                    PythonJsonString(parameter.name), ": ", parameter.json);
  }
  call.arguments.push_back('}');
  parameters_.clear();
  parameter_index_.clear();
  delta_.tool_calls.push_back(std::move(call));
}

ParsedReply ParseReply(absl::string_view text, bool thinking) {
  ReplyParser parser(thinking);
  parser.Push(text);
  parser.Finish();
  return parser.reply();
}

}  // namespace isthmus::text
