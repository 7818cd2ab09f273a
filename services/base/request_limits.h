// SPDX-License-Identifier: Apache-2.0
// How much a request may ask for, said once: routers refuse it by the client's names of fields,
// workers by theirs, and neither trusts the other. The numbers are those of proto/request.proto and
// proto/generate.proto.
#pragma once

#include <cstddef>
#include <cstdint>

namespace isthmus {

inline constexpr int64_t kMaxLogitBiases = 1024;
inline constexpr int64_t kMaxBannedTokens = 1024;
inline constexpr int64_t kMaxStopTokens = 64;
inline constexpr int32_t kMaxTopLogprobs = 20;
inline constexpr int64_t kMaxReplies = 16;
// Of a prompt whose log probabilities are wanted.
inline constexpr int64_t kMaxLogprobPromptTokens = 32768;
inline constexpr size_t kMaxCacheSaltBytes = 128;

}  // namespace isthmus
