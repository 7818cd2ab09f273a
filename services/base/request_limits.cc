// SPDX-License-Identifier: Apache-2.0
#include "services/base/request_limits.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"

namespace isthmus {
namespace {

absl::Status CheckIds(absl::string_view field, std::vector<int64_t> ids, int64_t most,
                      int64_t vocab_size) {
  if (static_cast<int64_t>(ids.size()) > most) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": has ", ids.size(), " entries, want at most ", most));
  }
  for (const int64_t id : ids) {
    if (id >= 0 && id < vocab_size) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": has token ", id, ", want 0 to ", vocab_size - 1));
  }
  std::ranges::sort(ids);
  const auto twice = std::ranges::adjacent_find(ids);
  if (twice == ids.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, ": has token ", *twice, " twice"));
}

}  // namespace

absl::Status CheckTokenLists(absl::string_view prefix, const TokenLists& lists,
                             int64_t vocab_size) {
  const std::string banned = absl::StrCat(prefix, "banned_token_ids");
  ISTHMUS_RETURN_IF_ERROR(
      CheckIds(absl::StrCat(prefix, "logit_bias"), lists.biased, kMaxLogitBiases, vocab_size));
  ISTHMUS_RETURN_IF_ERROR(CheckIds(banned, lists.banned, kMaxBannedTokens, vocab_size));
  ISTHMUS_RETURN_IF_ERROR(
      CheckIds(absl::StrCat(prefix, "stop_token_ids"), lists.stops, kMaxStopTokens, vocab_size));
  for (const int64_t id : lists.banned) {
    if (std::ranges::find(lists.biased, id) == lists.biased.end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(banned, ": has token ", id, ", which logit_bias has as well"));
  }
  std::vector<int64_t> never = lists.banned;
  if (lists.may_not_end_at_once) {
    never.insert(never.end(), lists.stops.begin(), lists.stops.end());
    if (lists.end_token_id.has_value()) never.push_back(*lists.end_token_id);
  }
  std::ranges::sort(never);
  never.erase(std::ranges::unique(never).begin(), never.end());
  if (static_cast<int64_t>(never.size()) < vocab_size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(banned, ": leaves no token of the ", vocab_size, " of the vocabulary"));
}

}  // namespace isthmus
