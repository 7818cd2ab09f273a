// SPDX-License-Identifier: Apache-2.0
// The bodies of the fuzz targets, so that a plain test can run the kept seeds too. Each reads
// bytes from outside and crashes (ISTHMUS_CHECK) when a promise of the folder does not hold.
#pragma once

#include "absl/strings/string_view.h"

namespace isthmus::text {

inline constexpr size_t kMaxFuzzBytes = 4096;

// `input` is a tokenizer.json, or (when it does not start with `{`) three lines: a Split pattern,
// an added token, a text.
void FuzzTokenizer(absl::string_view input);

// `input` is a chat request, a list of messages, or an encoder file.
void FuzzChat(absl::string_view input);

// The first byte chooses the mode and the size of the pieces, the rest is a reply.
void FuzzReplyParser(absl::string_view input);

}  // namespace isthmus::text
