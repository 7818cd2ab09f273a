// SPDX-License-Identifier: Apache-2.0
#include "services/model/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "services/base/status_macros.h"
#include "services/model/bounded_json.h"

namespace isthmus::model {
namespace {

absl::Status FileError(const std::string& path, absl::string_view action) {
  return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot ", action));
}

absl::Status WriteAll(int fd, const std::string& path, const void* bytes, size_t size) {
  const char* at = static_cast<const char*>(bytes);
  while (size > 0) {  // Each turn writes something or leaves.
    const ssize_t wrote = write(fd, at, size);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return FileError(path, "write");
    at += wrote;
    size -= static_cast<size_t>(wrote);
  }
  return absl::OkStatus();
}

// The order of the data, with offsets; `order` gives the tensor behind each entry.
absl::StatusOr<std::vector<TensorEntry>> LayOut(std::span<const NamedTensor> tensors,
                                                std::vector<const NamedTensor*>* order) {
  std::vector<std::pair<TensorType, const NamedTensor*>> by_width;
  for (const NamedTensor& tensor : tensors) {
    const std::optional<TensorType> type = TensorTypeFromName(tensor.dtype);
    if (!type) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", PrintableName(tensor.name),
                                                     "' has unknown dtype '",
                                                     PrintableName(tensor.dtype), "'"));
    }
    by_width.emplace_back(*type, &tensor);
  }
  std::stable_sort(by_width.begin(), by_width.end(), [](const auto& a, const auto& b) {
    return TensorTypeBytes(a.first) > TensorTypeBytes(b.first);
  });
  std::vector<TensorEntry> entries;
  uint64_t at = 0;
  for (const auto& [type, tensor] : by_width) {
    TensorEntry entry;
    entry.name = tensor->name;
    entry.type = type;
    entry.shape = tensor->shape;
    entry.begin = at;
    at += tensor->bytes.size();
    entry.end = at;
    entries.push_back(std::move(entry));
    order->push_back(tensor);
  }
  return entries;
}

absl::Status WriteParts(int fd, const std::string& path, const std::string& header,
                        const std::vector<const NamedTensor*>& order) {
  ISTHMUS_RETURN_IF_ERROR(WriteAll(fd, path, header.data(), header.size()));
  for (const NamedTensor* tensor : order) {
    ISTHMUS_RETURN_IF_ERROR(WriteAll(fd, path, tensor->bytes.data(), tensor->bytes.size()));
  }
  if (fsync(fd) != 0) return FileError(path, "sync");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> FormatSafetensorsHeader(
    std::span<const TensorEntry> entries, const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  std::vector<absl::string_view> names;
  for (const TensorEntry& entry : entries) {
    const auto tensor = [&entry] {
      return absl::StrCat("tensor '", PrintableName(entry.name), "'");
    };
    if (entry.name == "__metadata__") {
      return absl::InvalidArgumentError("a tensor cannot be named __metadata__");
    }
    auto bytes = static_cast<uint64_t>(TensorTypeBytes(entry.type));
    for (const int64_t dim : entry.shape) {
      if (dim < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(dim), &bytes)) {
        return absl::InvalidArgumentError(
            absl::StrCat(tensor(), " has shape ", TypeAndShape(entry.type, entry.shape)));
      }
    }
    if (entry.end - entry.begin != bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(tensor(), " is ", TypeAndShape(entry.type, entry.shape), " = ", bytes,
                       " bytes, given are ", entry.end - entry.begin));
    }
    names.push_back(entry.name);
    // push_back keeps the order given and does not search the object for every key.
    json.get_ref<nlohmann::ordered_json::object_t&>().push_back(
        {entry.name,
         {{"dtype", std::string(TensorTypeName(entry.type))},
          {"shape", entry.shape},
          {"data_offsets", {entry.begin, entry.end}}}});
  }
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", PrintableName(*twice), "' is given twice"));
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const nlohmann::json::exception& error) {  // A name that is not UTF-8.
    return absl::InvalidArgumentError(absl::StrCat("header: ", error.what()));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t size = text.size();
  std::string out(sizeof(size), '\0');
  std::memcpy(out.data(), &size, sizeof(size));
  return out + text;
}

absl::Status WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata) {
  std::vector<const NamedTensor*> order;
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<TensorEntry> entries, LayOut(tensors, &order));
  ISTHMUS_ASSIGN_OR_RETURN(const std::string header, FormatSafetensorsHeader(entries, metadata));
  const std::string part = path + ".part";
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return FileError(part, "create");
  absl::Status status = WriteParts(fd, part, header, order);
  if (close(fd) != 0 && status.ok()) status = FileError(part, "close");
  if (status.ok() && std::rename(part.c_str(), path.c_str()) != 0) {
    status = FileError(path, "rename into place");
  }
  if (!status.ok()) unlink(part.c_str());
  return status;
}

}  // namespace isthmus::model
