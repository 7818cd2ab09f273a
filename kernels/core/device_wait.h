// SPDX-License-Identifier: Apache-2.0
// The whole device's end of work: for tests and for the end of a process. A step waits for its
// stream instead (device.h).
#pragma once

#include "absl/status/status.h"

namespace isthmus::kernels {

// Waits for all work of all streams of the calling thread's device.
absl::Status SynchroniseDevice();

}  // namespace isthmus::kernels
