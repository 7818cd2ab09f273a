// SPDX-License-Identifier: Apache-2.0
#include "services/engine/image_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"

namespace isthmus::engine {
namespace {

absl::Status FileError(const std::string& path, absl::string_view action) {
  return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot ", action));
}

class File {
 public:
  File(const std::string& path, int flags) : fd_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  bool Close() { return close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_ = -1;
};

absl::Status WriteAll(const File& file, const std::string& path, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {  // Each turn writes something or leaves.
    const ssize_t wrote = write(file.fd(), bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return FileError(path, "write");
    bytes = bytes.subspan(static_cast<size_t>(wrote));
  }
  return absl::OkStatus();
}

absl::Status ReadAll(const File& file, const std::string& path, std::span<std::byte> bytes) {
  while (!bytes.empty()) {  // Each turn reads something or leaves.
    const ssize_t got = read(file.fd(), bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(path, "read");
    if (got == 0) return absl::DataLossError(absl::StrCat(path, ": it became shorter"));
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
  return absl::OkStatus();
}

absl::Status WriteAndSync(const std::string& part, std::span<const std::byte> image) {
  File file(part, O_WRONLY | O_CREAT | O_TRUNC);
  if (file.fd() < 0) return FileError(part, "create");
  ISTHMUS_RETURN_IF_ERROR(WriteAll(file, part, image));
  if (fsync(file.fd()) != 0) return FileError(part, "sync");
  if (!file.Close()) return FileError(part, "close");
  return absl::OkStatus();
}

// A name is on the disk when its folder is.
absl::Status SyncFolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path();
  const File file(folder.empty() ? "." : folder, O_RDONLY | O_DIRECTORY);
  if (file.fd() < 0 || fsync(file.fd()) != 0) return FileError(folder, "sync");
  return absl::OkStatus();
}

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

}  // namespace

absl::Status SaveImageFile(const std::string& path, std::span<const std::byte> image) {
  const std::string part = path + ".part";
  absl::Status status = WriteAndSync(part, image);
  if (status.ok() && std::rename(part.c_str(), path.c_str()) != 0) {
    status = FileError(path, "rename into place");
  }
  if (!status.ok()) {
    unlink(part.c_str());
    return status;
  }
  return SyncFolderOf(path);
}

absl::StatusOr<std::vector<std::byte>> LoadImageFile(const std::string& path,
                                                     const kernels::KvLayout& layout,
                                                     const ImageTerms& terms) {
  const File file(path, O_RDONLY | O_NONBLOCK);
  if (file.fd() < 0) return FileError(path, "open");
  struct stat facts = {};
  if (fstat(file.fd(), &facts) != 0) return FileError(path, "ask for its size");
  if (!S_ISREG(facts.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": it is no regular file"));
  }
  const auto size = static_cast<uint64_t>(facts.st_size);
  std::array<std::byte, kImageHeaderBytes> leading;
  const auto header = std::span(leading).first(std::min<size_t>(size, leading.size()));
  ISTHMUS_RETURN_IF_ERROR(ReadAll(file, path, header));
  if (const absl::Status status = CheckImageHeader(header, size, layout, terms); !status.ok()) {
    return InFile(path, status);
  }
  std::vector<std::byte> bytes(size);
  std::copy(header.begin(), header.end(), bytes.begin());
  ISTHMUS_RETURN_IF_ERROR(ReadAll(file, path, std::span(bytes).subspan(header.size())));
  return bytes;
}

}  // namespace isthmus::engine
