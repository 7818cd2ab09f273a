// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/workspace.h"

#include <algorithm>
#include <string>
#include <utility>

#include "services/base/check.h"

namespace isthmus::kernels {
namespace {

constexpr size_t kDeviceAlign = 256;
constexpr size_t kMinBlockBytes = size_t{1} << 20;

}  // namespace

Workspace::Workspace(std::byte* part, int64_t bytes) : memory_(kHost) {
  Block block;
  block.start = part;
  block.size = static_cast<size_t>(bytes);
  blocks_.push_back(std::move(block));
}

Workspace::Scope::Scope(Workspace* workspace)
    : workspace_(workspace), block_(0), used_(0), live_(0) {
  if (workspace_ == nullptr) {
    own_ = std::make_unique<Workspace>();
    workspace_ = own_.get();
  }
  block_ = workspace_->block_;
  used_ = workspace_->used_;
  live_ = workspace_->live_;
}

Workspace::Scope::~Scope() {
  workspace_->block_ = block_;
  workspace_->used_ = used_;
  workspace_->live_ = live_;
}

void Workspace::AddBlock(size_t size) {
  Block block;
  block.size = size;
  if (memory_ == kDevice) {
    absl::StatusOr<DeviceBuffer> buffer = DeviceBuffer::Allocate(static_cast<int64_t>(size));
    if (!buffer.ok()) {
      CheckFailed(__FILE__, __LINE__, std::string(buffer.status().message()).c_str());
    }
    block.device = *std::move(buffer);
    block.start = block.device.data();
  } else {
    block.bytes.reset(static_cast<std::byte*>(std::aligned_alloc(kAlign, size)));
    ISTHMUS_CHECK(block.bytes != nullptr);
    block.start = block.bytes.get();
  }
  blocks_.push_back(std::move(block));
}

void Workspace::Reserve(int64_t bytes) {
  ISTHMUS_CHECK(blocks_.empty() && live_ == 0 && bytes >= 0);
  if (bytes > 0) AddBlock(static_cast<size_t>(RoundedBytes(bytes)));
}

void* Workspace::TakeBytes(size_t bytes) {
  const size_t align = memory_ == kDevice ? kDeviceAlign : size_t{kAlign};
  bytes = (std::max<size_t>(bytes, 1) + align - 1) / align * align;
  live_ += static_cast<int64_t>(bytes);
  peak_ = std::max(peak_, live_);
  while (block_ < blocks_.size() && blocks_[block_].size - used_ < bytes) {
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) {
    const size_t last = blocks_.empty() ? 0 : blocks_.back().size;
    AddBlock(std::max({bytes, kMinBlockBytes, 2 * last}));
  }
  void* out = blocks_[block_].start + used_;
  used_ += bytes;
  return out;
}

size_t Workspace::capacity_bytes() const {
  size_t sum = 0;
  for (const Block& block : blocks_) sum += block.size;
  return sum;
}

}  // namespace isthmus::kernels
