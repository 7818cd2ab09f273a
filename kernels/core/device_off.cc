// SPDX-License-Identifier: Apache-2.0
// device.h without any device.
#include <utility>

#include "kernels/core/device.h"
#include "kernels/core/device_wait.h"

namespace isthmus::kernels {
namespace {

absl::Status NoDevice() {
  return absl::UnimplementedError("this program was built without CUDA (ISTHMUS_CUDA=off)");
}

}  // namespace

int NumDevices() { return 0; }
absl::StatusOr<DeviceProperties> PropertiesOf(int) { return NoDevice(); }
bool IsRealDevice() { return false; }
absl::StatusOr<int> CurrentDevice() { return NoDevice(); }
absl::Status UseDevice(int) { return NoDevice(); }
absl::Status EnablePeerAccess(int, int) { return NoDevice(); }
absl::StatusOr<int64_t> FreeDeviceBytes() { return NoDevice(); }

void DeviceBuffer::Free::operator()(std::byte*) const {}
absl::StatusOr<DeviceBuffer> DeviceBuffer::Allocate(int64_t) { return NoDevice(); }

void PinnedBuffer::Free::operator()(std::byte*) const {}
absl::StatusOr<PinnedBuffer> PinnedBuffer::Allocate(int64_t) { return NoDevice(); }

absl::Status CopyToDevice(void*, const void*, int64_t, void*) { return NoDevice(); }
absl::Status CopyToHost(void*, const void*, int64_t, void*) { return NoDevice(); }
absl::Status CopyOnDevice(void*, const void*, int64_t, void*) { return NoDevice(); }
absl::Status FillDevice(void*, int, int64_t, void*) { return NoDevice(); }

absl::StatusOr<DeviceStream> DeviceStream::Create() { return NoDevice(); }
void DeviceStream::Destroy::operator()(void*) const {}
absl::Status DeviceStream::Synchronise() const { return NoDevice(); }

absl::StatusOr<DeviceEvent> DeviceEvent::Create() { return NoDevice(); }
void DeviceEvent::Destroy::operator()(void*) const {}
absl::Status DeviceEvent::Record(void*) const { return NoDevice(); }
absl::StatusOr<bool> DeviceEvent::HasPassed() const { return NoDevice(); }
absl::Status DeviceEvent::MakeWait(void*) const { return NoDevice(); }
absl::StatusOr<double> DeviceEvent::MillisecondsSince(const DeviceEvent&) const {
  return NoDevice();
}

void DeviceGraph::Destroy::operator()(void*) const {}
absl::Status DeviceGraph::BeginCapture(void*) { return NoDevice(); }
absl::StatusOr<DeviceGraph> DeviceGraph::EndCapture(void*) { return NoDevice(); }
absl::Status DeviceGraph::Replay(void*) const { return NoDevice(); }

absl::Status SynchroniseDevice() { return NoDevice(); }
absl::Status LastDeviceError() { return absl::OkStatus(); }
bool IsStickyError() { return false; }
void SetEmulatedArch(int) {}

}  // namespace isthmus::kernels
