// SPDX-License-Identifier: Apache-2.0
// How much a request may ask for, said once: routers refuse it by the client's names of fields,
// workers by theirs, and neither trusts the other. The numbers are those of proto/request.proto and
// proto/generate.proto.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace isthmus {

inline constexpr int64_t kMaxLogitBiases = 1024;
inline constexpr int64_t kMaxBannedTokens = 1024;
inline constexpr int64_t kMaxStopTokens = 64;
inline constexpr int32_t kMaxTopLogprobs = 20;
inline constexpr int64_t kMaxReplies = 16;
// Of a prompt whose log probabilities are wanted.
inline constexpr int64_t kMaxLogprobPromptTokens = 32768;
inline constexpr size_t kMaxCacheSaltBytes = 128;

// The lists of token ids in a request.
struct TokenLists {
  std::vector<int64_t> biased = {};
  std::vector<int64_t> banned = {};
  std::vector<int64_t> stops = {};
  // Before its least length nothing that ends a reply is drawn, so that it may be all that is left.
  bool may_not_end_at_once = false;
  std::optional<int64_t> end_token_id = std::nullopt;  // None: it ends nothing.
};

// InvalidArgument naming the field, after `prefix`, and the token: too many, outside the
// vocabulary, twice in a list, banned and biased, or no token left to draw.
absl::Status CheckTokenLists(absl::string_view prefix, const TokenLists& lists, int64_t vocab_size);

}  // namespace isthmus
