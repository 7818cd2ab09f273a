// SPDX-License-Identifier: Apache-2.0
#include "kernels/all_reduce/nccl_group.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "services/base/fault.h"

#if ISTHMUS_HAS_NCCL
#include <nccl.h>
#endif

namespace isthmus::kernels {

#if ISTHMUS_HAS_NCCL

namespace {

absl::Status StatusOf(ncclResult_t result, absl::string_view what) {
  if (result == ncclSuccess) return absl::OkStatus();
  return WithFaultScope(
      absl::UnavailableError(absl::StrCat("NCCL: ", what, ": ", ncclGetErrorString(result))),
      FaultScope::kDevice);
}

}  // namespace

bool NcclGroup::IsBuiltIn() { return true; }

absl::StatusOr<std::unique_ptr<NcclGroup>> NcclGroup::Create(const std::vector<int>& devices) {
  if (devices.empty() || std::set<int>(devices.begin(), devices.end()).size() != devices.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "NCCL: devices are [", absl::StrJoin(devices, ", "), "], each must be there once"));
  }
  std::vector<ncclComm_t> comms(devices.size());
  const absl::Status status = StatusOf(
      ncclCommInitAll(comms.data(), static_cast<int>(devices.size()), devices.data()), "connect");
  if (!status.ok()) return status;
  std::unique_ptr<NcclGroup> group(new NcclGroup);
  group->handles_.assign(comms.begin(), comms.end());
  return group;
}

absl::Status NcclGroup::AsyncError() const {
  for (size_t rank = 0; rank < handles_.size(); ++rank) {
    if (handles_[rank] == nullptr) return absl::AbortedError("NCCL: the group was aborted");
    ncclResult_t error = ncclSuccess;
    const ncclResult_t result =
        ncclCommGetAsyncError(static_cast<ncclComm_t>(handles_[rank]), &error);
    const absl::Status status =
        StatusOf(result != ncclSuccess ? result : error, absl::StrCat("rank ", rank));
    if (!status.ok() && error != ncclInProgress) return status;
  }
  return absl::OkStatus();
}

void NcclGroup::Abort() {
  for (void*& handle : handles_) {
    if (handle != nullptr) (void)ncclCommAbort(static_cast<ncclComm_t>(handle));
    handle = nullptr;
  }
}

NcclGroup::~NcclGroup() {
  for (void* handle : handles_) {
    if (handle != nullptr) (void)ncclCommDestroy(static_cast<ncclComm_t>(handle));
  }
}

#else

bool NcclGroup::IsBuiltIn() { return false; }
absl::StatusOr<std::unique_ptr<NcclGroup>> NcclGroup::Create(const std::vector<int>&) {
  return absl::UnimplementedError("this program was built without NCCL");
}
absl::Status NcclGroup::AsyncError() const { return absl::OkStatus(); }
void NcclGroup::Abort() {}
NcclGroup::~NcclGroup() = default;

#endif

}  // namespace isthmus::kernels
