// SPDX-License-Identifier: Apache-2.0
// A GPU as this project uses it: memory, copies, streams, events and captured graphs, without a
// CUDA header. Built with ISTHMUS_CUDA=nvcc this is the CUDA runtime; emulated, it is host memory
// and a kernel runs when it is launched; off, there is no device and everything else is
// Unimplemented.
//
// Errors     Internal with CUDA's text. After a sticky error (an illegal address, a trap) every
//            further call fails, and the process must end: see IsStickyError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isthmus::kernels {

struct DeviceProperties {
  std::string name;
  int arch = 0;     // Compute capability times ten: 90, 120.
  int num_sms = 0;  // Multiprocessors.
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  int64_t max_shared_bytes = 0;  // Per block, opted in.
};

int NumDevices();
// The emulator's device calls itself sm_90, or what SetEmulatedArch said last.
absl::StatusOr<DeviceProperties> PropertiesOf(int device);
bool IsRealDevice();
// The calling thread's.
absl::StatusOr<int> CurrentDevice();
// Makes `device` the calling thread's.
absl::Status UseDevice(int device);
// Lets kernels on `device` read and write the memory of `peer`; leaves the calling thread on
// `device`. FailedPrecondition: no path between the two.
absl::Status EnablePeerAccess(int device, int peer);
// Memory of the calling thread's device that is free now.
absl::StatusOr<int64_t> FreeDeviceBytes();

// Device memory. Movable; freed with the object. Aligned to 256 bytes.
class DeviceBuffer {
 public:
  // ResourceExhausted with both numbers when the memory cannot be had.
  static absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes);

  std::byte* data() const { return data_.get(); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  int64_t bytes_ = 0;
};

// Host memory that the copy engine reads and writes at full speed. Movable.
class PinnedBuffer {
 public:
  static absl::StatusOr<PinnedBuffer> Allocate(int64_t bytes);

  std::byte* data() const { return data_.get(); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  int64_t bytes_ = 0;
};

// Enqueued on `stream`. Host memory must stay valid until the stream has passed; only pinned memory
// overlaps with other work.
absl::Status CopyToDevice(void* device, const void* host, int64_t bytes, void* stream);
absl::Status CopyToHost(void* host, const void* device, int64_t bytes, void* stream);
absl::Status CopyOnDevice(void* target, const void* source, int64_t bytes, void* stream);
absl::Status FillDevice(void* device, int byte, int64_t bytes, void* stream);

// An ordered queue of device work that does not wait for other streams.
class DeviceStream {
 public:
  static absl::StatusOr<DeviceStream> Create();

  void* get() const { return stream_.get(); }  // cudaStream_t, for Exec.
  // Waits until all work is done; errors of kernels show here.
  absl::Status Synchronise() const;

 private:
  struct Destroy {
    void operator()(void* stream) const;
  };
  std::unique_ptr<void, Destroy> stream_;
};

// A point in a stream, for timing and for ordering.
class DeviceEvent {
 public:
  static absl::StatusOr<DeviceEvent> Create();

  absl::Status Record(void* stream) const;
  // True when the stream has passed the point.
  absl::StatusOr<bool> HasPassed() const;
  // Later work on `stream` waits for the point.
  absl::Status MakeWait(void* stream) const;
  // Milliseconds from `start` to this event; both have passed.
  absl::StatusOr<double> MillisecondsSince(const DeviceEvent& start) const;

 private:
  struct Destroy {
    void operator()(void* event) const;
  };
  std::unique_ptr<void, Destroy> event_;
};

// Work captured once and replayed with one call. Pointers and shapes are those of the capture; what
// the kernels read from memory is that of the replay.
class DeviceGraph {
 public:
  // Between the two, work on `stream` is recorded and not run. End also after an error in between.
  static absl::Status BeginCapture(void* stream);
  static absl::StatusOr<DeviceGraph> EndCapture(void* stream);

  absl::Status Replay(void* stream) const;
  bool is_empty() const { return graph_ == nullptr; }
  int64_t num_nodes() const { return num_nodes_; }

 private:
  struct Destroy {
    void operator()(void* graph) const;
  };
  std::unique_ptr<void, Destroy> graph_;  // cudaGraphExec_t
  int64_t num_nodes_ = 0;
};

// The last error of the calling thread's device, cleared unless it is sticky.
absl::Status LastDeviceError();
// True when the device of this thread answers nothing but errors any more.
bool IsStickyError();

// Emulated builds: the architecture that PropertiesOf names (90 or 120). Elsewhere nothing.
void SetEmulatedArch(int arch);

}  // namespace isthmus::kernels
