// SPDX-License-Identifier: Apache-2.0
#include "services/base/config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "services/base/status_macros.h"

namespace isthmus {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxFileBytes = size_t{1} << 20;

// Levenshtein distance, for "did you mean"; keys are short.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// Parses JSON and refuses a key that an object holds twice, which the library would let win.
absl::StatusOr<Json> ParseStrictly(absl::string_view text) {
  std::vector<std::set<std::string>> open;
  std::string doubled;
  const Json::parser_callback_t watch = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end && !open.empty()) open.pop_back();
    if (event == Json::parse_event_t::key && !open.empty()) {
      const std::string key = parsed.get<std::string>();
      if (!open.back().insert(key).second) doubled = key;
    }
    return true;
  };
  Json json;
  try {
    json = Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("not JSON: ", error.what()));
  }
  if (!doubled.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("key \"", doubled, "\" appears twice"));
  }
  return json;
}

std::string Shown(const Json& json) {
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

absl::Status WrongType(const Json& json, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat("is ", Shown(json), ", want ", wanted));
}

// The JSON value that "key=text" means for a field of `type`.
absl::StatusOr<Json> ValueFromText(absl::string_view type, absl::string_view text) {
  if (type == "text" || type == "duration") return Json(std::string(text));
  if (type == "list" && !absl::StartsWith(text, "[")) {
    Json list = Json::array();
    if (text.empty()) return list;
    for (absl::string_view item : absl::StrSplit(text, ',')) list.push_back(std::string(item));
    return list;
  }
  return ParseStrictly(text);
}

absl::Status AtKey(absl::string_view key, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(key, ": ", status.message()));
}

}  // namespace

namespace config_internal {

absl::Status Read(const Json& json, bool* out) {
  if (!json.is_boolean()) return WrongType(json, "true or false");
  *out = json.get<bool>();
  return absl::OkStatus();
}

absl::Status Read(const Json& json, int64_t* out) {
  if (!json.is_number_integer()) return WrongType(json, "a whole number");
  if (json.is_number_unsigned() && json.get<uint64_t>() > uint64_t{INT64_MAX}) {
    return WrongType(json, "a whole number below 2^63");
  }
  *out = json.get<int64_t>();
  return absl::OkStatus();
}

absl::Status Read(const Json& json, int32_t* out) {
  int64_t wide = 0;
  ISTHMUS_RETURN_IF_ERROR(Read(json, &wide));
  if (wide < INT32_MIN || wide > INT32_MAX) return WrongType(json, "a number of 32 bits");
  *out = static_cast<int32_t>(wide);
  return absl::OkStatus();
}

absl::Status Read(const Json& json, double* out) {
  if (!json.is_number()) return WrongType(json, "a number");
  *out = json.get<double>();
  return std::isfinite(*out) ? absl::OkStatus() : WrongType(json, "a finite number");
}

absl::Status Read(const Json& json, std::string* out) {
  if (!json.is_string()) return WrongType(json, "a string");
  *out = json.get<std::string>();
  return absl::OkStatus();
}

absl::Status Read(const Json& json, absl::Duration* out) {
  const absl::string_view wanted = "a duration with its unit, such as \"250ms\" or \"2s\"";
  if (!json.is_string()) return WrongType(json, wanted);
  absl::Duration value;
  if (!absl::ParseDuration(json.get<std::string>(), &value)) return WrongType(json, wanted);
  *out = value;
  return absl::OkStatus();
}

absl::Status Read(const Json& json, std::vector<std::string>* out) {
  if (!json.is_array()) return WrongType(json, "a list of strings");
  std::vector<std::string> list;
  for (const Json& item : json) {
    if (!item.is_string()) return WrongType(item, "a string in the list");
    list.push_back(item.get<std::string>());
  }
  *out = std::move(list);
  return absl::OkStatus();
}

// Adds to the map, so that a file and --set can each name some of the switches.
absl::Status Read(const Json& json, std::map<std::string, bool>* out) {
  if (!json.is_object()) return WrongType(json, "an object of true and false");
  for (const auto& [key, value] : json.items()) {
    bool on = false;
    ISTHMUS_RETURN_IF_ERROR(AtKey(key, Read(value, &on)));
    (*out)[key] = on;
  }
  return absl::OkStatus();
}

std::string Write(bool value) { return value ? "true" : "false"; }
std::string Write(int32_t value) { return absl::StrCat(value); }
std::string Write(int64_t value) { return absl::StrCat(value); }
std::string Write(double value) { return Json(value).dump(); }
std::string Write(const std::string& value) {
  return Json(value).dump(-1, ' ', false, Json::error_handler_t::replace);
}
std::string Write(absl::Duration value) { return Write(absl::FormatDuration(value)); }
std::string Write(const std::vector<std::string>& value) {
  return Json(value).dump(-1, ' ', false, Json::error_handler_t::replace);
}
std::string Write(const std::map<std::string, bool>& value) {
  return value.empty() ? "{}" : Json(value).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string Text(const OneOf& c) { return absl::StrCat("one of ", absl::StrJoin(c.values, ", ")); }

bool Allows(const OneOf& c, const std::string& value) {
  return std::find(c.values.begin(), c.values.end(), value) != c.values.end();
}

absl::Status OutOfRange(const std::string& value, const std::string& constraint) {
  return absl::InvalidArgumentError(absl::StrCat("is ", value, ", want ", constraint));
}

}  // namespace config_internal

const ConfigField* ConfigFields::Find(absl::string_view name) const {
  for (const ConfigField& field : fields_) {
    if (field.name == name) return &field;
  }
  return nullptr;
}

absl::Status ConfigFields::UnknownKey(absl::string_view key) const {
  std::vector<std::pair<size_t, absl::string_view>> near;
  near.reserve(fields_.size());
  for (const ConfigField& field : fields_) {
    near.emplace_back(EditDistance(key, field.name), field.name);
  }
  std::sort(near.begin(), near.end());
  std::vector<absl::string_view> names;
  for (size_t i = 0; i < near.size() && i < 3; ++i) names.push_back(near[i].second);
  return absl::InvalidArgumentError(
      absl::StrCat("unknown key \"", key, "\"; the nearest are ", absl::StrJoin(names, ", ")));
}

absl::Status ConfigFields::LoadObject(const Json& object, const std::string& prefix) {
  for (const auto& [key, value] : object.items()) {
    const std::string name = prefix.empty() ? key : absl::StrCat(prefix, ".", key);
    if (const ConfigField* field = Find(name); field != nullptr) {
      ISTHMUS_RETURN_IF_ERROR(AtKey(name, field->set_json(value)));
      continue;
    }
    const bool opens_group =
        std::any_of(fields_.begin(), fields_.end(), [&](const ConfigField& field) {
          return absl::StartsWith(field.name, absl::StrCat(name, "."));
        });
    if (!opens_group) return UnknownKey(name);
    if (!value.is_object()) return AtKey(name, WrongType(value, "an object"));
    ISTHMUS_RETURN_IF_ERROR(LoadObject(value, name));  // Depth is bounded by the known names.
  }
  return absl::OkStatus();
}

absl::Status ConfigFields::LoadJson(absl::string_view text, absl::string_view source) {
  absl::StatusOr<Json> json = ParseStrictly(text);
  if (!json.ok()) return AtKey(source, json.status());
  if (!json->is_object()) return AtKey(source, WrongType(*json, "an object"));
  return AtKey(source, LoadObject(*json, ""));
}

absl::Status ConfigFields::LoadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read config file ", path));
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  if (text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("config file ", path, " is empty"));
  }
  if (text.size() > kMaxFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("config file ", path, " is larger than ", kMaxFileBytes, " bytes"));
  }
  return LoadJson(text, path);
}

absl::Status ConfigFields::Set(absl::string_view assignment) {
  const size_t equals = assignment.find('=');
  if (equals == absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("--set takes key=value, got \"", assignment, "\""));
  }
  const absl::string_view key = assignment.substr(0, equals);
  const absl::string_view text = assignment.substr(equals + 1);
  if (const ConfigField* field = Find(key); field != nullptr) {
    absl::StatusOr<Json> value = ValueFromText(field->type, text);
    if (!value.ok()) return AtKey(absl::StrCat("--set ", key), value.status());
    return AtKey(absl::StrCat("--set ", key), field->set_json(*value));
  }
  for (const ConfigField& field : fields_) {
    const std::string prefix = field.name + ".";
    if (field.type != "switches" || !absl::StartsWith(key, prefix)) continue;
    absl::StatusOr<Json> value = ValueFromText("switch", text);
    if (!value.ok()) return AtKey(absl::StrCat("--set ", key), value.status());
    Json object = Json::object();
    object[std::string(key.substr(prefix.size()))] = *value;
    return AtKey(absl::StrCat("--set ", key), field.set_json(object));
  }
  return AtKey("--set", UnknownKey(key));
}

std::string ConfigFields::ToJson() const {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  for (const ConfigField& field : fields_) {
    nlohmann::ordered_json* place = &root;
    for (absl::string_view part : absl::StrSplit(field.name, '.')) {
      place = &(*place)[std::string(part)];
    }
    *place = nlohmann::ordered_json::parse(field.get_json());
  }
  return root.dump(2) + "\n";
}

std::string ConfigFields::HelpText() const {
  std::string text;
  for (const ConfigField& field : fields_) {
    absl::StrAppend(&text, "  ", field.name, " (", field.type);
    if (!field.constraint.empty()) absl::StrAppend(&text, ", ", field.constraint);
    absl::StrAppend(&text, "; default ", field.default_json, ")\n      ", field.help, "\n");
  }
  return text;
}

std::string ConfigFields::ToMarkdown() const {
  std::string text = "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n";
  for (const ConfigField& field : fields_) {
    const std::string help = absl::StrJoin(absl::StrSplit(field.help, '|'), "\\|");
    absl::StrAppend(&text, "| `", field.name, "` | ", field.type, " | `", field.default_json,
                    "` | ", field.constraint, " | ", help, " |\n");
  }
  return text;
}

std::string ConfigFields::ToJsonSchema() const {
  using OrderedJson = nlohmann::ordered_json;
  const std::map<std::string, std::string> type_names = {
      {"integer", "integer"}, {"number", "number"}, {"switch", "boolean"},  {"text", "string"},
      {"duration", "string"}, {"list", "array"},    {"switches", "object"},
  };
  const OrderedJson empty_object =
      OrderedJson::parse(R"({"type": "object", "additionalProperties": false, "properties": {}})");
  OrderedJson root = empty_object;
  for (const ConfigField& field : fields_) {
    std::vector<std::string> parts = absl::StrSplit(field.name, '.');
    OrderedJson* place = &root;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      OrderedJson& group = (*place)["properties"][parts[i]];
      if (group.is_null()) group = empty_object;
      place = &group;
    }
    OrderedJson& schema = (*place)["properties"][parts.back()];
    schema["type"] = type_names.at(field.type);
    schema["description"] = field.help;
    schema["default"] = OrderedJson::parse(field.default_json);
    schema.update(OrderedJson::parse(field.constraint_schema));
    if (field.type == "list") schema["items"]["type"] = "string";
    if (field.type == "switches") schema["additionalProperties"]["type"] = "boolean";
  }
  return root.dump(2) + "\n";
}

}  // namespace isthmus
