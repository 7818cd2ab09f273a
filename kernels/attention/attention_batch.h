// SPDX-License-Identifier: Apache-2.0
// Several sequences of attention in one batch, in host and in device memory, for tests of the CUDA
// variants.
#pragma once

#include <memory>
#include <vector>

#include "kernels/attention/attention_sequence.h"
#include "kernels/testing/device.h"

namespace isthmus::kernels::testing {

// Rows [start, start + rows) of a sequence of its own.
struct AttentionPart {
  int64_t start = 0;
  int64_t rows = 1;
};

struct AttentionBatchCase {
  const char* name = "";
  AttentionShape shape;
  std::vector<AttentionPart> parts;
  int64_t max_selected = 0;  // 0: all visible entries.
  int64_t padding_rows = 0;
};
inline void PrintTo(const AttentionBatchCase& c, std::ostream* os) { *os << c.name; }

class AttentionBatch {
 public:
  explicit AttentionBatch(const AttentionBatchCase& c, uint64_t seed = 40) : case_(c) {
    uint64_t sequence_seed = seed;
    for (const AttentionPart& part : c.parts) {
      const int64_t end = std::max<int64_t>(1, part.start + part.rows);
      auto& one = *sequences_.emplace_back(
          std::make_unique<AttentionSequence>(c.shape, end, sequence_seed));
      for (int64_t p = std::max<int64_t>(0, part.start - c.shape.window); p < part.start; ++p) {
        one.WriteRing(p);
      }
      if (c.max_selected > 0) one.SelectSome(c.max_selected, sequence_seed + 9);
      one.sink = sequences_[0]->sink;                      // One layer's.
      if (c.shape.arithmetic == Arithmetic::kReference) {  // As RoPE leaves them.
        for (float& value : one.q) value = RoundBf16(value);
      }
      sequence_seed += 20;
    }
  }

  int64_t width() const { return case_.shape.heads * case_.shape.head_dim; }
  AttentionSequence& sequence(size_t i) { return *sequences_[i]; }

  // What `operation` gives for every part, part after part, on the CPU.
  std::vector<float> RunOnCpu(absl::Status (*operation)(const AttentionArgs&, const Exec&)) {
    std::vector<float> out;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const AttentionPart& part = case_.parts[i];
      std::vector<float> own(static_cast<size_t>(part.rows * width()));
      const absl::Status status =
          operation(sequences_[i]->Args(part.start, part.start + part.rows, own.data()), Exec{});
      EXPECT_TRUE(status.ok()) << status;
      out.insert(out.end(), own.begin(), own.end());
    }
    return out;
  }

  struct Result {
    std::vector<float> out;                     // Without padding rows.
    std::vector<std::vector<uint64_t>> states;  // Of the sequences.
  };

  // What `variant` gives on the device. q and out lie in wider rows; they are bf16 if asked for.
  // `shift` as DeviceSequences has it.
  Result RunOnDevice(const AttentionVariant& variant, const Exec& exec, bool is_bf16 = false,
                     int64_t shift = 0);
  // Whether `variant` takes such arguments.
  bool IsSupported(const AttentionVariant& variant) {
    std::vector<float> out(1);
    return variant.supports == nullptr || variant.supports(sequences_[0]->Args(0, 1, out.data()));
  }

 private:
  AttentionBatchCase case_;
  std::vector<std::unique_ptr<AttentionSequence>> sequences_;
};

inline AttentionBatch::Result AttentionBatch::RunOnDevice(const AttentionVariant& variant,
                                                          const Exec& exec, bool is_bf16,
                                                          int64_t shift) {
  constexpr int64_t kGap = 8;
  const int64_t d = case_.shape.head_dim;
  const float nan = std::nanf("");
  std::vector<float> q;
  std::vector<float> kv;
  std::vector<int32_t> selected;
  std::vector<SequenceKv> views;
  int64_t rows = 0;
  AttentionArgs args;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const AttentionPart& part = case_.parts[i];
    args = sequences_[i]->Args(part.start, part.start + part.rows, nullptr);
    for (int64_t r = 0; r < part.rows; ++r) {
      q.insert(q.end(), args.q.f32(r), args.q.f32(r) + width());
      q.insert(q.end(), kGap, nan);
      kv.insert(kv.end(), args.chunk_kv.f32(r), args.chunk_kv.f32(r) + d);
      kv.insert(kv.end(), kGap, nan);
      const int32_t* list = args.selected + r * args.max_selected;
      if (args.selected != nullptr) selected.insert(selected.end(), list, list + args.max_selected);
    }
    views.push_back(sequences_[i]->cache().View(rows, part.rows, part.start));
    rows += part.rows;
  }
  const int64_t all_rows = rows + case_.padding_rows;
  q.resize(static_cast<size_t>(all_rows * (width() + kGap)), nan);
  kv.resize(static_cast<size_t>(all_rows * (d + kGap)), nan);
  selected.resize(static_cast<size_t>(all_rows * args.max_selected), 0x7fffffff);
  std::vector<uint16_t> q_bf16;
  for (float value : q) q_bf16.push_back(Bf16Bits(value));

  DeviceSequences device(LayoutOf(case_.shape), views, case_.padding_rows, shift);
  args.window_plane = Shifted(args.window_plane, shift);
  args.entry_plane = Shifted(args.entry_plane, shift);
  const DeviceCopy<float> device_q(q);
  const DeviceCopy<uint16_t> device_q_bf16(q_bf16);
  const DeviceCopy<float> device_kv(kv);
  const DeviceCopy<float> sink(sequences_[0]->sink);
  const DeviceCopy<int32_t> device_selected(selected);
  const DeviceCopy<float> out(static_cast<int64_t>(q.size()));
  const DeviceCopy<uint16_t> out_bf16(static_cast<int64_t>(q.size()));
  const DType dtype = is_bf16 ? DType::kBf16 : DType::kF32;
  args.sequences = {};
  args.device_batch = &device.batch();
  args.q = {device_q.data(), dtype, all_rows, width(), width() + kGap};
  args.out = {out.data(), dtype, all_rows, width(), width() + kGap};
  if (is_bf16) args.q.data = device_q_bf16.data();
  if (is_bf16) args.out.data = out_bf16.data();
  args.chunk_kv = {device_kv.data(), DType::kF32, all_rows, d, d + kGap};
  args.sink.data = sink.data();
  args.selected = args.selected != nullptr ? device_selected.data() : nullptr;
  absl::Status status = ValidateAttention(args);
  if (status.ok()) status = variant.launch(args, exec);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(DeviceStream().Synchronise().ok());

  Result result;
  EXPECT_TRUE(out.Intact());
  EXPECT_TRUE(out_bf16.Intact());
  std::vector<float> values = out.ToHost();
  if (is_bf16) {
    values.clear();
    for (uint16_t bits : out_bf16.ToHost()) values.push_back(Bf16Value(bits));
  }
  for (int64_t i = 0; i < all_rows * (width() + kGap); ++i) {
    const float value = values[static_cast<size_t>(i)];
    const bool is_inside = i < rows * (width() + kGap) && i % (width() + kGap) < width();
    if (is_inside) {
      result.out.push_back(value);
    } else {
      EXPECT_TRUE(std::isnan(value)) << "written between rows or to padding, at " << i;
    }
  }
  // Back over the host's caches, which stay as they were for the next run.
  std::vector<std::vector<uint64_t>> before;
  for (const auto& one : sequences_) before.push_back(one->cache().state_words());
  device.CopyBack();
  for (size_t i = 0; i < sequences_.size(); ++i) {
    SequenceCache& cache = sequences_[i]->cache();
    result.states.push_back(cache.state_words());
    std::copy(before[i].begin(), before[i].end(), reinterpret_cast<uint64_t*>(cache.state()));
  }
  return result;
}

}  // namespace isthmus::kernels::testing
