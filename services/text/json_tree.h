// SPDX-License-Identifier: Apache-2.0
// Builds a JSON tree from text that comes from outside: bounded depth and width, errors with their
// byte offset, no exceptions. nlohmann's own parser has no depth limit, and its insertion-ordered
// objects look keys up one by one, so that width must be bounded too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace isthmus::text {

struct JsonLimits {
  size_t max_depth = 512;
  size_t max_keys = 4096;          // Members of one object.
  bool keep_big_integers = false;  // Beyond 64 bits: kept as decimal text, else refused.
};

// Integers beyond 64 bits are kept as a `binary` value of this subtype that holds their digits:
// JSON has no other use for `binary`.
inline constexpr uint64_t kBigIntegerSubtype = 1;

// SAX receiver of nlohmann::basic_json. Every callback returns false to stop with error().
template <typename Json>
class JsonTreeBuilder {
 public:
  explicit JsonTreeBuilder(const JsonLimits& limits) : limits_(limits) {}

  const std::string& error() const { return error_; }
  Json Take() { return std::move(root_); }

  bool null() { return Add(Json(nullptr)); }
  bool boolean(bool value) { return Add(Json(value)); }
  bool number_integer(typename Json::number_integer_t value) { return Add(Json(value)); }
  bool number_unsigned(typename Json::number_unsigned_t value) { return Add(Json(value)); }
  bool number_float(typename Json::number_float_t value, const std::string& token) {
    if (token.find_first_of(".eE") != std::string::npos) return Add(Json(value));
    if (!limits_.keep_big_integers) {
      return Fail(absl::StrCat("integer ", token, " exceeds 64 bits"));
    }
    if (token.size() > kMaxDigits) {
      return Fail(absl::StrCat("integer has ", token.size(), " digits, limit ", kMaxDigits));
    }
    return Add(Json::binary(std::vector<uint8_t>(token.begin(), token.end()), kBigIntegerSubtype));
  }
  bool string(std::string& value) { return Add(Json(std::move(value))); }
  bool binary(typename Json::binary_t&) { return Fail("binary value"); }
  bool start_object(size_t) { return Open(Json::object()); }
  bool start_array(size_t) { return Open(Json::array()); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }
  bool key(std::string& value) {
    Json& object = *open_.back();
    if (object.size() >= limits_.max_keys) {
      return Fail(absl::StrCat("object has more than ", limits_.max_keys, " members"));
    }
    // As in Python, the last of equal keys gives the value and the first gives the place.
    member_ = &object[value];
    return true;
  }
  template <typename Exception>
  bool parse_error(size_t offset, const std::string&, const Exception& exception) {
    if (error_.empty()) error_ = absl::StrCat("byte ", offset, ": ", WithoutText(exception.what()));
    return false;
  }

 private:
  static constexpr size_t kMaxDigits = 4300;  // The limit of Python's int().

  // nlohmann quotes the token that it was reading, all of it. Errors are logged, and a conversation
  // must not be, so that part is cut.
  static absl::string_view WithoutText(absl::string_view message) {
    return message.substr(0, message.find("; last read: "));
  }
  bool Fail(absl::string_view message) {
    error_ = std::string(message);
    return false;
  }
  Json* Place(Json&& value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (member_ != nullptr) {
      Json* const place = std::exchange(member_, nullptr);
      *place = std::move(value);
      return place;
    }
    open_.back()->push_back(std::move(value));
    return &open_.back()->back();
  }
  bool Add(Json&& value) {
    Place(std::move(value));
    return true;
  }
  bool Open(Json&& value) {
    if (open_.size() >= limits_.max_depth) {
      return Fail(absl::StrCat("nested deeper than ", limits_.max_depth, " levels"));
    }
    // Pointers into a parent stay valid: a parent does not grow while a child is open.
    open_.push_back(Place(std::move(value)));
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  const JsonLimits limits_;
  Json root_;
  std::vector<Json*> open_;
  Json* member_ = nullptr;  // Where the value of the key just read goes.
  std::string error_;
};

// Errors: InvalidArgument, with `name` and where known the byte offset.
template <typename Json>
absl::StatusOr<Json> ParseJsonTree(absl::string_view name, absl::string_view text,
                                   const JsonLimits& limits) {
  // The lexer would skip a byte order mark; Python refuses one.
  if (text.substr(0, 3) == "\xEF\xBB\xBF") {
    return absl::InvalidArgumentError(absl::StrCat(name, ": starts with a byte order mark"));
  }
  // JSON has no NUL byte anywhere, but the lexer would take one for the end of the text.
  if (const size_t nul = text.find('\0'); nul != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": NUL at byte ", nul, " of ", text.size()));
  }
  JsonTreeBuilder<Json> builder(limits);
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", builder.error()));
  }
  return builder.Take();
}

}  // namespace isthmus::text
