// SPDX-License-Identifier: Apache-2.0
// Text to token ids and back: byte-level BPE as in Hugging Face's `tokenizers` library, from the
// checkpoint's tokenizer.json (spec 7.1).
//
// Encoding: added tokens are cut out of the raw text, then Split stages, then BPE over bytes.
// Nothing is added in front or behind: the chat encoder writes BOS itself. Text of a user that
// looks like an added token becomes that token, as in the official code.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "services/text/added_tokens.h"
#include "services/text/bpe.h"
#include "services/text/pre_tokenizer.h"
#include "services/text/tokenizer_file.h"

namespace isthmus::text {

// Immutable after creation; all const calls may run in several threads at once.
class Tokenizer {
 public:
  // Texts beyond this are refused by Encode. A context of a million tokens is about 5 MB.
  static constexpr size_t kMaxTextBytes = size_t{64} * 1024 * 1024;

  // From the text of a tokenizer.json. `jit`: see PreTokenizer::Create.
  // Errors: InvalidArgument (malformed, an id twice or beyond the number of tokens, a merge of
  //         unknown tokens, a byte without a token), Unimplemented (a setting that is not
  //         supported); all name the field.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(absl::string_view json,
                                                             bool jit = true);

  // From a file. Errors: as FromJson, and NotFound when `path` cannot be read.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& path);

  // The token ids of `utf8`; of the empty text, none.
  // Errors: InvalidArgument: not UTF-8 (with the byte offset), or longer than kMaxTextBytes.
  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view utf8) const;

  // The bytes of the tokens, one after another. They are UTF-8 only if the ids end between
  // characters; see Detokenizer. Ids outside [0, vocab_size()) stand for nothing.
  std::string Decode(std::span<const int32_t> ids) const;

  // The bytes that one token stands for; empty for ids outside [0, vocab_size()).
  absl::string_view TokenBytes(int32_t id) const;

  // One more than the largest id. Ids have no holes.
  int32_t vocab_size() const { return static_cast<int32_t>(token_bytes_.size()); }

  // The id of a token as tokenizer.json spells it ("</think>", but also "Ġthe").
  std::optional<int32_t> IdOf(absl::string_view token) const;

  // Whether tokenizer.json marks the token as special. Not all control tokens are: in
  // DeepSeek-V4's file `<｜User｜>` and `</think>` are added tokens, but not special.
  bool IsSpecial(int32_t id) const;

 private:
  explicit Tokenizer(PreTokenizer pre_tokenizer) : pre_tokenizer_(std::move(pre_tokenizer)) {}

  absl::Status AddTokens(const TokenizerFile& file);
  absl::Status AddToken(const std::string& content, int32_t id);
  absl::Status AddMerges(const TokenizerFile& file);

  PreTokenizer pre_tokenizer_;
  Bpe bpe_;
  AddedTokenTrie first_pass_;   // Added tokens with normalized = false.
  AddedTokenTrie second_pass_;  // Those with normalized = true.
  std::vector<std::string> token_bytes_;
  std::vector<bool> is_special_;
  absl::flat_hash_map<std::string, int32_t> ids_;
};

}  // namespace isthmus::text
