// SPDX-License-Identifier: Apache-2.0
#include "services/model/bounded_json.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace isthmus::model {
namespace {

using Json = nlohmann::json;

// Builds the document from the parser's events; false stops the parser.
class DocumentBuilder {
 public:
  using string_t = Json::string_t;

  bool null() { return Place(Json(nullptr)); }
  bool boolean(bool value) { return Place(Json(value)); }
  bool number_integer(Json::number_integer_t value) { return Place(Json(value)); }
  bool number_unsigned(Json::number_unsigned_t value) { return Place(Json(value)); }
  bool number_float(Json::number_float_t value, const string_t&) { return Place(Json(value)); }
  bool string(string_t& value) { return Place(Json(std::move(value))); }
  bool binary(Json::binary_t&) { return Fail("binary value"); }
  bool start_object(size_t) { return Open(Json::object()); }
  bool start_array(size_t) { return Open(Json::array()); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }

  bool key(string_t& name) {
    const auto [slot, is_first] = open_.back()->get_ref<Json::object_t&>().try_emplace(name);
    if (!is_first) return Fail(absl::StrCat("key '", PrintableName(name), "' appears twice"));
    slot_ = &slot->second;
    return true;
  }

  bool parse_error(size_t position, const std::string& last_token, const Json::exception&) {
    return Fail(absl::StrCat("not JSON at byte ", position, ", after '",
                             absl::CHexEscape(last_token.substr(0, 40)), "'"));
  }

  Json& document() { return document_; }
  const std::string& problem() const { return problem_; }

 private:
  bool Fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  Json* Insert(Json value) {
    if (open_.empty()) {
      document_ = std::move(value);
      return &document_;
    }
    if (open_.back()->is_array()) {
      auto& elements = open_.back()->get_ref<Json::array_t&>();
      elements.push_back(std::move(value));
      return &elements.back();
    }
    *slot_ = std::move(value);
    return slot_;
  }

  bool Place(Json value) {
    Insert(std::move(value));
    return true;
  }

  bool Open(Json value) {
    if (open_.size() >= kMaxJsonDepth) {
      return Fail(absl::StrCat("nested deeper than ", kMaxJsonDepth, " levels"));
    }
    open_.push_back(Insert(std::move(value)));
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  Json document_;
  std::vector<Json*> open_;  // Containers around the next event. Stable: only the last one grows.
  Json* slot_ = nullptr;     // Value of the last key.
  std::string problem_;
};

}  // namespace

absl::StatusOr<Json> ParseBoundedJson(absl::string_view text, absl::string_view what) {
  DocumentBuilder builder;
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", builder.problem()));
  }
  return std::move(builder.document());
}

std::string PrintableName(absl::string_view name) {
  constexpr size_t kMaxBytes = 200;
  std::string out = absl::Utf8SafeCHexEscape(name.substr(0, kMaxBytes));
  if (name.size() > kMaxBytes) out += "...";
  return out;
}

}  // namespace isthmus::model
