// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/identity.h"

#include <sys/random.h>

#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/check.h"

namespace isthmus::rpc {
namespace {

void FillRandom(void* bytes, size_t size) {
  // Up to 256 bytes come whole, and only a kernel without the call could refuse them.
  ISTHMUS_CHECK(getrandom(bytes, size, 0) == static_cast<ssize_t>(size));
}

}  // namespace

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
