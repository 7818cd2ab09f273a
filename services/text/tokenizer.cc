// SPDX-License-Identifier: Apache-2.0
// Puts the stages together, and checks that the tables of the file fit each other.
#include "services/text/tokenizer.h"

#include <array>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/status_macros.h"
#include "services/text/utf8.h"

namespace isthmus::text {
namespace {

constexpr char32_t kAlphabetEnd = 0x144;  // One more than the last character of the alphabet.

// GPT-2's byte alphabet: printable Latin-1 characters stand for themselves, all other bytes, in
// order, for U+0100 and following. Value: the byte of a character, or -1.
std::array<int16_t, kAlphabetEnd> MakeAlphabet() {
  std::array<int16_t, kAlphabetEnd> byte_of{};
  byte_of.fill(-1);
  int16_t stand_in = 0x100;
  for (int16_t byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    byte_of[static_cast<size_t>(printable ? byte : stand_in++)] = byte;
  }
  return byte_of;
}

// The bytes that a token's spelling stands for. A spelling with a character outside the alphabet
// (`<｜User｜>`) stands for itself, as in Hugging Face's ByteLevel decoder.
std::string BytesOf(absl::string_view content) {
  static const std::array<int16_t, kAlphabetEnd> kByteOf = MakeAlphabet();
  std::string bytes;
  for (size_t offset = 0; offset < content.size();) {
    const Utf8Step step = NextUtf8(content, offset);
    if (step.kind != Utf8Kind::kCharacter || step.code_point >= kAlphabetEnd ||
        kByteOf[step.code_point] < 0) {
      return std::string(content);
    }
    bytes.push_back(static_cast<char>(kByteOf[step.code_point]));
    offset += step.size;
  }
  return bytes;
}

// How the alphabet spells one byte.
std::string SpellingOf(uint8_t byte) {
  static const std::array<int16_t, kAlphabetEnd> kByteOf = MakeAlphabet();
  std::string spelling;
  for (size_t c = 0; c < kByteOf.size(); ++c) {
    if (kByteOf[c] == byte) AppendUtf8(static_cast<char32_t>(c), &spelling);
  }
  return spelling;
}

absl::Status FileError(absl::string_view message) {
  return absl::InvalidArgumentError(absl::StrCat("tokenizer.json: ", message));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(absl::string_view json, bool jit) {
  ISTHMUS_ASSIGN_OR_RETURN(const TokenizerFile file, ParseTokenizerFile(json));
  auto pre_tokenizer = PreTokenizer::Create(file.split_patterns, jit);
  if (!pre_tokenizer.ok()) {
    return absl::Status(
        pre_tokenizer.status().code(),
        absl::StrCat("tokenizer.json: pre_tokenizer: ", pre_tokenizer.status().message()));
  }
  std::unique_ptr<Tokenizer> tokenizer(new Tokenizer(*std::move(pre_tokenizer)));
  ISTHMUS_RETURN_IF_ERROR(tokenizer->AddTokens(file));
  ISTHMUS_RETURN_IF_ERROR(tokenizer->AddMerges(file));
  return tokenizer;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return absl::NotFoundError(absl::StrCat("cannot open tokenizer file ", path));
  const std::string json((std::istreambuf_iterator<char>(stream)),
                         std::istreambuf_iterator<char>());
  if (stream.bad()) return absl::NotFoundError(absl::StrCat("cannot read tokenizer file ", path));
  auto tokenizer = FromJson(json);
  if (tokenizer.ok()) return tokenizer;
  return absl::Status(tokenizer.status().code(),
                      absl::StrCat(path, ": ", tokenizer.status().message()));
}

absl::Status Tokenizer::AddToken(const std::string& content, int32_t id) {
  const auto [known, inserted] = ids_.try_emplace(content, id);
  if (!inserted) {
    if (known->second == id) return absl::OkStatus();
    return FileError(absl::StrCat("token '", content, "' has ids ", known->second, " and ", id));
  }
  const auto index = static_cast<size_t>(id);
  if (index >= token_bytes_.size()) {
    return FileError(absl::StrCat("token '", content, "' has id ", id, ", but there are only ",
                                  token_bytes_.size(), " tokens"));
  }
  std::string bytes = BytesOf(content);
  if (bytes.empty()) return FileError(absl::StrCat("token ", id, " is empty"));
  if (!token_bytes_[index].empty()) {
    return FileError(
        absl::StrCat("tokens '", content, "' and '", token_bytes_[index], "' both have id ", id));
  }
  token_bytes_[index] = std::move(bytes);
  return absl::OkStatus();
}

absl::Status Tokenizer::AddTokens(const TokenizerFile& file) {
  // Distinct contents with distinct ids below their number: then every id is taken.
  absl::flat_hash_map<absl::string_view, int32_t> contents;
  contents.reserve(file.vocab.size() + file.added_tokens.size());
  for (const auto& [content, id] : file.vocab) contents.try_emplace(content, id);
  for (const AddedToken& token : file.added_tokens) contents.try_emplace(token.content, token.id);
  token_bytes_.resize(contents.size());
  is_special_.resize(contents.size());
  ids_.reserve(contents.size());
  for (const auto& [content, id] : file.vocab) ISTHMUS_RETURN_IF_ERROR(AddToken(content, id));
  for (const AddedToken& token : file.added_tokens) {
    ISTHMUS_RETURN_IF_ERROR(AddToken(token.content, token.id));
    (token.is_normalized ? second_pass_ : first_pass_).Insert(token.content, token.id);
    if (token.is_special) is_special_[static_cast<size_t>(token.id)] = true;
  }
  for (int byte = 0; byte < 256; ++byte) {
    const std::string spelling = SpellingOf(static_cast<uint8_t>(byte));
    const std::optional<int32_t> id = IdOf(spelling);
    if (!id.has_value()) {
      return FileError(absl::StrFormat("byte 0x%02x ('%s') has no token", byte, spelling));
    }
    bpe_.SetByteToken(static_cast<uint8_t>(byte), *id);
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::AddMerges(const TokenizerFile& file) {
  for (size_t rank = 0; rank < file.merges.size(); ++rank) {
    const auto& [left, right] = file.merges[rank];
    const std::string merged = absl::StrCat(left, right);
    int32_t ids[3] = {};
    const std::string* const parts[3] = {&left, &right, &merged};
    for (int i = 0; i < 3; ++i) {
      const std::optional<int32_t> id = IdOf(*parts[i]);
      if (!id.has_value()) {
        return FileError(
            absl::StrCat("model.merges[", rank, "] needs '", *parts[i], "', not a token"));
      }
      ids[i] = *id;
    }
    const absl::Status added = bpe_.AddMerge(ids[0], ids[1], static_cast<int32_t>(rank), ids[2]);
    if (!added.ok()) return FileError(added.message());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(absl::string_view utf8) const {
  if (utf8.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("text has ", utf8.size(), " bytes, limit ", kMaxTextBytes));
  }
  ISTHMUS_RETURN_IF_ERROR(CheckUtf8("text", utf8));
  std::vector<int32_t> ids;
  if (utf8.empty()) return ids;
  PieceCache cache;
  std::vector<absl::string_view> pieces;
  for (const Segment& segment : second_pass_.Cut(first_pass_.Cut({{utf8, -1}}))) {
    if (segment.token_id >= 0) {
      ids.push_back(segment.token_id);
      continue;
    }
    pieces.clear();
    ISTHMUS_RETURN_IF_ERROR(pre_tokenizer_.Split(segment.text, &pieces));
    for (const absl::string_view piece : pieces) bpe_.Encode(piece, &cache, &ids);
  }
  return ids;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids) absl::StrAppend(&bytes, TokenBytes(id));
  return bytes;
}

absl::string_view Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  return token_bytes_[static_cast<size_t>(id)];
}

std::optional<int32_t> Tokenizer::IdOf(absl::string_view token) const {
  const auto found = ids_.find(token);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return id >= 0 && id < vocab_size() && is_special_[static_cast<size_t>(id)];
}

}  // namespace isthmus::text
