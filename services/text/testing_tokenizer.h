// SPDX-License-Identifier: Apache-2.0
// A small tokenizer.json for tests: 256 bytes, what is asked for, DeepSeek's Split stages.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "services/text/utf8.h"

namespace isthmus::text {

// GPT-2's spelling of a byte, written out once more as a check on tokenizer.cc.
inline std::string ByteSpelling(int wanted) {
  char32_t stand_in = 0x100;
  std::string spelling;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const char32_t c = printable ? static_cast<char32_t>(byte) : stand_in++;
    if (byte == wanted) AppendUtf8(c, &spelling);
  }
  return spelling;
}

// Ids: bytes 0 to 255 in order, then the merges' results, then the added tokens.
inline nlohmann::json SmallTokenizer(
    const std::vector<std::pair<std::string, std::string>>& merges = {},
    const std::vector<std::string>& added = {}) {
  using nlohmann::json;
  json vocab = json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[ByteSpelling(byte)] = byte;
  int next = 256;
  json merge_list = json::array();
  for (const auto& [left, right] : merges) {
    merge_list.push_back({left, right});
    if (!vocab.contains(left + right)) vocab[left + right] = next++;
  }
  json added_list = json::array();
  for (const std::string& content : added) {
    added_list.push_back({{"id", next++},
                          {"content", content},
                          {"single_word", false},
                          {"lstrip", false},
                          {"rstrip", false},
                          {"normalized", false},
                          {"special", true}});
  }
  const auto split = [](const char* regex) {
    return json{{"type", "Split"},
                {"pattern", {{"Regex", regex}}},
                {"behavior", "Isolated"},
                {"invert", false}};
  };
  const json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", true},
                           {"use_regex", false}};
  return json{
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", added_list},
      {"normalizer", nullptr},
      {"pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         json::array({split("\\p{N}{1,3}"),
                      split("[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*"
                            "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"),
                      byte_level})}}},
      {"post_processor", nullptr},
      {"decoder", byte_level},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"vocab", vocab},
        {"merges", merge_list}}}};
}

}  // namespace isthmus::text
