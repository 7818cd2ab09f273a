// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/device.h"

#include <algorithm>
#include <cstdlib>

namespace isthmus::kernels::testing {

bool TestsRealShapes() {
  static const bool is_small = std::getenv("ISTHMUS_SMALL_SHAPES") != nullptr;
  return IsRealDevice() && !is_small;
}

std::byte* DeviceSequences::Upload(std::byte* host, int64_t bytes) {
  for (const Copied& one : copied_) {
    if (one.host == host) return one.device.data();  // A page that sequences share.
  }
  copied_.push_back(
      {host, DeviceCopy<std::byte>(std::span<const std::byte>(host, static_cast<size_t>(bytes)))});
  return copied_.back().device.data();
}

DeviceSequences::DeviceSequences(const KvLayout& layout, std::span<const SequenceKv> host,
                                 int64_t padding_rows, int64_t shift) {
  std::vector<DeviceSequence> sequences;
  std::vector<int32_t> row_sequence;
  std::vector<int32_t> row_position;
  for (size_t i = 0; i < host.size(); ++i) {
    const SequenceKv& from = host[i];
    DeviceSequence to;
    to.first_row = static_cast<int32_t>(from.first_row);
    to.num_rows = static_cast<int32_t>(from.num_rows);
    to.start_position = static_cast<int32_t>(from.start_position);
    if (from.state != nullptr) to.state = Upload(from.state, layout.state_slot_bytes) - shift;
    for (size_t kind = 0; kind < kNumPagedKinds; ++kind) {
      std::vector<std::byte*> table;
      for (std::byte* page : from.pages[kind]) {
        table.push_back(Upload(page, layout.kinds[kind].bytes()) - shift);
      }
      tables_.emplace_back(table);
      to.pages[kind] = tables_.back().data();
    }
    for (int64_t r = 0; r < from.num_rows; ++r) {
      row_sequence.push_back(static_cast<int32_t>(i));
      row_position.push_back(static_cast<int32_t>(from.start_position + r));
    }
    batch_.max_rows_per_sequence = std::max(batch_.max_rows_per_sequence, from.num_rows);
    batch_.max_tokens = std::max(batch_.max_tokens, from.start_position + from.num_rows);
    sequences.push_back(to);
  }
  for (int64_t i = 0; i < padding_rows; ++i) {
    row_sequence.push_back(-1);
    row_position.push_back(0);
    sequences.emplace_back();  // A bucket has as many empty sequences.
  }
  sequences_.emplace_back(sequences);
  rows_.emplace_back(row_sequence);
  rows_.emplace_back(row_position);
  batch_.sequences = sequences_[0].data();
  batch_.row_sequence = rows_[0].data();
  batch_.row_position = rows_[1].data();
  batch_.rows = static_cast<int64_t>(row_sequence.size());
  batch_.num_sequences = static_cast<int64_t>(sequences.size());
}

void DeviceSequences::CopyBack() {
  for (const Copied& one : copied_) {
    const std::vector<std::byte> bytes = one.device.ToHost();
    std::copy(bytes.begin(), bytes.end(), one.host);
  }
}

}  // namespace isthmus::kernels::testing
