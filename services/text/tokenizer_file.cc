// SPDX-License-Identifier: Apache-2.0
// tokenizer.json, field by field.
#include "services/text/tokenizer_file.h"

#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"
#include "services/text/json_tree.h"

namespace isthmus::text {
namespace {

using nlohmann::json;

constexpr JsonLimits kLimits{
    .max_depth = 32, .max_keys = size_t{1} << 22, .keep_big_integers = false};

absl::Status WrongType(absl::string_view field, absl::string_view wanted, const json& value) {
  return absl::InvalidArgumentError(
      absl::StrCat("tokenizer.json: ", field, " must be ", wanted, ", is ", value.type_name()));
}

// A short form of a value for a message.
std::string Shown(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 80) text = absl::StrCat(text.substr(0, 80), "...");
  return text;
}

absl::Status Unsupported(absl::string_view field, const json& value) {
  return absl::UnimplementedError(
      absl::StrCat("tokenizer.json: ", field, " = ", Shown(value), " is not supported"));
}

// Refuses members that are not in `known`.
absl::Status CheckMembers(absl::string_view field, const json& object,
                          std::initializer_list<absl::string_view> known) {
  if (!object.is_object()) return WrongType(field, "an object", object);
  for (auto member = object.begin(); member != object.end(); ++member) {
    bool found = false;
    for (const absl::string_view name : known) found = found || name == member.key();
    if (!found) {
      return Unsupported(absl::StrCat(field, ".", member.key()), member.value());
    }
  }
  return absl::OkStatus();
}

// A member that must have one value, or be absent (when that means the same).
absl::Status CheckIs(absl::string_view field, const json& object, const char* name,
                     const json& wanted, bool required = false) {
  const auto member = object.find(name);
  const std::string path = absl::StrCat(field, ".", name);
  if (member == object.end()) {
    if (!required) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("tokenizer.json: ", path, " is missing"));
  }
  if (*member == wanted) return absl::OkStatus();
  return Unsupported(path, *member);
}

absl::StatusOr<const json*> Member(absl::string_view field, const json& object, const char* name) {
  const auto member = object.find(name);
  if (member == object.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer.json: ", field, ".", name, " is missing"));
  }
  return &*member;
}

absl::StatusOr<std::string> StringMember(absl::string_view field, const json& object,
                                         const char* name) {
  ISTHMUS_ASSIGN_OR_RETURN(const json* value, Member(field, object, name));
  if (!value->is_string()) return WrongType(absl::StrCat(field, ".", name), "a string", *value);
  return value->get_ref<const std::string&>();
}

absl::StatusOr<bool> BoolMember(absl::string_view field, const json& object, const char* name) {
  ISTHMUS_ASSIGN_OR_RETURN(const json* value, Member(field, object, name));
  if (!value->is_boolean()) return WrongType(absl::StrCat(field, ".", name), "a boolean", *value);
  return value->get<bool>();
}

absl::StatusOr<int32_t> TokenId(absl::string_view field, const json& value) {
  if (!value.is_number_unsigned()) return WrongType(field, "a token id", value);
  const auto id = value.get<uint64_t>();
  if (id > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer.json: ", field, " is ", id, ", limit 2^31 - 1"));
  }
  return static_cast<int32_t>(id);
}

absl::Status ReadAddedTokens(const json& list, TokenizerFile* file) {
  if (!list.is_array()) return WrongType("added_tokens", "an array", list);
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string field = absl::StrCat("added_tokens[", i, "]");
    const json& item = list[i];
    ISTHMUS_RETURN_IF_ERROR(CheckMembers(
        field, item,
        {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}));
    for (const char* name : {"single_word", "lstrip", "rstrip"}) {
      ISTHMUS_RETURN_IF_ERROR(CheckIs(field, item, name, false));
    }
    AddedToken token;
    ISTHMUS_ASSIGN_OR_RETURN(const json* id, Member(field, item, "id"));
    ISTHMUS_ASSIGN_OR_RETURN(token.id, TokenId(absl::StrCat(field, ".id"), *id));
    ISTHMUS_ASSIGN_OR_RETURN(token.content, StringMember(field, item, "content"));
    ISTHMUS_ASSIGN_OR_RETURN(token.is_normalized, BoolMember(field, item, "normalized"));
    ISTHMUS_ASSIGN_OR_RETURN(token.is_special, BoolMember(field, item, "special"));
    if (token.content.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokenizer.json: ", field, ".content is empty"));
    }
    file->added_tokens.push_back(std::move(token));
  }
  return absl::OkStatus();
}

absl::Status ReadSplit(const std::string& field, const json& stage, TokenizerFile* file) {
  ISTHMUS_RETURN_IF_ERROR(CheckMembers(field, stage, {"type", "pattern", "behavior", "invert"}));
  ISTHMUS_RETURN_IF_ERROR(CheckIs(field, stage, "behavior", "Isolated", true));
  ISTHMUS_RETURN_IF_ERROR(CheckIs(field, stage, "invert", false));
  ISTHMUS_ASSIGN_OR_RETURN(const json* pattern, Member(field, stage, "pattern"));
  const std::string path = absl::StrCat(field, ".pattern");
  ISTHMUS_RETURN_IF_ERROR(CheckMembers(path, *pattern, {"Regex"}));
  ISTHMUS_ASSIGN_OR_RETURN(std::string regex, StringMember(path, *pattern, "Regex"));
  file->split_patterns.push_back(std::move(regex));
  return absl::OkStatus();
}

// The last stage: maps bytes to the byte alphabet, and must not split or add a space itself.
absl::Status CheckByteLevelStage(const std::string& field, const json& stage) {
  ISTHMUS_RETURN_IF_ERROR(
      CheckMembers(field, stage, {"type", "add_prefix_space", "trim_offsets", "use_regex"}));
  ISTHMUS_RETURN_IF_ERROR(CheckIs(field, stage, "add_prefix_space", false, true));
  return CheckIs(field, stage, "use_regex", false, true);
}

absl::Status ReadPreTokenizer(const json& pre_tokenizer, TokenizerFile* file) {
  ISTHMUS_RETURN_IF_ERROR(CheckMembers("pre_tokenizer", pre_tokenizer, {"type", "pretokenizers"}));
  ISTHMUS_RETURN_IF_ERROR(CheckIs("pre_tokenizer", pre_tokenizer, "type", "Sequence", true));
  ISTHMUS_ASSIGN_OR_RETURN(const json* stages,
                           Member("pre_tokenizer", pre_tokenizer, "pretokenizers"));
  if (!stages->is_array()) return WrongType("pre_tokenizer.pretokenizers", "an array", *stages);
  for (size_t i = 0; i < stages->size(); ++i) {
    const std::string field = absl::StrCat("pre_tokenizer.pretokenizers[", i, "]");
    const json& stage = (*stages)[i];
    if (!stage.is_object()) return WrongType(field, "an object", stage);
    ISTHMUS_ASSIGN_OR_RETURN(const std::string type, StringMember(field, stage, "type"));
    const bool is_last = i + 1 == stages->size();
    if (type == "Split" && !is_last) {
      ISTHMUS_RETURN_IF_ERROR(ReadSplit(field, stage, file));
    } else if (type == "ByteLevel" && is_last) {
      return CheckByteLevelStage(field, stage);
    } else {
      return Unsupported(absl::StrCat(field, ".type", is_last ? " (last stage)" : ""), type);
    }
  }
  return absl::InvalidArgumentError(
      "tokenizer.json: pre_tokenizer.pretokenizers is empty, must end with ByteLevel");
}

// Nothing, or what a ByteLevel post-processor or decoder says about offsets and prefix spaces:
// neither changes ids or decoded bytes.
absl::Status CheckByteLevelOrNull(absl::string_view field, const json& value, bool may_be_null) {
  if (may_be_null && value.is_null()) return absl::OkStatus();
  ISTHMUS_RETURN_IF_ERROR(
      CheckMembers(field, value, {"type", "add_prefix_space", "trim_offsets", "use_regex"}));
  return CheckIs(field, value, "type", "ByteLevel", true);
}

absl::Status CheckNormalizer(const json& normalizer) {
  if (normalizer.is_null()) return absl::OkStatus();
  if (normalizer == json{{"type", "Sequence"}, {"normalizers", json::array()}}) {
    return absl::OkStatus();
  }
  return Unsupported("normalizer", normalizer);
}

absl::Status ReadMerges(const json& merges, TokenizerFile* file) {
  if (!merges.is_array()) return WrongType("model.merges", "an array", merges);
  file->merges.reserve(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    const json& merge = merges[i];
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
        file->merges.emplace_back(text.substr(0, space), text.substr(space + 1));
        continue;
      }
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      file->merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat("tokenizer.json: model.merges[", i,
                                                   "] = ", Shown(merge),
                                                   " is neither \"a b\" nor [\"a\", \"b\"]"));
  }
  return absl::OkStatus();
}

absl::Status CheckModelSettings(const json& model) {
  ISTHMUS_RETURN_IF_ERROR(CheckMembers(
      "model", model,
      {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
       "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"}));
  ISTHMUS_RETURN_IF_ERROR(CheckIs("model", model, "type", "BPE", true));
  for (const char* name :
       {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
    ISTHMUS_RETURN_IF_ERROR(CheckIs("model", model, name, nullptr));
  }
  for (const char* name : {"fuse_unk", "byte_fallback", "ignore_merges"}) {
    ISTHMUS_RETURN_IF_ERROR(CheckIs("model", model, name, false));
  }
  return absl::OkStatus();
}

absl::Status ReadModel(const json& model, TokenizerFile* file) {
  ISTHMUS_RETURN_IF_ERROR(CheckModelSettings(model));
  ISTHMUS_ASSIGN_OR_RETURN(const json* vocab, Member("model", model, "vocab"));
  if (!vocab->is_object()) return WrongType("model.vocab", "an object", *vocab);
  file->vocab.reserve(vocab->size());
  for (auto token = vocab->begin(); token != vocab->end(); ++token) {
    absl::StatusOr<int32_t> id = TokenId("model.vocab", token.value());
    if (!id.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(id.status().message(), " (token '", token.key(), "')"));
    }
    file->vocab.emplace_back(token.key(), *id);
  }
  ISTHMUS_ASSIGN_OR_RETURN(const json* merges, Member("model", model, "merges"));
  return ReadMerges(*merges, file);
}

}  // namespace

absl::StatusOr<TokenizerFile> ParseTokenizerFile(absl::string_view text) {
  ISTHMUS_ASSIGN_OR_RETURN(const json root, ParseJsonTree<json>("tokenizer.json", text, kLimits));
  ISTHMUS_RETURN_IF_ERROR(
      CheckMembers("root", root,
                   {"version", "truncation", "padding", "added_tokens", "normalizer",
                    "pre_tokenizer", "post_processor", "decoder", "model"}));
  ISTHMUS_RETURN_IF_ERROR(CheckIs("root", root, "version", "1.0"));
  ISTHMUS_RETURN_IF_ERROR(CheckIs("root", root, "truncation", nullptr));
  ISTHMUS_RETURN_IF_ERROR(CheckIs("root", root, "padding", nullptr));
  TokenizerFile file;
  ISTHMUS_ASSIGN_OR_RETURN(const json* normalizer, Member("root", root, "normalizer"));
  ISTHMUS_RETURN_IF_ERROR(CheckNormalizer(*normalizer));
  ISTHMUS_ASSIGN_OR_RETURN(const json* post, Member("root", root, "post_processor"));
  ISTHMUS_RETURN_IF_ERROR(CheckByteLevelOrNull("post_processor", *post, true));
  ISTHMUS_ASSIGN_OR_RETURN(const json* decoder, Member("root", root, "decoder"));
  ISTHMUS_RETURN_IF_ERROR(CheckByteLevelOrNull("decoder", *decoder, false));
  ISTHMUS_ASSIGN_OR_RETURN(const json* added, Member("root", root, "added_tokens"));
  ISTHMUS_RETURN_IF_ERROR(ReadAddedTokens(*added, &file));
  ISTHMUS_ASSIGN_OR_RETURN(const json* pre_tokenizer, Member("root", root, "pre_tokenizer"));
  ISTHMUS_RETURN_IF_ERROR(ReadPreTokenizer(*pre_tokenizer, &file));
  ISTHMUS_ASSIGN_OR_RETURN(const json* model, Member("root", root, "model"));
  ISTHMUS_RETURN_IF_ERROR(ReadModel(*model, &file));
  return file;
}

}  // namespace isthmus::text
