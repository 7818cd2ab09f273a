// SPDX-License-Identifier: Apache-2.0
// Runs the steps of a ModelForward on a GPU: brings a batch into device memory with one copy, keeps
// decode steps as graphs, brings the logits back, or tokens drawn from them, and waits once.
//
// A graph is captured per shape: the number of rows rounded up to a bucket (the rest is padding,
// which reads and writes nothing), the largest number of tokens of a sequence rounded up to a power
// of two, whether tokens are drawn, and the patches that are on. All else (tokens, positions,
// lengths, page tables) lies in device memory at addresses that stay, and is read when the graph
// runs. The first step of a shape runs as it is, so that the workspace grows; the second is
// captured; later ones are replayed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "absl/status/status.h"
#include "kernels/core/device.h"
#include "kernels/core/device_batch.h"
#include "kernels/sampling/sampling.h"
#include "services/model/forward.h"

namespace isthmus::model {

// What of a step decides its launches.
struct StepShape {
  int64_t rows = 0;
  int64_t sequences = 0;
  int64_t logit_rows = 0;
  int64_t max_rows_per_sequence = 1;
  int64_t max_tokens = 0;
  bool has_draws = false;  // Of every logit row a token is drawn, wanted or not.
};

// The inputs of one step, on the host and on the device, in one block whose parts lie at offsets
// that depend on the shape alone; page tables follow in the order of the sequences.
class StepStage {
 public:
  // Copies the batch and its padding up; `has_moved` says whether the block is another than before.
  absl::Status Load(const ForwardBatch& batch, const StepShape& shape, void* stream,
                    bool* has_moved);

  // Of the shape last loaded; device memory.
  const kernels::DeviceBatch& device_batch() const { return batch_; }
  const int32_t* tokens() const { return tokens_; }
  const int64_t* positions() const { return positions_; }
  const int32_t* logit_rows() const { return logit_rows_; }
  // Of a shape with draws: all but logits and tokens. Rows without a draw are greedy.
  const kernels::SamplingBatchArgs& draws() const { return draws_; }

 private:
  absl::Status Grow(int64_t bytes, bool* has_moved);
  void WriteRows(const ForwardBatch& batch, const StepShape& shape);
  void WriteSequences(const ForwardBatch& batch, const StepShape& shape);
  void WriteDraws(const ForwardBatch& batch, const StepShape& shape);

  struct Offsets {
    int64_t tokens = 0;
    int64_t row_sequence = 0;
    int64_t row_position = 0;
    int64_t logit_rows = 0;
    int64_t positions = 0;
    int64_t seed = 0;  // These six of the draws.
    int64_t counter = 0;
    int64_t temperature = 0;
    int64_t top_p = 0;
    int64_t top_k = 0;
    int64_t min_p = 0;
    int64_t sequences = 0;
    int64_t tables = 0;
    int64_t end = 0;
  };
  static Offsets PlaceParts(const ForwardBatch& batch, const StepShape& shape);

  kernels::PinnedBuffer host_;
  kernels::DeviceBuffer device_;
  Offsets at_;
  kernels::DeviceBatch batch_;
  const int32_t* tokens_ = nullptr;
  const int64_t* positions_ = nullptr;
  const int32_t* logit_rows_ = nullptr;
  kernels::SamplingBatchArgs draws_;
};

class DeviceSteps {
 public:
  // `logit_columns` are the rows of the head.
  DeviceSteps(const ModelForward* forward, int64_t logit_columns)
      : forward_(forward), logit_columns_(logit_columns) {}

  // One validated step, from its tokens to its logits and drawn tokens in host memory.
  absl::Status Run(const ForwardBatch& batch, const kernels::Exec& exec);

  int64_t num_graphs() const { return static_cast<int64_t>(graphs_.size()); }

 private:
  // What a step writes, in device memory.
  struct Results {
    kernels::MatrixView logits;
    int32_t* drawn = nullptr;  // [logit rows]; null: none are.
  };
  struct Graph {
    kernels::DeviceGraph graph;  // Empty after the first step of its shape.
    Results results;             // Where it writes them.
  };
  // Rows, most tokens of a sequence, patches, batch_invariant, has_draws.
  using GraphKey = std::tuple<int64_t, int64_t, uint64_t, bool, bool>;

  absl::Status Enqueue(const ForwardBatch& batch, const StepShape& shape, const kernels::Exec& exec,
                       const Results& results) const;
  // `results` become those of the graph.
  absl::Status RunGraph(const ForwardBatch& batch, const StepShape& shape,
                        const kernels::Exec& exec, Results* results);
  absl::Status CopyToHost(const ForwardBatch& batch, const Results& results, void* stream);
  absl::Status Wait(void* stream);

  const ModelForward* forward_;
  const int64_t logit_columns_;  // Rows of the head.
  StepStage stage_;
  kernels::PinnedBuffer drawn_;  // [logit rows], i32
  std::map<GraphKey, Graph> graphs_;
  kernels::DeviceEvent done_;
  bool has_event_ = false;
};

}  // namespace isthmus::model
