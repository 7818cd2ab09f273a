// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/workspace.h"

#include <algorithm>
#include <string>
#include <utility>

#include "services/base/check.h"

namespace isthmus::kernels {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kDeviceAlign = 256;
constexpr size_t kMinBlockBytes = size_t{1} << 20;

}  // namespace

Workspace::Scope::Scope(Workspace* workspace) : workspace_(workspace), block_(0), used_(0) {
  if (workspace_ == nullptr) {
    own_ = std::make_unique<Workspace>();
    workspace_ = own_.get();
  }
  block_ = workspace_->block_;
  used_ = workspace_->used_;
}

Workspace::Scope::~Scope() {
  workspace_->block_ = block_;
  workspace_->used_ = used_;
}

void* Workspace::TakeBytes(size_t bytes) {
  const size_t align = memory_ == kDevice ? kDeviceAlign : kAlign;
  bytes = (std::max<size_t>(bytes, 1) + align - 1) / align * align;
  while (block_ < blocks_.size() && blocks_[block_].size - used_ < bytes) {
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) {
    const size_t last = blocks_.empty() ? 0 : blocks_.back().size;
    const size_t size = std::max({bytes, kMinBlockBytes, 2 * last});
    Block grown;
    grown.size = size;
    if (memory_ == kDevice) {
      absl::StatusOr<DeviceBuffer> buffer = DeviceBuffer::Allocate(static_cast<int64_t>(size));
      if (!buffer.ok()) {
        CheckFailed(__FILE__, __LINE__, std::string(buffer.status().message()).c_str());
      }
      grown.device = *std::move(buffer);
    } else {
      grown.bytes.reset(static_cast<std::byte*>(std::aligned_alloc(kAlign, size)));
      ISTHMUS_CHECK(grown.bytes != nullptr);
    }
    blocks_.push_back(std::move(grown));
  }
  const Block& block = blocks_[block_];
  void* out = (memory_ == kDevice ? block.device.data() : block.bytes.get()) + used_;
  used_ += bytes;
  return out;
}

size_t Workspace::capacity_bytes() const {
  size_t sum = 0;
  for (const Block& block : blocks_) sum += block.size;
  return sum;
}

}  // namespace isthmus::kernels
