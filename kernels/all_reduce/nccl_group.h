// SPDX-License-Identifier: Apache-2.0
// NCCL's communicators of the ranks of one process, one device each, behind no header of NCCL's.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isthmus::kernels {

class NcclGroup {
 public:
  // Blocks until all ranks are connected. Unimplemented: built without NCCL. InvalidArgument: a
  // device twice. Unavailable with NCCL's words: it could not connect them.
  static absl::StatusOr<std::unique_ptr<NcclGroup>> Create(const std::vector<int>& devices);
  static bool IsBuiltIn();

  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // For Communicator::nccl; null after Abort.
  void* handle(int rank) const { return handles_[static_cast<size_t>(rank)]; }

  // What NCCL has met by itself since (a lost link, a dead peer), without waiting.
  absl::Status AsyncError() const;
  // Ends all running and later calls with an error, from any thread: what a watchdog does when a
  // step does not end. The group is of no use afterwards. Safe to repeat.
  void Abort();

 private:
  NcclGroup() = default;
  std::vector<void*> handles_;  // ncclComm_t
};

}  // namespace isthmus::kernels
