// SPDX-License-Identifier: Apache-2.0
#include "services/engine/token_counts.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"

namespace isthmus::engine {
namespace {

using kernels::TokenMention;

// More at a time are counted in a table of the vocabulary, as a place in the list may cost a move
// of all that stands behind it.
constexpr size_t kFewTokens = 64;

void CountOne(int32_t id, bool is_output, std::vector<TokenMention>& mentions) {
  auto place = std::ranges::lower_bound(mentions, id, {}, &TokenMention::id);
  if (place == mentions.end() || place->id != id) {
    place = mentions.insert(place, TokenMention{.id = id});
  }
  if (is_output) ++place->in_output;
}

void CountMany(std::span<const int32_t> prompt, std::span<const int32_t> output, int64_t vocab,
               kernels::Workspace* workspace, std::vector<TokenMention>& mentions) {
  kernels::Workspace::Scope scope(workspace);
  auto* in_output = scope.Take<int32_t>(vocab);  // -1: not mentioned.
  std::fill_n(in_output, vocab, -1);
  for (const TokenMention& mention : mentions) in_output[mention.id] = mention.in_output;
  for (const int32_t id : prompt) in_output[id] = std::max(in_output[id], 0);
  for (const int32_t id : output) in_output[id] = std::max(in_output[id], 0) + 1;
  mentions.clear();
  for (int64_t id = 0; id < vocab; ++id) {
    if (in_output[id] < 0) continue;
    mentions.push_back({.id = static_cast<int32_t>(id), .in_output = in_output[id]});
  }
}

}  // namespace

absl::Status CountTokens(std::span<const int32_t> tokens, int64_t num_prompt_tokens, int64_t vocab,
                         kernels::Workspace* workspace, TokenCounts& counts) {
  const auto first = static_cast<size_t>(counts.num_counted);
  ISTHMUS_CHECK(first <= tokens.size());
  for (size_t i = first; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < vocab) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("tokens: token ", i, " has id ", tokens[i], ", the vocabulary has ", vocab));
  }
  // Its memory is taken once and written as tokens come.
  counts.mentions.reserve(static_cast<size_t>(vocab));
  const auto num_prompt = static_cast<size_t>(num_prompt_tokens);
  if (tokens.size() > first + kFewTokens) {
    const size_t middle = std::max(first, num_prompt);
    CountMany(tokens.subspan(first, middle - first), tokens.subspan(middle), vocab, workspace,
              counts.mentions);
  } else {
    for (size_t i = first; i < tokens.size(); ++i) {
      CountOne(tokens[i], i >= num_prompt, counts.mentions);
    }
  }
  counts.num_counted = static_cast<int64_t>(tokens.size());
  return absl::OkStatus();
}

int64_t CountScratchBytes(int64_t vocab) {
  return kernels::Workspace::RoundedBytes(vocab * static_cast<int64_t>(sizeof(int32_t)));
}

int64_t TokenCountsBytes(int64_t vocab) {
  return vocab * static_cast<int64_t>(sizeof(TokenMention));
}

}  // namespace isthmus::engine
