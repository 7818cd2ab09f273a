// SPDX-License-Identifier: Apache-2.0
// device.h over the CUDA runtime.
#include <cuda_runtime_api.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/device.h"
#include "kernels/core/device_wait.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

absl::Status StatusOf(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

cudaStream_t StreamOf(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t EventOf(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

int NumDevices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();  // No driver is no device, and no reason for later calls to fail.
  return 0;
}

absl::StatusOr<DeviceProperties> PropertiesOf(int device) {
  cudaDeviceProp found = {};
  ISTHMUS_RETURN_IF_ERROR(StatusOf(cudaGetDeviceProperties(&found, device),
                                   absl::StrCat("properties of device ", device)));
  return DeviceProperties{.name = found.name,
                          .arch = found.major * 10 + found.minor,
                          .num_sms = found.multiProcessorCount,
                          .memory_bytes = static_cast<int64_t>(found.totalGlobalMem),
                          .l2_bytes = found.l2CacheSize,
                          .max_shared_bytes = static_cast<int64_t>(found.sharedMemPerBlockOptin)};
}

bool IsRealDevice() { return NumDevices() > 0; }
absl::StatusOr<int> CurrentDevice() {
  int device = 0;
  ISTHMUS_RETURN_IF_ERROR(StatusOf(cudaGetDevice(&device), "the current device"));
  return device;
}
absl::Status UseDevice(int device) {
  return StatusOf(cudaSetDevice(device), absl::StrCat("device ", device));
}
absl::Status EnablePeerAccess(int device, int peer) {
  int can_reach = 0;
  ISTHMUS_RETURN_IF_ERROR(StatusOf(cudaDeviceCanAccessPeer(&can_reach, device, peer),
                                   absl::StrCat("peer access of device ", device)));
  if (can_reach == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("device ", device, " cannot reach the memory of device ", peer));
  }
  ISTHMUS_RETURN_IF_ERROR(UseDevice(device));
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return absl::OkStatus();
  }
  return StatusOf(error, absl::StrCat("peer access from device ", device, " to ", peer));
}
absl::StatusOr<int64_t> FreeDeviceBytes() {
  size_t free = 0;
  size_t total = 0;
  ISTHMUS_RETURN_IF_ERROR(StatusOf(cudaMemGetInfo(&free, &total), "free memory"));
  return static_cast<int64_t>(free);
}

void DeviceBuffer::Free::operator()(std::byte* data) const { (void)cudaFree(data); }
absl::StatusOr<DeviceBuffer> DeviceBuffer::Allocate(int64_t bytes) {
  DeviceBuffer out;
  void* p = nullptr;
  const cudaError_t error = cudaMalloc(&p, static_cast<size_t>(bytes > 0 ? bytes : 1));
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    size_t free = 0;
    size_t total = 0;
    (void)cudaMemGetInfo(&free, &total);
    return absl::ResourceExhaustedError(
        absl::StrCat("no device memory for ", bytes, " bytes: ", free, " of ", total, " are free"));
  }
  ISTHMUS_RETURN_IF_ERROR(StatusOf(error, absl::StrCat("device memory of ", bytes, " bytes")));
  out.data_.reset(static_cast<std::byte*>(p));
  out.bytes_ = bytes;
  return out;
}

void PinnedBuffer::Free::operator()(std::byte* data) const { (void)cudaFreeHost(data); }
absl::StatusOr<PinnedBuffer> PinnedBuffer::Allocate(int64_t bytes) {
  PinnedBuffer out;
  void* p = nullptr;
  ISTHMUS_RETURN_IF_ERROR(
      StatusOf(cudaHostAlloc(&p, static_cast<size_t>(bytes > 0 ? bytes : 1), cudaHostAllocDefault),
               absl::StrCat("pinned memory of ", bytes, " bytes")));
  out.data_.reset(static_cast<std::byte*>(p));
  out.bytes_ = bytes;
  return out;
}

absl::Status CopyToDevice(void* device, const void* host, int64_t bytes, void* stream) {
  return StatusOf(cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                                  StreamOf(stream)),
                  "copy to device");
}
absl::Status CopyToHost(void* host, const void* device, int64_t bytes, void* stream) {
  return StatusOf(cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                                  StreamOf(stream)),
                  "copy to host");
}
absl::Status CopyOnDevice(void* target, const void* source, int64_t bytes, void* stream) {
  return StatusOf(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes),
                                  cudaMemcpyDeviceToDevice, StreamOf(stream)),
                  "copy on device");
}
absl::Status FillDevice(void* device, int byte, int64_t bytes, void* stream) {
  return StatusOf(cudaMemsetAsync(device, byte, static_cast<size_t>(bytes), StreamOf(stream)),
                  "fill device memory");
}

absl::StatusOr<DeviceStream> DeviceStream::Create() {
  cudaStream_t stream = nullptr;
  ISTHMUS_RETURN_IF_ERROR(
      StatusOf(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream"));
  DeviceStream out;
  out.stream_.reset(stream);
  return out;
}
void DeviceStream::Destroy::operator()(void* stream) const {
  (void)cudaStreamDestroy(StreamOf(stream));
}
absl::Status DeviceStream::Synchronise() const {
  return StatusOf(cudaStreamSynchronize(StreamOf(stream_.get())), "device work");
}

absl::StatusOr<DeviceEvent> DeviceEvent::Create() {
  cudaEvent_t event = nullptr;
  ISTHMUS_RETURN_IF_ERROR(StatusOf(cudaEventCreate(&event), "event"));
  DeviceEvent out;
  out.event_.reset(event);
  return out;
}
void DeviceEvent::Destroy::operator()(void* event) const { (void)cudaEventDestroy(EventOf(event)); }
absl::Status DeviceEvent::Record(void* stream) const {
  return StatusOf(cudaEventRecord(EventOf(event_.get()), StreamOf(stream)), "record an event");
}
absl::StatusOr<bool> DeviceEvent::HasPassed() const {
  const cudaError_t error = cudaEventQuery(EventOf(event_.get()));
  if (error == cudaErrorNotReady) return false;
  ISTHMUS_RETURN_IF_ERROR(StatusOf(error, "query an event"));
  return true;
}
absl::Status DeviceEvent::MakeWait(void* stream) const {
  return StatusOf(cudaStreamWaitEvent(StreamOf(stream), EventOf(event_.get()), 0),
                  "wait for an event");
}
absl::StatusOr<double> DeviceEvent::MillisecondsSince(const DeviceEvent& start) const {
  float elapsed = 0.0f;
  ISTHMUS_RETURN_IF_ERROR(
      StatusOf(cudaEventElapsedTime(&elapsed, EventOf(start.event_.get()), EventOf(event_.get())),
               "time of an event"));
  return double{elapsed};
}

void DeviceGraph::Destroy::operator()(void* graph) const {
  (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}
absl::Status DeviceGraph::BeginCapture(void* stream) {
  return StatusOf(cudaStreamBeginCapture(StreamOf(stream), cudaStreamCaptureModeThreadLocal),
                  "begin a graph");
}
absl::StatusOr<DeviceGraph> DeviceGraph::EndCapture(void* stream) {
  cudaGraph_t graph = nullptr;
  ISTHMUS_RETURN_IF_ERROR(StatusOf(cudaStreamEndCapture(StreamOf(stream), &graph), "end a graph"));
  size_t nodes = 0;
  (void)cudaGraphGetNodes(graph, nullptr, &nodes);
  cudaGraphExec_t ready = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&ready, graph, 0);
  (void)cudaGraphDestroy(graph);
  ISTHMUS_RETURN_IF_ERROR(StatusOf(error, "instantiate a graph"));
  DeviceGraph out;
  out.graph_.reset(ready);
  out.num_nodes_ = static_cast<int64_t>(nodes);
  return out;
}
absl::Status DeviceGraph::Replay(void* stream) const {
  return StatusOf(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_.get()), StreamOf(stream)),
                  "replay a graph");
}

absl::Status SynchroniseDevice() { return StatusOf(cudaDeviceSynchronize(), "device work"); }
absl::Status LastDeviceError() { return StatusOf(cudaGetLastError(), "device"); }
bool IsStickyError() {
  if (cudaGetLastError() == cudaSuccess) return false;
  return cudaGetLastError() != cudaSuccess;  // A sticky error survives being read.
}
void SetEmulatedArch(int) {}

}  // namespace isthmus::kernels
