// SPDX-License-Identifier: Apache-2.0
// A GPU made ready for steps: its stream, scratch memory and counters, and the Exec that names
// them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/device.h"
#include "kernels/core/exec.h"
#include "kernels/core/workspace.h"

namespace isthmus::model {

// The number of "cuda:<number>"; -1 of "cpu". InvalidArgument: neither.
absl::StatusOr<int> ParseDevice(const std::string& name);

// The numbers of a group of `ranks` GPUs: as many names with commas between them, or one name, the
// first of so many in a row. InvalidArgument: neither, or the CPU.
absl::StatusOr<std::vector<int>> ParseDevices(const std::string& names, int ranks);

class DeviceContext {
 public:
  // Makes `device` the calling thread's. NotFound: there is no such device. ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<DeviceContext>> Open(int device);

  // Without threads and patches.
  const kernels::Exec& exec() const { return exec_; }
  int device() const { return device_; }
  const kernels::DeviceProperties& properties() const { return properties_; }
  const kernels::DeviceStream& stream() const { return stream_; }
  int64_t workspace_bytes() const { return static_cast<int64_t>(workspace_.capacity_bytes()); }

 private:
  DeviceContext() : workspace_(kernels::Workspace::kDevice) {}

  int device_ = 0;
  kernels::DeviceProperties properties_;
  kernels::DeviceStream stream_;
  kernels::Workspace workspace_;
  kernels::DeviceBuffer counters_;
  kernels::Exec exec_;
};

}  // namespace isthmus::model
