// SPDX-License-Identifier: Apache-2.0
// UTF-8 decoding after table 3-7 of the Unicode standard.
#include "services/text/utf8.h"

#include "absl/strings/str_format.h"

namespace isthmus::text {
namespace {

// The bounds of the second byte depend on the first: they exclude overlong forms and surrogates.
struct Lead {
  size_t size = 0;  // 0: no code point begins with this byte.
  uint8_t second_min = 0x80;
  uint8_t second_max = 0xBF;
};

Lead LeadOf(uint8_t byte) {
  if (byte < 0x80) return {1, 0x80, 0xBF};
  if (byte < 0xC2) return {};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {};
}

}  // namespace

Utf8Step NextUtf8(absl::string_view bytes, size_t offset) {
  const auto first = static_cast<uint8_t>(bytes[offset]);
  const Lead lead = LeadOf(first);
  if (lead.size == 1) return {Utf8Kind::kCharacter, 1, first};
  if (lead.size == 0) return {Utf8Kind::kInvalid, 1, 0};
  char32_t code_point = first & (0xFFu >> (lead.size + 1));
  for (size_t i = 1; i < lead.size; ++i) {
    if (offset + i >= bytes.size()) return {Utf8Kind::kIncomplete, i, 0};
    const auto byte = static_cast<uint8_t>(bytes[offset + i]);
    const uint8_t low = i == 1 ? lead.second_min : 0x80;
    const uint8_t high = i == 1 ? lead.second_max : 0xBF;
    if (byte < low || byte > high) return {Utf8Kind::kInvalid, i, 0};
    code_point = (code_point << 6) | (byte & 0x3Fu);
  }
  return {Utf8Kind::kCharacter, lead.size, code_point};
}

std::optional<size_t> FirstInvalidUtf8(absl::string_view bytes) {
  size_t offset = 0;
  while (offset < bytes.size()) {
    if (static_cast<uint8_t>(bytes[offset]) < 0x80) {
      ++offset;
      continue;
    }
    const Utf8Step step = NextUtf8(bytes, offset);
    if (step.kind != Utf8Kind::kCharacter) return offset;
    offset += step.size;
  }
  return std::nullopt;
}

absl::Status CheckUtf8(absl::string_view name, absl::string_view bytes) {
  const std::optional<size_t> offset = FirstInvalidUtf8(bytes);
  if (!offset.has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: byte 0x%02x at offset %d of %d is not valid UTF-8", name,
                      static_cast<uint8_t>(bytes[*offset]), *offset, bytes.size()));
}

void AppendUtf8(char32_t code_point, std::string* out) {
  const auto c = static_cast<uint32_t>(code_point);
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (c >> 6)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (c >> 12)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (c >> 18)));
    out->push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

}  // namespace isthmus::text
