// SPDX-License-Identifier: Apache-2.0
// The safetensors file format: 8 bytes little-endian header length, a JSON header, tensor bytes
// without gaps. The parser works on a buffer and trusts nothing; the file is mapped read-only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus::model {

// Element types as the format names them.
enum class TensorType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBf16,
  kF8E4m3,
  kF8E5m2,
  kF8E8m0,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,
};

absl::string_view TensorTypeName(TensorType type);  // "F8_E4M3"
std::optional<TensorType> TensorTypeFromName(absl::string_view name);
int64_t TensorTypeBytes(TensorType type);

struct TensorEntry {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // Bytes, relative to SafetensorsHeader::data_offset.
  uint64_t end = 0;    // Exclusive.
};

// "F8_E4M3 [512, 4096]", for messages.
std::string TypeAndShape(TensorType type, const std::vector<int64_t>& shape);

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  // In file order; they cover the data without gap or overlap.
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;  // Of the first tensor byte, from the start of the file.
};

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // The format's own limit.

// `leading` holds the file from its start, at least up to the end of the header; `file_bytes` is
// the size of the whole file. InvalidArgument starts with `file_name` and names the tensor, the
// value found and the one wanted: a truncated file, a header longer than the file or than
// kMaxHeaderBytes, malformed JSON (bounded_json.h), an unknown dtype, a shape that overflows or
// does not match its bytes, offsets that overlap, leave a hole, run backwards or pass the end.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view leading,
                                                         uint64_t file_bytes,
                                                         absl::string_view file_name);

// A file mapped read-only, symbolic links followed. Movable; the mapping keeps its address.
class SafetensorsFile {
 public:
  // When the file cannot be opened or mapped: the code and text of its errno (NotFound,
  // PermissionDenied, ...). InvalidArgument: not a regular file, or as ParseSafetensorsHeader.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;
  ~SafetensorsFile();

  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }
  int64_t file_bytes() const { return static_cast<int64_t>(bytes_); }
  const std::byte* bytes_of(const TensorEntry& entry) const {
    return start_ + header_.data_offset + entry.begin;
  }
  // Forgets the header, whose strings a long-lived mapping does not need.
  void DropHeader() { header_ = SafetensorsHeader(); }
  // Tells the kernel that the next reads are scattered (no read-ahead), or in order again.
  void ExpectScatteredReads(bool is_scattered) const;

 private:
  SafetensorsFile() = default;
  void Unmap();

  std::string path_;
  const std::byte* start_ = nullptr;
  uint64_t bytes_ = 0;
  SafetensorsHeader header_;
};

// Lets the kernel take the whole pages inside [bytes, bytes + size) of a file mapping out of this
// process's resident set; a later read brings them back.
void ReleaseFilePages(const void* bytes, int64_t size);

}  // namespace isthmus::model
