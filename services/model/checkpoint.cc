// SPDX-License-Identifier: Apache-2.0
#include "services/model/checkpoint.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "services/base/status_macros.h"
#include "services/model/bounded_json.h"
#include "services/model/file_bytes.h"

namespace isthmus::model {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";
constexpr int64_t kMaxIndexBytes = 256 << 20;
constexpr size_t kMaxShards = 10'000;

bool IsPlainFileName(absl::string_view name) {
  return absl::EndsWith(name, ".safetensors") && !absl::StartsWith(name, ".") &&
         name.find_first_of(absl::string_view("/\\\0", 3)) == absl::string_view::npos &&
         name.size() <= 255;
}

absl::Status BadIndex(absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(kIndexName, ": ", problem));
}

// The index of a directory: its file, or a made-up one when it holds a single model.safetensors
// (then `tensors` is empty and nothing is compared).
absl::StatusOr<CheckpointIndex> ReadIndex(const std::string& dir) {
  const absl::StatusOr<std::string> text =
      ReadFileBytes(absl::StrCat(dir, "/", kIndexName), kMaxIndexBytes);
  if (text.ok()) {
    absl::StatusOr<CheckpointIndex> index = ParseCheckpointIndex(*text);
    if (index.ok()) return index;
    return absl::Status(index.status().code(), absl::StrCat(dir, "/", index.status().message()));
  }
  if (!absl::IsNotFound(text.status())) return text.status();
  CheckpointIndex index;
  index.shards.push_back(kSingleName);
  return index;
}

// A file's tensors as (tensor, shard) rows that still point into the headers.
struct FoundTensor {
  const TensorEntry* entry = nullptr;
  int shard = 0;
};

std::vector<FoundTensor> ListTensors(const std::vector<SafetensorsFile>& shards) {
  std::vector<FoundTensor> out;
  for (size_t s = 0; s < shards.size(); ++s) {
    for (const TensorEntry& entry : shards[s].header().tensors) {
      out.push_back({&entry, static_cast<int>(s)});
    }
  }
  std::sort(out.begin(), out.end(), [](const FoundTensor& a, const FoundTensor& b) {
    const int order = a.entry->name.compare(b.entry->name);
    return order != 0 ? order < 0 : a.shard < b.shard;
  });
  return out;
}

absl::Status CheckNoDuplicates(const std::vector<FoundTensor>& found,
                               const std::vector<SafetensorsFile>& shards) {
  for (size_t i = 1; i < found.size(); ++i) {
    if (found[i].entry->name != found[i - 1].entry->name) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", PrintableName(found[i].entry->name), "' is in ",
                     shards[static_cast<size_t>(found[i - 1].shard)].path(), " and in ",
                     shards[static_cast<size_t>(found[i].shard)].path()));
  }
  return absl::OkStatus();
}

// Both lists are sorted by name and free of duplicates.
absl::Status CheckAgreement(const CheckpointIndex& index, const std::vector<FoundTensor>& found,
                            const std::vector<SafetensorsFile>& shards) {
  const auto path = [&shards](int shard) { return shards[static_cast<size_t>(shard)].path(); };
  size_t i = 0;
  size_t f = 0;
  while (i < index.tensors.size() || f < found.size()) {
    const int order = i == index.tensors.size() ? 1
                      : f == found.size()       ? -1
                                          : index.tensors[i].tensor.compare(found[f].entry->name);
    if (order < 0) {
      return BadIndex(absl::StrCat("puts tensor '", PrintableName(index.tensors[i].tensor), "' in ",
                                   path(index.tensors[i].shard),
                                   ", which does not hold it; nor does any other shard"));
    }
    if (order > 0) {
      return BadIndex(absl::StrCat("has no tensor '", PrintableName(found[f].entry->name), "', ",
                                   path(found[f].shard), " holds it"));
    }
    if (index.tensors[i].shard != found[f].shard) {
      return BadIndex(absl::StrCat("puts tensor '", PrintableName(index.tensors[i].tensor), "' in ",
                                   path(index.tensors[i].shard), ", it is in ",
                                   path(found[f].shard)));
    }
    ++i;
    ++f;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CheckpointIndex> ParseCheckpointIndex(absl::string_view text) {
  ISTHMUS_ASSIGN_OR_RETURN(const nlohmann::json json, ParseBoundedJson(text, kIndexName));
  if (!json.is_object()) return BadIndex("is not an object");
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object() || map->empty()) {
    return BadIndex("weight_map is not an object with tensors");
  }
  std::map<std::string, int> shard_of;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) {
      return BadIndex(absl::StrCat("file of tensor '", PrintableName(tensor), "' is not a string"));
    }
    const auto& name = file.get_ref<const std::string&>();
    if (!IsPlainFileName(name)) {
      return BadIndex(absl::StrCat("tensor '", PrintableName(tensor), "' lies in '",
                                   PrintableName(name),
                                   "', must be a file name without folders, *.safetensors"));
    }
    shard_of.emplace(name, 0);
  }
  if (shard_of.size() > kMaxShards) {
    return BadIndex(
        absl::StrCat("names ", shard_of.size(), " shards, at most ", kMaxShards, " allowed"));
  }
  CheckpointIndex index;
  for (auto& [name, number] : shard_of) {
    number = static_cast<int>(index.shards.size());
    index.shards.push_back(name);
  }
  index.tensors.reserve(map->size());
  for (const auto& [tensor, file] : map->items()) {  // In name order, as std::map keeps them.
    index.tensors.push_back({tensor, shard_of[file.get_ref<const std::string&>()]});
  }
  return index;
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& dir) {
  ISTHMUS_ASSIGN_OR_RETURN(const CheckpointIndex index, ReadIndex(dir));
  Checkpoint checkpoint;
  for (const std::string& name : index.shards) {
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(absl::StrCat(dir, "/", name));
    if (absl::IsNotFound(file.status())) {
      return absl::NotFoundError(
          absl::StrCat(file.status().message(),
                       index.tensors.empty() ? "; nor is there a " : "; named by ", kIndexName));
    }
    ISTHMUS_RETURN_IF_ERROR(file.status());
    checkpoint.shards_.push_back(*std::move(file));
  }
  const std::vector<FoundTensor> found = ListTensors(checkpoint.shards_);
  ISTHMUS_RETURN_IF_ERROR(CheckNoDuplicates(found, checkpoint.shards_));
  if (!index.tensors.empty()) {
    ISTHMUS_RETURN_IF_ERROR(CheckAgreement(index, found, checkpoint.shards_));
  }
  checkpoint.tensors_.reserve(found.size());
  for (const FoundTensor& row : found) {
    const SafetensorsFile& file = checkpoint.shards_[static_cast<size_t>(row.shard)];
    checkpoint.tensors_.push_back({row.entry->name, row.entry->type, row.entry->shape,
                                   file.bytes_of(*row.entry),
                                   static_cast<int64_t>(row.entry->end - row.entry->begin)});
  }
  for (SafetensorsFile& file : checkpoint.shards_) file.DropHeader();
  return checkpoint;
}

const CheckpointTensor* Checkpoint::Find(absl::string_view name) const {
  const auto at = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const CheckpointTensor& tensor, absl::string_view key) { return tensor.name < key; });
  return at == tensors_.end() || at->name != name ? nullptr : &*at;
}

}  // namespace isthmus::model
