// SPDX-License-Identifier: Apache-2.0
// Scratch memory of a step: a stack of blocks that grows while the first steps run and is then
// reused, so that a warm step allocates nothing. Not thread-safe: one per step loop. Kernels take
// scratch for all threads before they start them. A workspace for a device holds device memory; it
// must have grown before a graph is captured, which no allocation survives. Whoever knows what the
// largest step takes (scratch_count.h) reserves it, and the stack is one block of that size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/core/device.h"

namespace isthmus::kernels {

class Workspace {
 public:
  enum Memory : uint8_t { kHost, kDevice };
  explicit Workspace(Memory memory = kHost) : memory_(memory) {}
  // Begins with `bytes` bytes at `part`, which another workspace gave out aligned: scratch for one
  // of several threads.
  Workspace(std::byte* part, int64_t bytes);

  // Gives back everything that was taken since it was made.
  class Scope {
   public:
    explicit Scope(Workspace* workspace);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    // `count` uninitialised objects, aligned to 64 bytes (256 on a device), valid until the scope
    // ends. Check-fails when the memory cannot be had.
    template <typename T>
    T* Take(int64_t count) {
      return static_cast<T*>(workspace_->TakeBytes(static_cast<size_t>(count) * sizeof(T)));
    }

   private:
    std::unique_ptr<Workspace> own_;  // When the caller passed none.
    Workspace* workspace_;
    size_t block_;
    size_t used_;
    int64_t live_;
  };

  // Has a first block of `bytes`, so that a stack which needs no more never grows. Check-fails once
  // anything was taken, and when the memory cannot be had; host memory is committed as it is used.
  void Reserve(int64_t bytes);

  // Bytes held.
  size_t capacity_bytes() const;
  // The most bytes that were taken at a time.
  int64_t peak_bytes() const { return peak_; }

  // What a take of `bytes` bytes of host memory adds to those.
  static int64_t RoundedBytes(int64_t bytes) {
    return (std::max<int64_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  struct Block {
    std::unique_ptr<std::byte, Free> bytes;  // kHost, unless another workspace's
    DeviceBuffer device;                     // kDevice
    std::byte* start = nullptr;
    size_t size = 0;
  };
  static constexpr int64_t kAlign = 64;

  void* TakeBytes(size_t bytes);
  void AddBlock(size_t size);

  const Memory memory_;
  std::vector<Block> blocks_;
  size_t block_ = 0;  // Current block, and bytes used in it.
  size_t used_ = 0;
  int64_t live_ = 0;  // Taken and not given back.
  int64_t peak_ = 0;
};

}  // namespace isthmus::kernels
