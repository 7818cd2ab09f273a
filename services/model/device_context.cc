// SPDX-License-Identifier: Apache-2.0
#include "services/model/device_context.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "services/base/status_macros.h"

namespace isthmus::model {

absl::StatusOr<int> ParseDevice(const std::string& name) {
  if (name == "cpu") return -1;
  constexpr absl::string_view kPrefix = "cuda:";
  int device = -1;
  if (absl::StartsWith(name, kPrefix) && absl::SimpleAtoi(name.substr(kPrefix.size()), &device) &&
      device >= 0) {
    return device;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("device is \"", name, "\", must be cpu or cuda:<number>"));
}

absl::StatusOr<std::vector<int>> ParseDevices(const std::string& names, int ranks) {
  std::vector<int> devices;
  for (const absl::string_view name : absl::StrSplit(names, ',')) {
    ISTHMUS_ASSIGN_OR_RETURN(const int device, ParseDevice(std::string(name)));
    devices.push_back(device);
  }
  if (devices.size() == 1) {
    while (static_cast<int>(devices.size()) < ranks) devices.push_back(devices.back() + 1);
  }
  if (static_cast<int>(devices.size()) != ranks) {
    return absl::InvalidArgumentError(absl::StrCat("device is \"", names, "\", which are ",
                                                   devices.size(), " GPUs, for ", ranks, " ranks"));
  }
  if (std::ranges::any_of(devices, [](int device) { return device < 0; })) {
    return absl::InvalidArgumentError(
        absl::StrCat("device is \"", names, "\", want a GPU for each of ", ranks, " ranks"));
  }
  return devices;
}

absl::StatusOr<std::unique_ptr<DeviceContext>> DeviceContext::Open(int device) {
  if (device < 0 || device >= kernels::NumDevices()) {
    return absl::NotFoundError(
        absl::StrCat("device cuda:", device, ": this process sees ", kernels::NumDevices()));
  }
  std::unique_ptr<DeviceContext> context(new DeviceContext());
  context->device_ = device;
  ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(device));
  ISTHMUS_ASSIGN_OR_RETURN(context->properties_, kernels::PropertiesOf(device));
  ISTHMUS_ASSIGN_OR_RETURN(context->stream_, kernels::DeviceStream::Create());
  const int64_t bytes = kernels::kNumCounters * static_cast<int64_t>(sizeof(unsigned));
  ISTHMUS_ASSIGN_OR_RETURN(context->counters_, kernels::DeviceBuffer::Allocate(bytes));
  ISTHMUS_RETURN_IF_ERROR(
      kernels::FillDevice(context->counters_.data(), 0, bytes, context->stream_.get()));
  ISTHMUS_RETURN_IF_ERROR(context->stream_.Synchronise());
  kernels::Exec& exec = context->exec_;
  exec.arch = context->properties_.arch;
  exec.num_sms = context->properties_.num_sms;
  exec.stream = context->stream_.get();
  exec.workspace = &context->workspace_;
  exec.counters = context->counters_.as<unsigned>();
  return context;
}

}  // namespace isthmus::model
