// SPDX-License-Identifier: Apache-2.0
// device.h over the emulator: device memory is host memory, work runs when it is enqueued, and a
// captured graph is a list of closures.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/device.h"
#include "kernels/core/device_wait.h"
#include "kernels/core/launch.cuh"

namespace isthmus::kernels {
namespace {

using Work = std::function<void()>;
using Clock = std::chrono::steady_clock;

constexpr int64_t kAlign = 256;
// As 0xff reads as NaN in every format, so that memory nobody wrote shows.
constexpr int kPoison = 0xff;
constexpr int64_t kMaxPoisonedBytes = int64_t{64} << 20;

int emulated_arch = kArchSm90;
thread_local std::vector<Work>* capture = nullptr;

void Enqueue(Work work) {
  if (capture != nullptr) {
    capture->push_back(std::move(work));
  } else {
    work();
  }
}

absl::StatusOr<std::byte*> Take(int64_t bytes) {
  if (capture != nullptr) return absl::InternalError("memory was taken while a graph is captured");
  const int64_t size = (bytes + kAlign - 1) / kAlign * kAlign;
  auto* p = static_cast<std::byte*>(
      std::aligned_alloc(kAlign, static_cast<size_t>(size > 0 ? size : kAlign)));
  if (p == nullptr) return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes));
  if (bytes <= kMaxPoisonedBytes) std::memset(p, kPoison, static_cast<size_t>(bytes));
  return p;
}

}  // namespace

absl::Status EmulatedLaunch(const LaunchShape& shape, std::function<void()> body) {
  const emulator::GridLaunch launch = {shape.grid, shape.block, shape.shared_bytes,
                                       shape.is_cooperative};
  Enqueue([launch, body = std::move(body)] { emulator::RunGrid(launch, body); });
  return absl::OkStatus();
}

int NumDevices() { return 1; }
absl::StatusOr<DeviceProperties> PropertiesOf(int device) {
  if (device != 0) return absl::InvalidArgumentError(absl::StrCat("no device ", device, " of 1"));
  return DeviceProperties{.name = "emulator",
                          .arch = emulated_arch,
                          .num_sms = 8,
                          .memory_bytes = int64_t{8} << 30,
                          .l2_bytes = int64_t{64} << 20,
                          .max_shared_bytes = static_cast<int64_t>(kMaxSharedBytes)};
}
bool IsRealDevice() { return false; }
absl::StatusOr<int> CurrentDevice() { return 0; }
absl::Status UseDevice(int device) { return PropertiesOf(device).status(); }
absl::Status EnablePeerAccess(int device, int peer) {
  const absl::Status status = UseDevice(device);
  return status.ok() ? UseDevice(peer) : status;
}
absl::StatusOr<int64_t> FreeDeviceBytes() { return int64_t{8} << 30; }

void DeviceBuffer::Free::operator()(std::byte* data) const { std::free(data); }
absl::StatusOr<DeviceBuffer> DeviceBuffer::Allocate(int64_t bytes) {
  absl::StatusOr<std::byte*> p = Take(bytes);
  if (!p.ok()) return p.status();
  DeviceBuffer out;
  out.data_.reset(*p);
  out.bytes_ = bytes;
  return out;
}

void PinnedBuffer::Free::operator()(std::byte* data) const { std::free(data); }
absl::StatusOr<PinnedBuffer> PinnedBuffer::Allocate(int64_t bytes) {
  absl::StatusOr<std::byte*> p = Take(bytes);
  if (!p.ok()) return p.status();
  PinnedBuffer out;
  out.data_.reset(*p);
  out.bytes_ = bytes;
  return out;
}

absl::Status CopyToDevice(void* device, const void* host, int64_t bytes, void*) {
  Enqueue([=] { std::memcpy(device, host, static_cast<size_t>(bytes)); });
  return absl::OkStatus();
}
absl::Status CopyToHost(void* host, const void* device, int64_t bytes, void* stream) {
  return CopyToDevice(host, device, bytes, stream);
}
absl::Status CopyOnDevice(void* target, const void* source, int64_t bytes, void* stream) {
  return CopyToDevice(target, source, bytes, stream);
}
absl::Status FillDevice(void* device, int byte, int64_t bytes, void*) {
  Enqueue([=] { std::memset(device, byte, static_cast<size_t>(bytes)); });
  return absl::OkStatus();
}

absl::StatusOr<DeviceStream> DeviceStream::Create() {
  DeviceStream out;
  out.stream_.reset(&emulated_arch);  // Any address: there is one order of things.
  return out;
}
void DeviceStream::Destroy::operator()(void*) const {}
absl::Status DeviceStream::Synchronise() const {
  if (capture != nullptr) return absl::InternalError("a wait while a graph is captured");
  return absl::OkStatus();
}

absl::StatusOr<DeviceEvent> DeviceEvent::Create() {
  DeviceEvent out;
  out.event_.reset(new Clock::time_point(Clock::now()));
  return out;
}
void DeviceEvent::Destroy::operator()(void* event) const {
  delete static_cast<Clock::time_point*>(event);
}
absl::Status DeviceEvent::Record(void*) const {
  auto* at = static_cast<Clock::time_point*>(event_.get());
  Enqueue([at] { *at = Clock::now(); });
  return absl::OkStatus();
}
absl::StatusOr<bool> DeviceEvent::HasPassed() const { return true; }
absl::Status DeviceEvent::MakeWait(void*) const { return absl::OkStatus(); }
absl::StatusOr<double> DeviceEvent::MillisecondsSince(const DeviceEvent& start) const {
  const auto elapsed = *static_cast<Clock::time_point*>(event_.get()) -
                       *static_cast<Clock::time_point*>(start.event_.get());
  return std::chrono::duration<double, std::milli>(elapsed).count();
}

void DeviceGraph::Destroy::operator()(void* graph) const {
  delete static_cast<std::vector<Work>*>(graph);
}
absl::Status DeviceGraph::BeginCapture(void*) {
  if (capture != nullptr) return absl::InternalError("a graph is being captured already");
  capture = new std::vector<Work>;
  return absl::OkStatus();
}
absl::StatusOr<DeviceGraph> DeviceGraph::EndCapture(void*) {
  if (capture == nullptr) return absl::InternalError("no graph is being captured");
  DeviceGraph out;
  out.num_nodes_ = static_cast<int64_t>(capture->size());
  out.graph_.reset(std::exchange(capture, nullptr));
  return out;
}
absl::Status DeviceGraph::Replay(void*) const {
  if (graph_ == nullptr) return absl::InternalError("the graph is empty");
  for (const Work& work : *static_cast<const std::vector<Work>*>(graph_.get())) work();
  return absl::OkStatus();
}

absl::Status SynchroniseDevice() { return absl::OkStatus(); }
absl::Status LastDeviceError() { return absl::OkStatus(); }
bool IsStickyError() { return false; }
void SetEmulatedArch(int arch) { emulated_arch = arch; }

}  // namespace isthmus::kernels
