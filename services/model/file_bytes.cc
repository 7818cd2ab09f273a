// SPDX-License-Identifier: Apache-2.0
#include "services/model/file_bytes.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace isthmus::model {
namespace {

absl::StatusOr<std::string> ReadOpened(int fd, const std::string& path, int64_t max_bytes) {
  struct stat status = {};
  if (fstat(fd, &status) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot stat"));
  }
  if (!S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is not a regular file"));
  }
  if (status.st_size > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": has ", status.st_size, " bytes, at most ", max_bytes, " allowed"));
  }
  std::string out(static_cast<size_t>(status.st_size), '\0');
  size_t have = 0;
  while (have < out.size()) {  // Each turn reads something or leaves the loop.
    const ssize_t got = read(fd, out.data() + have, out.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot read"));
    }
    if (got == 0) break;
    have += static_cast<size_t>(got);
  }
  out.resize(have);
  return out;
}

}  // namespace

absl::StatusOr<std::string> ReadFileBytes(const std::string& path, int64_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot open"));
  absl::StatusOr<std::string> out = ReadOpened(fd, path, max_bytes);
  close(fd);
  return out;
}

}  // namespace isthmus::model
