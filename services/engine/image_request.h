// SPDX-License-Identifier: Apache-2.0
// The section of a sequence image (sequence_image.h) that says what was asked for and how far its
// sampler is: every field in a fixed order, numbers as 8 bytes, what has a length behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/sequence.h"

namespace isthmus::engine {

// Bounds of the section: what is said once, and log probabilities of tokens.
inline constexpr uint64_t kMaxRequestBytes = 1 << 20;
inline constexpr uint64_t kMaxRequestBytesPerToken = 512;

// Fields that this build writes and reads. An image with another number of them is of another
// build.
uint32_t NumRequestFields();

// Everything of the sequence but its tokens, digests, cache and place in a schedule.
void AppendRequest(const Sequence& sequence, std::vector<std::byte>& out);

// False when the bytes are not exactly the fields, each with a value of its type.
bool ReadRequest(std::span<const std::byte> bytes, Sequence& sequence);

}  // namespace isthmus::engine
