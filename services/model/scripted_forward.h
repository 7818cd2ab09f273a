// SPDX-License-Identifier: Apache-2.0
// A Forward without a model: tokens from a seed, recognisable bytes in its pages and state slot,
// simulated step times. It carries simulations and every figure about the machinery alone.
//
// The next token is a function of the seed and of all tokens so far, by a running hash that lives
// in the sequence's windows and compressor rows and therefore has to travel with them. Every cached
// entry is filled from the hash of the prefix that ends with it, so a page that is lost, stale or
// of another sequence does not verify. What is read of a state slot is what a model reads
// (kernels/core/state_rows.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/model/forward.h"

namespace isthmus::model {

struct ScriptedOptions {
  uint64_t seed = 1;
  int32_t vocab_size = 512;  // At least 4.
  int32_t end_token_id = 1;
  int64_t max_positions = 65536;  // At most 2,000,000.
  int32_t page_tokens = 256;
  int32_t layer_pairs = 1;  // Layers of ratio 4 and of ratio 128, one each per pair: page size.

  // Chance that a token is the end token; 0 never ends a reply before its length.
  double end_probability = 0.0;

  // Tokens that a sequence gains in one decode step: 1 to this, at most 4, by the prefix alone.
  int32_t max_tokens_per_step = 1;

  // What one step costs, and on top of it every row beyond the first of each sequence.
  absl::Duration step_time;
  absl::Duration prefill_token_time;
};

// InvalidArgument names the bad option and its value.
absl::Status ValidateScripted(const ScriptedOptions& options);

// The whole output for `prompt`, the end token included, as any engine gives it whatever its chunks
// and batches; temperature does not matter.
std::vector<int32_t> ScriptedReply(const ScriptedOptions& options, std::span<const int32_t> prompt,
                                   int64_t max_output_tokens);

// Of everything that two workers must have in common to continue each other's sequences.
uint64_t ScriptedFingerprint(const ScriptedOptions& options);

class ScriptedForward : public Forward {
 public:
  // `clock` must outlive it.
  static absl::StatusOr<std::unique_ptr<ScriptedForward>> Create(const ScriptedOptions& options,
                                                                 Clock& clock);

  // Sleeps for the step's time; then, before anything is written, verifies of every sequence the
  // newest and the oldest row of every state and three runs of 128 tokens in its pages: the first,
  // the last with the rows of its positions, and one by chance with those before it in its page.
  // DataLoss names position, expected and found value.
  absl::Status Run(const ForwardBatch& batch, const kernels::Exec& exec) override;

  int64_t vocab_size() const override { return options_.vocab_size; }
  int64_t max_positions() const override { return options_.max_positions; }
  const kernels::KvLayout& layout() const override { return layout_; }
  int64_t max_accepted() const override { return options_.max_tokens_per_step - 1; }

  const ScriptedOptions& options() const { return options_; }

 private:
  struct Record;

  ScriptedForward(const ScriptedOptions& options, kernels::KvLayout layout, Clock& clock)
      : options_(options), layout_(std::move(layout)), clock_(clock) {}
  absl::Status Validate(const ForwardBatch& batch) const;
  absl::Duration TimeOf(const ForwardBatch& batch) const;
  std::byte* RowAt(const kernels::SequenceKv& sequence, kernels::CacheKindIndex kind,
                   int64_t position) const;
  Record RecordAt(const kernels::SequenceKv& sequence, kernels::CacheKindIndex kind,
                  int64_t position) const;
  absl::Status VerifyRecord(const kernels::SequenceKv& sequence, kernels::CacheKindIndex kind,
                            int64_t position) const;
  absl::Status VerifyRows(const kernels::SequenceKv& sequence, int64_t position,
                          uint64_t hash) const;
  absl::Status VerifyState(const kernels::SequenceKv& sequence) const;
  absl::Status VerifyRun(const kernels::SequenceKv& sequence, int64_t run) const;
  absl::Status VerifyEntry(const kernels::SequenceKv& sequence, kernels::CacheKindIndex kind,
                           int64_t entry, uint64_t hash, std::span<const std::byte> carried) const;
  absl::Status Verify(const kernels::SequenceKv& sequence) const;
  void Append(const kernels::SequenceKv& sequence, int64_t position, int32_t token,
              Record& record) const;
  void StoreRecord(const kernels::SequenceKv& sequence, const Record& record) const;
  void FillEntry(const kernels::SequenceKv& sequence, kernels::CacheKindIndex kind, int64_t entry,
                 uint64_t hash, std::span<const std::byte> carried) const;
  uint64_t HashBefore(const kernels::SequenceKv& sequence, int64_t run) const;

  const ScriptedOptions options_;
  const kernels::KvLayout layout_;
  Clock& clock_;
};

}  // namespace isthmus::model
