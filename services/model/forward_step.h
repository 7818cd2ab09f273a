// SPDX-License-Identifier: Apache-2.0
// Buffers of one forward pass, shared by the forward_*.cc files only. All matrices are f32 with
// contiguous rows, in the memory of exec.arch; those of a half layer live in `half` and are given
// back after it.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "kernels/core/workspace.h"
#include "services/base/check.h"
#include "services/model/forward.h"

namespace isthmus::model {

struct ModelForward::Step {
  Step(const ForwardBatch& step_batch, const StepInputs& step_inputs,
       const kernels::Exec& step_exec, int64_t hidden)
      : batch(step_batch),
        inputs(step_inputs),
        exec(step_exec),
        scope(step_exec.workspace),
        rows(step_inputs.rows),
        streams(Take(rows, kStreams * hidden)),
        x(Take(rows, hidden)),
        y(Take(rows, hidden)),
        post(Take(rows, kStreams)),
        comb(Take(rows, kStreams * kStreams)) {}

  static constexpr int64_t kStreams = 4;

  kernels::MatrixView Take(int64_t num_rows, int64_t cols) {
    return kernels::F32Matrix(scope.Take<float>(num_rows * cols), num_rows, cols);
  }

  // Hands a tensor to the tap, if there is one. `shape` defaults to [rows, cols].
  void Emit(int layer, absl::string_view name, const kernels::MatrixView& m,
            std::vector<int64_t> shape = {}) const {
    if (!has_tap()) return;
    if (shape.empty()) shape = {m.rows, m.cols};
    if (!kernels::IsDevice(exec.arch)) {
      batch.tap->on_tensor({layer, name, m.dtype, std::move(shape), m.data});
      return;
    }
    // A copy to pageable memory waits for the stream.
    std::vector<float> copy(static_cast<size_t>(m.rows * m.cols));
    ISTHMUS_CHECK(kernels::CopyToHost(copy.data(), m.data, m.rows * m.cols * 4, exec.stream).ok());
    batch.tap->on_tensor({layer, name, m.dtype, std::move(shape), copy.data()});
  }

  void Mark(absl::string_view operation) const {
    if (inputs.on_operation != nullptr) (*inputs.on_operation)(operation);
  }

  bool has_tap() const { return batch.tap != nullptr && batch.tap->on_tensor != nullptr; }

  // Compressed entries that the longest sequence of the batch has after this step, at most.
  int64_t MaxEntries(int64_t ratio) const { return inputs.max_tokens / ratio; }
  // Whether the queries of a layer choose among entries. A tap wants them in any case.
  bool Chooses(int64_t ratio) const { return ratio == 4 && (MaxEntries(4) > 0 || has_tap()); }

  const ForwardBatch& batch;
  const StepInputs& inputs;
  const kernels::Exec& exec;
  kernels::Workspace::Scope scope;
  const int64_t rows;

  kernels::MatrixView streams;  // [rows, 4 * hidden]
  kernels::MatrixView x;        // [rows, hidden], input of a half layer
  kernels::MatrixView y;        // [rows, hidden], its output
  kernels::MatrixView post;     // [rows, 4]
  kernels::MatrixView comb;     // [rows, 16]

  // Of the attention half.
  kernels::MatrixView query_latent;  // [rows, q_lora_rank], quantised when that is asked for
  kernels::MatrixView q;             // [rows, heads * head_dim]; later the attention output
  kernels::MatrixView kv;            // [rows, head_dim]
  kernels::MatrixView compressor_u;  // [rows, width], as compressor.h has it
  kernels::MatrixView compressor_g;
  kernels::MatrixView index_u;  // The same for index keys.
  kernels::MatrixView index_g;
  kernels::MatrixView index_q;        // [rows, index heads * index_head_dim]
  kernels::MatrixView index_weights;  // [rows, index heads]
  int32_t* selected = nullptr;        // [rows, max_selected]
  int64_t max_selected = 0;
};

}  // namespace isthmus::model
