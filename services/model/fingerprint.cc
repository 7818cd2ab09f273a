// SPDX-License-Identifier: Apache-2.0
#include "services/model/fingerprint.h"

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace isthmus::model {
namespace {

// Raised whenever the sample or the hash changes, so that builds that disagree say so.
constexpr uint64_t kFingerprintVersion = 1;
constexpr int64_t kWholeBytes = 16 << 10;
constexpr int64_t kThreeRunsBytes = 256 << 10;
constexpr int64_t kRunBytes = 64;
constexpr int64_t kTensorsPerItem = 256;

class Hasher {
 public:
  void Add(uint64_t value) {  // splitmix64 of the running hash and the value.
    uint64_t z = (hash_ ^ value) + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    hash_ = z ^ (z >> 31);
  }
  void Add(const void* bytes, int64_t size) {
    Add(static_cast<uint64_t>(size));
    const auto* at = static_cast<const char*>(bytes);
    for (int64_t i = 0; i < size; i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, at + i, static_cast<size_t>(size - i < 8 ? size - i : 8));
      Add(word);
    }
  }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = kFingerprintVersion;
};

uint64_t TensorHash(const CheckpointTensor& tensor) {
  Hasher hasher;
  hasher.Add(tensor.name.data(), static_cast<int64_t>(tensor.name.size()));
  const std::string form = TypeAndShape(tensor.type, tensor.shape);
  hasher.Add(form.data(), static_cast<int64_t>(form.size()));
  if (tensor.size <= kWholeBytes) {
    hasher.Add(tensor.bytes, tensor.size);
    return hasher.hash();
  }
  hasher.Add(tensor.bytes + tensor.size / 2 / kRunBytes * kRunBytes, kRunBytes);
  if (tensor.size <= kThreeRunsBytes) {
    hasher.Add(tensor.bytes, kRunBytes);
    hasher.Add(tensor.bytes + tensor.size - kRunBytes, kRunBytes);
  }
  return hasher.hash();
}

}  // namespace

uint64_t WeightFingerprint(const ModelConfig& config, const Checkpoint& checkpoint,
                           ThreadPool* threads) {
  const std::vector<CheckpointTensor>& tensors = checkpoint.tensors();
  std::vector<uint64_t> hashes(tensors.size());
  const auto body = [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      hashes[static_cast<size_t>(i)] = TensorHash(tensors[static_cast<size_t>(i)]);
    }
  };
  const auto count = static_cast<int64_t>(tensors.size());
  if (threads != nullptr) {
    threads->ParallelFor(count, kTensorsPerItem, body);
  } else {
    body(0, count, 0);
  }
  Hasher total;
  const std::string text = CanonicalModelConfig(config);
  total.Add(text.data(), static_cast<int64_t>(text.size()));
  total.Add(hashes.data(), count * int64_t{sizeof(uint64_t)});
  return total.hash();
}

}  // namespace isthmus::model
