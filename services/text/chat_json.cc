// SPDX-License-Identifier: Apache-2.0
// Python's JSON writer over nlohmann's tree.
#include "services/text/chat_json.h"

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/text/json_tree.h"

namespace isthmus::text {
namespace {

using nlohmann::ordered_json;

constexpr JsonLimits kChatLimits{.max_depth = 512, .max_keys = 4096, .keep_big_integers = true};

void AppendString(absl::string_view value, std::string* out) {
  out->push_back('"');
  for (const char c : value) {
    switch (c) {
      case '"':
        out->append("\\\"");
        break;
      case '\\':
        out->append("\\\\");
        break;
      case '\n':
        out->append("\\n");
        break;
      case '\r':
        out->append("\\r");
        break;
      case '\t':
        out->append("\\t");
        break;
      case '\f':
        out->append("\\f");
        break;
      case '\b':
        out->append("\\b");
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          absl::StrAppendFormat(out, "\\u%04x", static_cast<unsigned char>(c));
        } else {
          out->push_back(c);
        }
    }
  }
  out->push_back('"');
}

// repr(float): the shortest digits that read back the same, positional between 1e-4 and 1e16.
void AppendFloat(double value, std::string* out) {
  if (std::isnan(value)) {
    out->append("NaN");
    return;
  }
  if (std::isinf(value)) {
    out->append(value < 0 ? "-Infinity" : "Infinity");
    return;
  }
  char buffer[40];
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  absl::string_view text(buffer, static_cast<size_t>(end.ptr - buffer));
  if (text.front() == '-') {
    out->push_back('-');
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  int exponent = 0;
  const bool negative = text[e + 1] == '-';
  std::from_chars(text.data() + e + 2, text.data() + text.size(), exponent);
  if (negative) exponent = -exponent;
  std::string digits(1, text.front());
  if (e > 2) absl::StrAppend(&digits, text.substr(2, e - 2));
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out->push_back(digits[0]);
    if (count > 1) absl::StrAppend(out, ".", digits.substr(1));
    absl::StrAppendFormat(out, "e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
  } else if (exponent < 0) {
    absl::StrAppend(out, "0.", std::string(static_cast<size_t>(-exponent - 1), '0'), digits);
  } else if (count <= exponent + 1) {
    absl::StrAppend(out, digits, std::string(static_cast<size_t>(exponent + 1 - count), '0'), ".0");
  } else {
    const auto point = static_cast<size_t>(exponent) + 1;
    absl::StrAppend(out, digits.substr(0, point), ".", digits.substr(point));
  }
}

// Recursion is bounded by the depth of the tree, which ParseChatJson bounds.
void AppendJson(const ordered_json& value, std::string* out) {
  using Kind = ordered_json::value_t;
  switch (value.type()) {
    case Kind::null:
    case Kind::discarded:
      out->append("null");
      return;
    case Kind::boolean:
      out->append(value.get<bool>() ? "true" : "false");
      return;
    case Kind::number_integer:
      absl::StrAppend(out, value.get<int64_t>());
      return;
    case Kind::number_unsigned:
      absl::StrAppend(out, value.get<uint64_t>());
      return;
    case Kind::number_float:
      AppendFloat(value.get<double>(), out);
      return;
    case Kind::string:
      AppendString(value.get_ref<const std::string&>(), out);
      return;
    case Kind::binary: {
      const auto& digits = value.get_binary();
      out->append(digits.begin(), digits.end());
      return;
    }
    case Kind::array: {
      absl::string_view separator = "[";
      for (const ordered_json& item : value) {
        absl::StrAppend(out, separator);
        AppendJson(item, out);
        separator = ", ";
      }
      out->append(value.empty() ? "[]" : "]");
      return;
    }
    case Kind::object: {
      absl::string_view separator = "{";
      for (auto item = value.begin(); item != value.end(); ++item) {
        absl::StrAppend(out, separator);
        AppendString(item.key(), out);
        out->append(": ");
        AppendJson(item.value(), out);
        separator = ", ";
      }
      out->append(value.empty() ? "{}" : "}");
      return;
    }
  }
}

}  // namespace

absl::StatusOr<ordered_json> ParseChatJson(absl::string_view name, absl::string_view text) {
  return ParseJsonTree<ordered_json>(name, text, kChatLimits);
}

std::string PythonJson(const ordered_json& value) {
  std::string out;
  AppendJson(value, &out);
  return out;
}

std::string PythonJsonString(absl::string_view value) {
  std::string out;
  AppendString(value, &out);
  return out;
}

bool IsJson(absl::string_view text) { return ParseChatJson("value", text).ok(); }

}  // namespace isthmus::text
