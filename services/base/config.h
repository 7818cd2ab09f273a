// SPDX-License-Identifier: Apache-2.0
// Configuration: a struct whose fields are their defaults, and one list of them that everything
// walks: loading, --set, --help, --print-config, range checks, the generated reference and schema.
//
//   struct PrefillConfig {
//     int32_t chunk_tokens = 512;
//     absl::Duration timeout = absl::Seconds(2);
//
//     template <typename Visitor>
//     void VisitFields(Visitor& visit) {
//       visit("chunk_tokens", chunk_tokens, Range<int32_t>{1, 4096}, "Prompt tokens in one step.");
//       visit("timeout", timeout, Range<absl::Duration>{...}, "From ... to ... Past it, ...");
//     }
//   };
//
// A dotted name ("model.index_topk") is a nested object in the file. A map of switches ("patches")
// takes its members as they are, dots included. Nothing here reads the environment.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace isthmus {

// Constraints, inclusive at both ends.
template <typename T>
struct Range {
  T min;
  T max;
};
template <typename T>
struct MultipleOf {
  T multiple;
  T max;
};
struct OneOf {
  std::vector<std::string> values;
};
// Any text, list or switch will pass.
struct AnyValue {};

// One field of a config struct, type erased. It points into the struct, which must outlive it.
struct ConfigField {
  std::string name;
  std::string type;        // "integer", "number", "switch", "text", "duration", "list", "switches"
  std::string constraint;  // For people: "1 to 4096", "one of math, reference"; may be empty.
  std::string constraint_schema;  // The same as an object of JSON Schema keywords; may be "{}".
  std::string help;
  std::string default_json;                                     // The value when bound.
  std::function<absl::Status(const nlohmann::json&)> set_json;  // Checks type and constraint.
  std::function<std::string()> get_json;                        // The present value.
};

namespace config_internal {

// Reads a JSON value of exactly the right type; numbers never come from strings or back.
absl::Status Read(const nlohmann::json& json, bool* out);
absl::Status Read(const nlohmann::json& json, int32_t* out);
absl::Status Read(const nlohmann::json& json, int64_t* out);
absl::Status Read(const nlohmann::json& json, double* out);
absl::Status Read(const nlohmann::json& json, std::string* out);
absl::Status Read(const nlohmann::json& json, absl::Duration* out);
absl::Status Read(const nlohmann::json& json, std::vector<std::string>* out);
absl::Status Read(const nlohmann::json& json, std::map<std::string, bool>* out);

std::string Write(bool value);
std::string Write(int32_t value);
std::string Write(int64_t value);
std::string Write(double value);
std::string Write(const std::string& value);
std::string Write(absl::Duration value);
std::string Write(const std::vector<std::string>& value);
std::string Write(const std::map<std::string, bool>& value);

inline std::string TypeName(const bool&) { return "switch"; }
inline std::string TypeName(const int32_t&) { return "integer"; }
inline std::string TypeName(const int64_t&) { return "integer"; }
inline std::string TypeName(const double&) { return "number"; }
inline std::string TypeName(const std::string&) { return "text"; }
inline std::string TypeName(const absl::Duration&) { return "duration"; }
inline std::string TypeName(const std::vector<std::string>&) { return "list"; }
inline std::string TypeName(const std::map<std::string, bool>&) { return "switches"; }

absl::Status OutOfRange(const std::string& value, const std::string& constraint);

template <typename T>
std::string Text(const Range<T>& c) {
  return Write(c.min) + " to " + Write(c.max);
}
template <typename T>
std::string Text(const MultipleOf<T>& c) {
  return "a multiple of " + Write(c.multiple) + ", at most " + Write(c.max);
}
std::string Text(const OneOf& c);
inline std::string Text(const AnyValue&) { return ""; }

template <typename T>
std::string Schema(const Range<T>& c) {
  return "{\"minimum\": " + Write(c.min) + ", \"maximum\": " + Write(c.max) + "}";
}
template <typename T>
std::string Schema(const MultipleOf<T>& c) {
  return "{\"minimum\": " + Write(c.multiple) + ", \"maximum\": " + Write(c.max) +
         ", \"multipleOf\": " + Write(c.multiple) + "}";
}
inline std::string Schema(const OneOf& c) { return "{\"enum\": " + Write(c.values) + "}"; }
// JSON Schema cannot compare durations.
inline std::string Schema(const Range<absl::Duration>&) { return "{}"; }
inline std::string Schema(const AnyValue&) { return "{}"; }

template <typename T>
bool Allows(const Range<T>& c, const T& value) {
  return c.min <= value && value <= c.max;  // A NaN fails both.
}
template <typename T>
bool Allows(const MultipleOf<T>& c, const T& value) {
  return value > 0 && value <= c.max && value % c.multiple == 0;
}
bool Allows(const OneOf& c, const std::string& value);
template <typename T>
bool Allows(const AnyValue&, const T&) {
  return true;
}

}  // namespace config_internal

// The fields of one config struct, in the order of VisitFields.
class ConfigFields {
 public:
  // `config` must outlive the result.
  template <typename Config>
  static ConfigFields Of(Config& config) {
    ConfigFields fields;
    config.VisitFields(fields);
    return fields;
  }

  // The visitor that VisitFields calls; not for other callers.
  template <typename T, typename Constraint>
  void operator()(absl::string_view name, T& field, const Constraint& constraint,
                  absl::string_view help) {
    ConfigField entry;
    entry.name = std::string(name);
    entry.type = config_internal::TypeName(field);
    entry.constraint = config_internal::Text(constraint);
    entry.constraint_schema = config_internal::Schema(constraint);
    entry.help = std::string(help);
    entry.default_json = config_internal::Write(field);
    entry.get_json = [&field] { return config_internal::Write(field); };
    entry.set_json = [&field, constraint](const nlohmann::json& json) -> absl::Status {
      T value = field;
      absl::Status status = config_internal::Read(json, &value);
      if (!status.ok()) return status;
      if (!config_internal::Allows(constraint, value)) {
        return config_internal::OutOfRange(config_internal::Write(value),
                                           config_internal::Text(constraint));
      }
      field = std::move(value);
      return absl::OkStatus();
    };
    fields_.push_back(std::move(entry));
  }

  const std::vector<ConfigField>& fields() const { return fields_; }

  // Sets fields from the text of a JSON object. InvalidArgument names the key, the value and what
  // is allowed; an unknown or doubled key is an error that names the nearest known ones. `source`
  // (a file name) opens the message.
  absl::Status LoadJson(absl::string_view text, absl::string_view source);

  // LoadJson of a file of at most 1 MiB. NotFound names a path that cannot be read.
  absl::Status LoadFile(const std::string& path);

  // One "key=value". Text fields take the value as it is; lists are split at commas.
  absl::Status Set(absl::string_view assignment);

  // The present values as a JSON object, as --print-config prints it and LoadJson reads it.
  std::string ToJson() const;

  // For --help: one paragraph per field.
  std::string HelpText() const;

  // For the generated reference: one Markdown table.
  std::string ToMarkdown() const;

  // For charts and editors: a JSON Schema of the file that LoadFile reads. It knows names, types
  // and ranges, but not the ranges of durations.
  std::string ToJsonSchema() const;

 private:
  const ConfigField* Find(absl::string_view name) const;
  absl::Status UnknownKey(absl::string_view key) const;
  absl::Status LoadObject(const nlohmann::json& object, const std::string& prefix);

  std::vector<ConfigField> fields_;
};

}  // namespace isthmus
