// SPDX-License-Identifier: Apache-2.0
// Memory that transports under test write into, and recognisable bytes for it.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "kvtransfer/receiver.h"
#include "kvtransfer/transport.h"
#include "services/base/crc32c.h"

namespace isthmus::transfer::testing {

inline constexpr uint64_t kIncarnation = 0x1234;
inline constexpr uint64_t kLayout = 0xabcd;
inline constexpr uint64_t kPageBytes = 70000;  // Not a power of two, and larger than a UCX segment.
inline constexpr uint64_t kPages = 40;

inline std::vector<std::byte> Pattern(uint64_t size, uint32_t seed) {
  std::vector<std::byte> bytes(size);
  for (std::byte& b : bytes) {
    seed = seed * 1664525u + 1013904223u;
    b = static_cast<std::byte>(seed >> 24);
  }
  return bytes;
}

// Stands for the digest that workers compute.
inline uint32_t Digest(const ExpectedGroup& group) {
  return Crc32c(group.bytes.data(), group.bytes.size(), group.page_index);
}

// The owner of memory: two regions, the second one empty, and a thread that polls.
class PageOwner {
 public:
  explicit PageOwner(std::unique_ptr<Transport> transport, uint64_t incarnation = kIncarnation)
      : transport_(std::move(transport)), memory_(kPageBytes * kPages) {
    const LocalRegion regions[] = {{memory_.data(), kPageBytes, kPages}, {nullptr, 0, 0}};
    auto published = transport_->Publish(regions, {incarnation, kLayout});
    EXPECT_TRUE(published.ok()) << published.status();
    if (published.ok()) endpoint = *std::move(published);
    Start();
  }
  ~PageOwner() { Stop(); }
  void Start() {
    stop_ = false;
    thread_ = std::thread([this] {
      while (!stop_) transport_->Poll(absl::Milliseconds(20)).IgnoreError();
    });
  }
  // As a process does that hangs.
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  // As the death of the process: its connections close.
  void Kill() {
    Stop();
    transport_.reset();
  }

  std::span<const std::byte> page(uint64_t index) const {
    return std::span(memory_).subspan(index * kPageBytes, kPageBytes);
  }
  // Whether anything has been written to the first page since Forget. Only while nobody polls.
  void Forget() { memory_[0] = std::byte{0}; }
  bool has_changed() const { return memory_[0] != std::byte{0}; }
  Transport& transport() { return *transport_; }
  std::byte* bytes() { return memory_.data(); }
  v1::KvReservation Reserve(uint32_t num_pages = kPages) const {
    v1::KvReservation reservation;
    reservation.set_transfer_id("0123456789abcdef");
    reservation.set_worker_incarnation(endpoint.worker_incarnation());
    reservation.set_layout_fingerprint(endpoint.layout_fingerprint());
    v1::CachePages* pages = reservation.add_pages();
    for (uint32_t i = 0; i < num_pages; ++i) {
      v1::PageRef* page = pages->add_pages();
      page->set_region_generation(endpoint.regions(0).generation());
      page->set_page(i);
    }
    return reservation;
  }

  v1::TransferEndpoint endpoint;

 private:
  std::unique_ptr<Transport> transport_;
  std::vector<std::byte> memory_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace isthmus::transfer::testing
