// SPDX-License-Identifier: Apache-2.0
// Reads two assignments out of a Python file. Only what such a file needs is understood: string
// literals side by side, parentheses, comments, one dictionary.
#include "services/text/encoder_profile.h"

#include <fstream>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"
#include "services/text/utf8.h"

namespace isthmus::text {
namespace {

constexpr size_t kMaxSourceBytes = size_t{1} << 20;

class PythonReader {
 public:
  PythonReader(absl::string_view source, size_t at) : source_(source), at_(at) {}

  // White space, newlines and comments.
  void SkipBlank() {
    while (at_ < source_.size()) {
      const char c = source_[at_];
      if (c == '#') {
        while (at_ < source_.size() && source_[at_] != '\n') ++at_;
      } else if (absl::ascii_isspace(static_cast<unsigned char>(c))) {
        ++at_;
      } else {
        return;
      }
    }
  }
  void SkipSpaces() {
    while (at_ < source_.size() && (source_[at_] == ' ' || source_[at_] == '\t')) ++at_;
  }
  bool Take(char c) {
    SkipBlank();
    if (at_ >= source_.size() || source_[at_] != c) return false;
    ++at_;
    return true;
  }
  absl::Status Error(absl::string_view wanted) const {
    return absl::InvalidArgumentError(
        absl::StrCat("encoder file: expected ", wanted, " at byte ", at_, " of ", source_.size()));
  }

  // One or more literals side by side, in parentheses or not.
  absl::StatusOr<std::string> String() {
    const bool has_parenthesis = Take('(');
    SkipBlank();
    if (!AtQuote()) return Error("a string literal");
    std::string value;
    while (AtQuote()) {
      ISTHMUS_RETURN_IF_ERROR(Literal(&value));
      // A newline ends an expression outside brackets.
      if (has_parenthesis || depth_ > 0) {
        SkipBlank();
      } else {
        SkipSpaces();
      }
    }
    if (has_parenthesis && !Take(')')) return Error("')' after a string literal");
    return value;
  }

  // A whole assignment: String and the end of the line.
  absl::StatusOr<std::string> StringStatement() {
    SkipSpaces();
    if (at_ < source_.size() && source_[at_] == '\n') return Error("a string literal");
    ISTHMUS_ASSIGN_OR_RETURN(std::string value, String());
    SkipSpaces();
    if (at_ < source_.size() && source_[at_] != '\n' && source_[at_] != '#') {
      return Error("the end of the line");
    }
    return value;
  }

  // {"key": String, ...}
  absl::StatusOr<std::map<std::string, std::string>> Dictionary() {
    if (!Take('{')) return Error("'{'");
    ++depth_;
    std::map<std::string, std::string> entries;
    while (!Take('}')) {
      ISTHMUS_ASSIGN_OR_RETURN(std::string key, String());
      if (!Take(':')) return Error("':'");
      ISTHMUS_ASSIGN_OR_RETURN(std::string value, String());
      entries[std::move(key)] = std::move(value);
      if (Take('}')) break;
      if (!Take(',')) return Error("',' or '}'");
    }
    return entries;
  }

 private:
  bool AtQuote() const {
    return at_ < source_.size() && (source_[at_] == '"' || source_[at_] == '\'');
  }

  absl::Status Literal(std::string* value) {
    const char quote = source_[at_++];
    if (source_.substr(at_, 2) == std::string(2, quote)) return Error("no triple quotes");
    while (at_ < source_.size() && source_[at_] != '\n') {
      const char c = source_[at_++];
      if (c == quote) return absl::OkStatus();
      if (c != '\\') {
        value->push_back(c);
        continue;
      }
      ISTHMUS_RETURN_IF_ERROR(Escape(value));
    }
    return Error("the end of a string literal");
  }

  absl::Status Escape(std::string* value) {
    if (at_ >= source_.size()) return Error("an escape");
    const char c = source_[at_++];
    switch (c) {
      case 'n':
        value->push_back('\n');
        return absl::OkStatus();
      case 't':
        value->push_back('\t');
        return absl::OkStatus();
      case '\n':
        return absl::OkStatus();
      case '\\':
      case '\'':
      case '"':
        value->push_back(c);
        return absl::OkStatus();
      case 'u':
        return UnicodeEscape(value);
      default:
        return Error("one of \\n \\t \\\\ \\' \\\" \\u");
    }
  }

  absl::Status UnicodeEscape(std::string* value) {
    uint32_t code_point = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      if (at_ >= source_.size() ||
          !absl::ascii_isxdigit(static_cast<unsigned char>(source_[at_]))) {
        return Error("four hexadecimal digits");
      }
      const char digit = absl::ascii_tolower(static_cast<unsigned char>(source_[at_]));
      const int nibble = digit <= '9' ? digit - '0' : digit - 'a' + 10;
      code_point = code_point * 16 + static_cast<uint32_t>(nibble);
    }
    if (code_point >= 0xD800 && code_point < 0xE000) return Error("a scalar value");
    AppendUtf8(code_point, value);
    return absl::OkStatus();
  }

  const absl::string_view source_;
  size_t at_;
  int depth_ = 0;  // Inside braces.
};

// The offset behind `NAME =` or `NAME: annotation =` at the start of a line.
std::optional<size_t> FindAssignment(absl::string_view source, absl::string_view name) {
  size_t line = 0;
  while (line < source.size()) {
    size_t end = source.find('\n', line);
    if (end == absl::string_view::npos) end = source.size();
    const absl::string_view text = source.substr(line, end - line);
    if (absl::StartsWith(text, name)) {
      const size_t equals = text.find('=', name.size());
      const absl::string_view between =
          text.substr(name.size(), equals == absl::string_view::npos ? 0 : equals - name.size());
      const bool is_name =
          text.size() > name.size() &&
          (text[name.size()] == ' ' || text[name.size()] == '=' || text[name.size()] == ':');
      if (is_name && equals != absl::string_view::npos &&
          (absl::StripAsciiWhitespace(between).empty() || between.front() == ':')) {
        return line + equals + 1;
      }
    }
    line = end + 1;
  }
  return std::nullopt;
}

absl::StatusOr<EncoderProfile> Profile0731(absl::string_view source, size_t at) {
  ISTHMUS_ASSIGN_OR_RETURN(const auto prompts, PythonReader(source, at).Dictionary());
  EncoderProfile profile;
  profile.generation = EncoderGeneration::k0731;
  for (const char* level : {"low", "high", "max"}) {
    if (prompts.count(level) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("encoder file: REASONING_EFFORT_PROMPTS lacks '", level, "'"));
    }
  }
  if (!prompts.at("low").empty()) {
    return absl::UnimplementedError(absl::StrCat("encoder file: the prefix of effort 'low' has ",
                                                 prompts.at("low").size(),
                                                 " bytes, known encoders have none"));
  }
  profile.high_effort_prefix = prompts.at("high");
  profile.max_effort_prefix = prompts.at("max");
  return profile;
}

}  // namespace

absl::string_view EncoderGenerationName(EncoderGeneration generation) {
  return generation == EncoderGeneration::kApril ? "april" : "0731";
}

absl::StatusOr<EncoderProfile> ParseEncoderSource(absl::string_view source) {
  if (source.size() > kMaxSourceBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("encoder file has ", source.size(), " bytes, limit ", kMaxSourceBytes));
  }
  ISTHMUS_RETURN_IF_ERROR(CheckUtf8("encoder file", source));
  if (const auto at = FindAssignment(source, "REASONING_EFFORT_PROMPTS"); at.has_value()) {
    return Profile0731(source, *at);
  }
  if (const auto at = FindAssignment(source, "REASONING_EFFORT_MAX"); at.has_value()) {
    EncoderProfile profile;
    ISTHMUS_ASSIGN_OR_RETURN(profile.max_effort_prefix,
                             PythonReader(source, *at).StringStatement());
    return profile;
  }
  return absl::InvalidArgumentError(
      "encoder file: neither REASONING_EFFORT_PROMPTS (0731) nor REASONING_EFFORT_MAX (April) is "
      "assigned");
}

absl::StatusOr<EncoderProfile> LoadEncoderProfile(const std::string& checkpoint_dir) {
  for (const char* name : {"encoding/encoding_dsv4.py", "encoding_dsv4.py"}) {
    const std::string path = absl::StrCat(checkpoint_dir, "/", name);
    std::ifstream stream(path, std::ios::binary);
    if (!stream) continue;
    const std::string source((std::istreambuf_iterator<char>(stream)),
                             std::istreambuf_iterator<char>());
    auto profile = ParseEncoderSource(source);
    if (profile.ok()) return profile;
    return absl::Status(profile.status().code(),
                        absl::StrCat(path, ": ", profile.status().message()));
  }
  return EncoderProfile{};
}

}  // namespace isthmus::text
