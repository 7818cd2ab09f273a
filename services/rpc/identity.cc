// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/identity.h"

#include <sys/random.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/check.h"

namespace isthmus::rpc {
namespace {

std::function<uint64_t()>& Source() {
  static std::function<uint64_t()> source;
  return source;
}

void FillRandom(void* bytes, size_t size) {
  if (Source()) {
    for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
      const uint64_t bits = Source()();
      std::memcpy(static_cast<std::byte*>(bytes) + at, &bits, std::min(size - at, sizeof(bits)));
    }
    return;
  }
  // Up to 256 bytes come whole, and only a kernel without the call could refuse them.
  ISTHMUS_CHECK(getrandom(bytes, size, 0) == static_cast<ssize_t>(size));
}

}  // namespace

void SetIdentitySource(std::function<uint64_t()> next_bits) { Source() = std::move(next_bits); }

uint64_t NewIncarnation() {
  uint64_t bits = 0;
  FillRandom(&bits, sizeof(bits));
  return bits == 0 ? 1 : bits;
}

std::string NewTransferId() {
  std::string id(16, '\0');
  FillRandom(id.data(), id.size());
  return id;
}

std::string NewRequestId() { return absl::StrFormat("r-%016x", NewIncarnation()); }

bool WriteAddressFile(const std::string& path, absl::string_view address) {
  if (path.empty()) return true;
  const std::string partial = absl::StrCat(path, ".part");
  {
    std::ofstream file(partial, std::ios::trunc);
    file << address << "\n";
    if (!file.flush()) return false;
  }
  return std::rename(partial.c_str(), path.c_str()) == 0;
}

}  // namespace isthmus::rpc
