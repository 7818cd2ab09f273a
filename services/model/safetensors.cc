// SPDX-License-Identifier: Apache-2.0
#include "services/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "services/base/status_macros.h"
#include "services/model/bounded_json.h"

namespace isthmus::model {
namespace {

struct TypeRow {
  TensorType type;
  absl::string_view name;
  int64_t bytes;
};
constexpr std::array<TypeRow, 16> kTypes = {{
    {TensorType::kF64, "F64", 8},
    {TensorType::kF32, "F32", 4},
    {TensorType::kF16, "F16", 2},
    {TensorType::kBf16, "BF16", 2},
    {TensorType::kF8E4m3, "F8_E4M3", 1},
    {TensorType::kF8E5m2, "F8_E5M2", 1},
    {TensorType::kF8E8m0, "F8_E8M0", 1},
    {TensorType::kI64, "I64", 8},
    {TensorType::kI32, "I32", 4},
    {TensorType::kI16, "I16", 2},
    {TensorType::kI8, "I8", 1},
    {TensorType::kU64, "U64", 8},
    {TensorType::kU32, "U32", 4},
    {TensorType::kU16, "U16", 2},
    {TensorType::kU8, "U8", 1},
    {TensorType::kBool, "BOOL", 1},
}};
constexpr uint64_t kLengthBytes = 8;
constexpr size_t kMaxDims = 8;

// Unsigned JSON number that also fits int64.
std::optional<uint64_t> SizeValue(const nlohmann::json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return number;
}

// Fills `entry` but for its name; the returned text is empty when all is well.
std::string ReadEntry(const nlohmann::json& value, TensorEntry* entry) {
  if (!value.is_object()) return "is not an object";
  const auto type = value.find("dtype");
  const auto shape = value.find("shape");
  const auto offsets = value.find("data_offsets");
  if (type == value.end() || shape == value.end() || offsets == value.end() || value.size() != 3) {
    return "must have dtype, shape and data_offsets and nothing else";
  }
  if (!type->is_string()) return "has a dtype that is not a string";
  const auto& type_name = type->get_ref<const std::string&>();
  const std::optional<TensorType> known = TensorTypeFromName(type_name);
  if (!known) return absl::StrCat("has unknown dtype '", PrintableName(type_name), "'");
  entry->type = *known;
  if (!shape->is_array() || shape->size() > kMaxDims) {
    return absl::StrCat("has a shape that is not a list of at most ", kMaxDims, " sizes");
  }
  uint64_t bytes = static_cast<uint64_t>(TensorTypeBytes(*known));
  for (const nlohmann::json& dim : *shape) {
    const std::optional<uint64_t> size = SizeValue(dim);
    if (!size) return "has a dimension that is not a size";
    if (__builtin_mul_overflow(bytes, *size, &bytes)) return "has a shape that overflows 64 bits";
    entry->shape.push_back(static_cast<int64_t>(*size));
  }
  if (!offsets->is_array() || offsets->size() != 2) return "needs two data_offsets";
  const std::optional<uint64_t> begin = SizeValue((*offsets)[0]);
  const std::optional<uint64_t> end = SizeValue((*offsets)[1]);
  if (!begin || !end) return "has a data offset that is not a size";
  if (*end < *begin) return absl::StrCat("runs backwards, from byte ", *begin, " to ", *end);
  if (*end - *begin != bytes) {
    return absl::StrCat("is ", TypeAndShape(entry->type, entry->shape), " = ", bytes,
                        " bytes, but its offsets hold ", *end - *begin);
  }
  entry->begin = *begin;
  entry->end = *end;
  return "";
}

absl::Status ReadMetadata(const nlohmann::json& value, absl::string_view file_name,
                          std::map<std::string, std::string>* metadata) {
  if (!value.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": __metadata__ is not an object"));
  }
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file_name, ": __metadata__ '", PrintableName(key), "' is not a string"));
    }
    metadata->emplace(key, text.get<std::string>());
  }
  return absl::OkStatus();
}

// Sorts by offset and checks that the tensors tile [0, data_bytes).
absl::Status CheckTiling(std::vector<TensorEntry>* tensors, uint64_t data_bytes,
                         absl::string_view file_name) {
  std::sort(tensors->begin(), tensors->end(), [](const TensorEntry& a, const TensorEntry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  uint64_t at = 0;
  for (const TensorEntry& entry : *tensors) {
    if (entry.begin != at) {
      return absl::InvalidArgumentError(absl::StrCat(
          file_name, ": tensor '", PrintableName(entry.name), "' begins at byte ", entry.begin,
          entry.begin < at ? ", inside the tensor before it, which ends at "
                           : ", leaving a hole after byte ",
          at));
    }
    if (entry.end > data_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          file_name, ": tensor '", PrintableName(entry.name), "' ends at byte ", entry.end,
          ", the file holds ", data_bytes, " bytes of tensors; is it truncated?"));
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": tensors end at byte ", at,
                                                   ", the file holds ", data_bytes,
                                                   " bytes of tensors"));
  }
  return absl::OkStatus();
}

absl::Status FileError(const std::string& path, absl::string_view action) {
  return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot ", action));
}

}  // namespace

absl::string_view TensorTypeName(TensorType type) { return kTypes[static_cast<size_t>(type)].name; }

std::optional<TensorType> TensorTypeFromName(absl::string_view name) {
  for (const TypeRow& row : kTypes) {
    if (row.name == name) return row.type;
  }
  return std::nullopt;
}

int64_t TensorTypeBytes(TensorType type) { return kTypes[static_cast<size_t>(type)].bytes; }

std::string TypeAndShape(TensorType type, const std::vector<int64_t>& shape) {
  return absl::StrCat(TensorTypeName(type), " [", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view leading,
                                                         uint64_t file_bytes,
                                                         absl::string_view file_name) {
  if (file_bytes < kLengthBytes || leading.size() < kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        file_name, ": has ", file_bytes, " bytes, a header length alone takes ", kLengthBytes));
  }
  uint64_t header_bytes = 0;  // Little-endian, as is every machine that this is built for.
  std::memcpy(&header_bytes, leading.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        file_name, ": header of ", header_bytes, " bytes, at most ", kMaxHeaderBytes, " allowed"));
  }
  const uint64_t readable = std::min<uint64_t>(file_bytes, leading.size());
  if (header_bytes > readable - kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": header of ", header_bytes,
                                                   " bytes in a file of ", file_bytes,
                                                   " bytes; is it truncated?"));
  }
  ISTHMUS_ASSIGN_OR_RETURN(const nlohmann::json json,
                           ParseBoundedJson(leading.substr(kLengthBytes, header_bytes), file_name));
  if (!json.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": header is not an object"));
  }
  SafetensorsHeader header;
  header.data_offset = kLengthBytes + header_bytes;
  header.tensors.reserve(json.size());
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      ISTHMUS_RETURN_IF_ERROR(ReadMetadata(value, file_name, &header.metadata));
      continue;
    }
    TensorEntry entry;
    entry.name = name;
    if (const std::string problem = ReadEntry(value, &entry); !problem.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file_name, ": tensor '", PrintableName(name), "' ", problem));
    }
    header.tensors.push_back(std::move(entry));
  }
  ISTHMUS_RETURN_IF_ERROR(CheckTiling(&header.tensors, file_bytes - header.data_offset, file_name));
  return header;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  // O_NONBLOCK: a named pipe in place of a shard must not hang the start.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(path, "open");
  struct stat status = {};
  if (fstat(fd, &status) != 0) {
    absl::Status error = FileError(path, "stat");
    close(fd);
    return error;
  }
  if (!S_ISREG(status.st_mode) || status.st_size < static_cast<off_t>(kLengthBytes)) {
    close(fd);
    return absl::InvalidArgumentError(
        S_ISREG(status.st_mode) ? absl::StrCat(path, ": has ", status.st_size,
                                               " bytes, a header length alone takes ", kLengthBytes)
                                : absl::StrCat(path, ": is not a regular file"));
  }
  const auto size = static_cast<uint64_t>(status.st_size);
  void* start = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const absl::Status error = start == MAP_FAILED ? FileError(path, "map") : absl::OkStatus();
  close(fd);
  ISTHMUS_RETURN_IF_ERROR(error);

  SafetensorsFile file;
  file.path_ = path;
  file.start_ = static_cast<const std::byte*>(start);
  file.bytes_ = size;
  const absl::string_view all(static_cast<const char*>(start), size);
  ISTHMUS_ASSIGN_OR_RETURN(file.header_, ParseSafetensorsHeader(all, size, path));
  return file;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept { *this = std::move(other); }

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  if (this == &other) return *this;
  Unmap();
  path_ = std::move(other.path_);
  start_ = std::exchange(other.start_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  header_ = std::move(other.header_);
  return *this;
}

SafetensorsFile::~SafetensorsFile() { Unmap(); }

void SafetensorsFile::Unmap() {
  if (start_ != nullptr) munmap(const_cast<std::byte*>(start_), bytes_);
  start_ = nullptr;
}

void SafetensorsFile::ExpectScatteredReads(bool is_scattered) const {
  madvise(const_cast<std::byte*>(start_), bytes_, is_scattered ? MADV_RANDOM : MADV_NORMAL);
}

void ReleaseFilePages(const void* bytes, int64_t size) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(bytes);
  const uintptr_t begin = (first + page - 1) / page * page;
  const uintptr_t end = (first + static_cast<uintptr_t>(size)) / page * page;
  if (begin >= end) return;
  auto* start = static_cast<char*>(const_cast<void*>(bytes)) + (begin - first);
  madvise(start, end - begin, MADV_DONTNEED);
}

}  // namespace isthmus::model
