// SPDX-License-Identifier: Apache-2.0
// Device memory for the tests of CUDA variants: the same source runs on a GPU and in the emulator.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/device.h"
#include "kernels/core/device_batch.h"
#include "kernels/core/device_wait.h"
#include "kernels/core/exec.h"
#include "kernels/core/kv_layout.h"
#include "kernels/core/weight_tiles.h"
#include "kernels/core/workspace.h"

// Skips the test, counted with its reason, where no GPU is and nothing is emulated.
#define ISTHMUS_REQUIRE_DEVICE() \
  if (::isthmus::kernels::NumDevices() == 0) GTEST_SKIP() << "no GPU"

namespace isthmus::kernels::testing {

// Whether shapes of the model are tested, too: not in the emulator, and not where
// ISTHMUS_SMALL_SHAPES is set, as it is under compute-sanitizer, which is as slow.
bool TestsRealShapes();

// A stream, a workspace and what an Exec needs of the device. Without a device it is empty, so that
// a fixture may own one before ISTHMUS_REQUIRE_DEVICE() skips its test.
class TestDevice {
 public:
  explicit TestDevice(uint32_t phase = kPhasePrefill) : workspace_(Workspace::kDevice) {
    if (NumDevices() == 0) return;
    stream_ = DeviceStream::Create().value();
    const DeviceProperties device = PropertiesOf(0).value();
    exec_.arch = device.arch;
    exec_.num_sms = device.num_sms;
    exec_.stream = stream_.get();
    exec_.workspace = &workspace_;
    counters_ = DeviceBuffer::Allocate(kNumCounters * 4).value();
    exec_.counters = counters_.as<unsigned>();
    EXPECT_TRUE(FillDevice(counters_.data(), 0, counters_.bytes(), nullptr).ok());
    EXPECT_TRUE(DeviceStream().Synchronise().ok());
    exec_.phase = phase;
  }

  Exec& exec() { return exec_; }
  void* stream() const { return stream_.get(); }
  // Waits for all work; a kernel's error fails the test.
  void Finish() const {
    const absl::Status status = stream_.Synchronise();
    ASSERT_TRUE(status.ok()) << status;
  }

 private:
  DeviceStream stream_;
  Workspace workspace_;
  DeviceBuffer counters_;
  Exec exec_;
};

// An array in device memory, between two guards of 256 bytes that Intact() compares.
template <typename T>
class DeviceCopy {
 public:
  explicit DeviceCopy(int64_t count, int fill_byte = 0xff) : count_(count) { Allocate(fill_byte); }
  explicit DeviceCopy(std::span<const T> values) : count_(static_cast<int64_t>(values.size())) {
    Allocate(0xff);
    Set(values);
  }
  explicit DeviceCopy(const std::vector<T>& values) : DeviceCopy(std::span<const T>(values)) {}

  T* data() const { return reinterpret_cast<T*>(buffer_.data() + kGuard); }
  int64_t size() const { return count_; }

  void Set(std::span<const T> values) {
    Check(CopyToDevice(data(), values.data(), static_cast<int64_t>(values.size_bytes()), nullptr));
    Wait();
  }
  std::vector<T> ToHost() const {
    std::vector<T> out(static_cast<size_t>(count_));
    Wait();
    Check(CopyToHost(out.data(), data(), count_ * static_cast<int64_t>(sizeof(T)), nullptr));
    Wait();
    return out;
  }
  ::testing::AssertionResult Intact() const {
    std::vector<uint8_t> all(static_cast<size_t>(buffer_.bytes()));
    Wait();
    Check(CopyToHost(all.data(), buffer_.data(), buffer_.bytes(), nullptr));
    Wait();
    const size_t end = static_cast<size_t>(kGuard + count_ * static_cast<int64_t>(sizeof(T)));
    for (size_t i = 0; i < all.size(); ++i) {
      if ((i < kGuard || i >= end) && all[i] != kGuardByte) {
        return ::testing::AssertionFailure() << "guard byte " << i << " is " << int{all[i]};
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr int kGuardByte = 0xa5;

  static void Check(const absl::Status& status) { ASSERT_TRUE(status.ok()) << status; }
  // Work of any stream may still be on its way.
  static void Wait() { Check(SynchroniseDevice()); }
  void Allocate(int fill_byte) {
    const int64_t bytes = count_ * static_cast<int64_t>(sizeof(T));
    absl::StatusOr<DeviceBuffer> buffer = DeviceBuffer::Allocate(bytes + 2 * kGuard);
    Check(buffer.status());
    buffer_ = *std::move(buffer);
    Check(FillDevice(buffer_.data(), kGuardByte, buffer_.bytes(), nullptr));
    Check(FillDevice(data(), fill_byte, bytes, nullptr));
    Wait();
  }

  int64_t count_;
  DeviceBuffer buffer_;
};

// A row-major host weight as a device holds it: in tiles, or row-major for comparison.
class DeviceWeight {
 public:
  explicit DeviceWeight(const WeightView& host, WeightLayout layout = WeightLayout::kMmaTiles)
      : view_(host) {
    std::vector<std::byte> bytes;
    if (IsTiled(layout)) {
      bytes.resize(static_cast<size_t>(TiledBytes(host)));
      view_ = TileWeight(host, bytes.data(), layout);
    } else {
      const int64_t elements = host.rows * host.cols;
      const int64_t size = IsFp4(host.format)                   ? elements / 2
                           : host.format == WeightFormat::kF32  ? elements * 4
                           : host.format == WeightFormat::kBf16 ? elements * 2
                                                                : elements;
      const auto* from = static_cast<const std::byte*>(host.elements);
      bytes.assign(from, from + size);
    }
    elements_ = std::make_unique<DeviceCopy<std::byte>>(bytes);
    view_.elements = elements_->data();
    if (view_.scales != nullptr) {
      const int64_t block = host.format == WeightFormat::kFp8Block128 ? 128 : 1;
      const int64_t rows = (host.first_row + host.rows + block - 1) / block;
      const int64_t count = rows * ScaleColumns(host);
      scales_ = std::make_unique<DeviceCopy<uint8_t>>(
          std::span<const uint8_t>(view_.scales, static_cast<size_t>(count)));
      view_.scales = scales_->data();
    }
  }

  const WeightView& view() const { return view_; }

 private:
  WeightView view_;
  std::unique_ptr<DeviceCopy<std::byte>> elements_;
  std::unique_ptr<DeviceCopy<uint8_t>> scales_;
};

// The caches of several sequences in device memory, and their DeviceBatch. `host` says where each
// sequence's pages and state lie on the host (copied up with their bytes). `padding_rows` are added
// behind the last row. Addresses given to kernels are `shift` bytes below the memory, for planes
// whose offsets are as much larger (Shifted): offsets of more than 32 bits in little memory.
class DeviceSequences {
 public:
  DeviceSequences(const KvLayout& layout, std::span<const SequenceKv> host,
                  int64_t padding_rows = 0, int64_t shift = 0);

  const DeviceBatch& batch() const { return batch_; }
  // Copies pages and states back over those of the host.
  void CopyBack();

 private:
  struct Copied {
    std::byte* host;
    DeviceCopy<std::byte> device;
  };
  std::byte* Upload(std::byte* host, int64_t bytes);

  std::vector<Copied> copied_;
  std::vector<DeviceCopy<std::byte*>> tables_;
  std::vector<DeviceCopy<DeviceSequence>> sequences_;
  std::vector<DeviceCopy<int32_t>> rows_;
  DeviceBatch batch_;
};

// Beyond what 32 bits hold, with or without a sign, and a multiple of what planes are aligned to.
inline constexpr int64_t kFarShift = (int64_t{1} << 32) + (int64_t{1} << 31) + 4096;

// The plane for addresses that are `shift` lower.
inline EntryPlane Shifted(EntryPlane plane, int64_t shift) {
  plane.data_offset += shift;
  plane.scale_offset += shift;
  return plane;
}

}  // namespace isthmus::kernels::testing
