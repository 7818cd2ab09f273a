// SPDX-License-Identifier: Apache-2.0
#include "services/model/device_steps.h"

#include <algorithm>
#include <bit>
#include <thread>
#include <utility>

#include "kernels/core/workspace.h"
#include "services/base/patch.h"
#include "services/base/status_macros.h"

namespace isthmus::model {
namespace {

// Decode batches beyond the largest bucket run without a graph.
constexpr int64_t kLargestBucket = 512;
// Below this, sequences share a graph: short ones cost little more than none.
constexpr int64_t kSmallestLengthClass = 1024;
// Shapes that are kept. A shape more drops all: steps of that many shapes are not steady.
constexpr size_t kMaxGraphs = 64;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
int64_t NextPowerOfTwo(int64_t value) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(value)));
}

bool IsDecode(const ForwardBatch& batch, const kernels::Exec& exec) {
  if (exec.phase != kPhaseDecode || batch.tap != nullptr) return false;
  const size_t rows = batch.tokens.size();
  return rows <= kLargestBucket && batch.sequences.size() == rows &&
         batch.logit_rows.size() == rows;
}

bool WantsDraws(const ForwardBatch& batch) {
  return std::ranges::any_of(batch.draws, [](const auto& draw) { return draw.has_value(); });
}

// As it is, or rounded up to what a graph serves.
StepShape ShapeOf(const ForwardBatch& batch, bool for_graph, bool has_draws) {
  StepShape shape = {.rows = static_cast<int64_t>(batch.tokens.size()),
                     .sequences = static_cast<int64_t>(batch.sequences.size()),
                     .logit_rows = static_cast<int64_t>(batch.logit_rows.size()),
                     .has_draws = has_draws};
  for (const kernels::SequenceKv& s : batch.sequences) {
    shape.max_rows_per_sequence = std::max(shape.max_rows_per_sequence, s.num_rows);
    shape.max_tokens = std::max(shape.max_tokens, s.start_position + s.num_rows);
  }
  if (for_graph) {
    shape.rows = shape.sequences = shape.logit_rows = NextPowerOfTwo(shape.rows);
    shape.max_tokens = std::max(NextPowerOfTwo(shape.max_tokens), kSmallestLengthClass);
  }
  return shape;
}

}  // namespace

StepStage::Offsets StepStage::PlaceParts(const ForwardBatch& batch, const StepShape& shape) {
  Offsets at;
  int64_t end = 0;
  const auto place = [&](int64_t bytes) {
    const int64_t offset = end;
    end = RoundUp(end + bytes, 16);
    return offset;
  };
  at.tokens = place(4 * shape.rows);
  at.row_sequence = place(4 * shape.rows);
  at.row_position = place(4 * shape.rows);
  at.logit_rows = place(4 * shape.logit_rows);
  at.positions = place(8 * shape.rows);
  if (shape.has_draws) {
    at.seed = place(8 * shape.logit_rows);
    at.counter = place(8 * shape.logit_rows);
    at.temperature = place(4 * shape.logit_rows);
    at.top_p = place(4 * shape.logit_rows);
    at.top_k = place(4 * shape.logit_rows);
    at.min_p = place(4 * shape.logit_rows);
  }
  at.sequences = place(static_cast<int64_t>(sizeof(kernels::DeviceSequence)) * shape.sequences);
  int64_t num_pages = 0;
  for (const kernels::SequenceKv& s : batch.sequences) {
    for (const auto& pages : s.pages) num_pages += static_cast<int64_t>(pages.size());
  }
  at.tables = place(8 * num_pages);
  at.end = end;
  return at;
}

absl::Status StepStage::Grow(int64_t bytes, bool* has_moved) {
  *has_moved = false;
  if (bytes <= device_.bytes()) return absl::OkStatus();
  const int64_t size = std::max<int64_t>(2 * bytes, 1 << 20);
  ISTHMUS_ASSIGN_OR_RETURN(host_, kernels::PinnedBuffer::Allocate(size));
  ISTHMUS_ASSIGN_OR_RETURN(device_, kernels::DeviceBuffer::Allocate(size));
  *has_moved = true;
  return absl::OkStatus();
}

void StepStage::WriteRows(const ForwardBatch& batch, const StepShape& shape) {
  const auto rows = static_cast<int64_t>(batch.tokens.size());
  auto* tokens = reinterpret_cast<int32_t*>(host_.data() + at_.tokens);
  auto* row_sequence = reinterpret_cast<int32_t*>(host_.data() + at_.row_sequence);
  auto* row_position = reinterpret_cast<int32_t*>(host_.data() + at_.row_position);
  auto* logit_rows = reinterpret_cast<int32_t*>(host_.data() + at_.logit_rows);
  auto* positions = reinterpret_cast<int64_t*>(host_.data() + at_.positions);
  std::copy_n(batch.tokens.data(), rows, tokens);
  int64_t t = 0;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const kernels::SequenceKv& s = batch.sequences[i];
    for (int64_t r = 0; r < s.num_rows; ++r, ++t) {
      row_sequence[t] = static_cast<int32_t>(i);
      row_position[t] = static_cast<int32_t>(s.start_position + r);
      positions[t] = s.start_position + r;
    }
  }
  for (; t < shape.rows; ++t) {
    tokens[t] = -1;
    row_sequence[t] = -1;
    row_position[t] = 0;
    positions[t] = 0;
  }
  const auto wanted = static_cast<int64_t>(batch.logit_rows.size());
  for (int64_t r = 0; r < shape.logit_rows; ++r) {
    logit_rows[r] =
        r < wanted ? static_cast<int32_t>(batch.logit_rows[static_cast<size_t>(r)]) : -1;
  }
}

void StepStage::WriteSequences(const ForwardBatch& batch, const StepShape& shape) {
  auto* sequences = reinterpret_cast<kernels::DeviceSequence*>(host_.data() + at_.sequences);
  auto* table = reinterpret_cast<std::byte**>(host_.data() + at_.tables);
  auto* device_table = reinterpret_cast<std::byte* const*>(device_.data() + at_.tables);
  for (int64_t i = 0; i < shape.sequences; ++i) {
    kernels::DeviceSequence to;
    if (i < static_cast<int64_t>(batch.sequences.size())) {
      const kernels::SequenceKv& from = batch.sequences[static_cast<size_t>(i)];
      to.first_row = static_cast<int32_t>(from.first_row);
      to.num_rows = static_cast<int32_t>(from.num_rows);
      to.start_position = static_cast<int32_t>(from.start_position);
      to.state = from.state;
      for (size_t kind = 0; kind < kernels::kNumPagedKinds; ++kind) {
        to.pages[kind] = device_table;
        table = std::copy(from.pages[kind].begin(), from.pages[kind].end(), table);
        device_table += from.pages[kind].size();
      }
    }
    sequences[i] = to;
  }
}

void StepStage::WriteDraws(const ForwardBatch& batch, const StepShape& shape) {
  auto* seed = reinterpret_cast<uint64_t*>(host_.data() + at_.seed);
  auto* counter = reinterpret_cast<uint64_t*>(host_.data() + at_.counter);
  auto* temperature = reinterpret_cast<float*>(host_.data() + at_.temperature);
  auto* top_p = reinterpret_cast<float*>(host_.data() + at_.top_p);
  auto* top_k = reinterpret_cast<int32_t*>(host_.data() + at_.top_k);
  auto* min_p = reinterpret_cast<float*>(host_.data() + at_.min_p);
  for (int64_t r = 0; r < shape.logit_rows; ++r) {
    const auto i = static_cast<size_t>(r);
    const RowDraw draw = i < batch.draws.size() ? batch.draws[i].value_or(RowDraw{}) : RowDraw{};
    seed[r] = draw.seed;
    counter[r] = draw.counter;
    temperature[r] = draw.temperature;
    top_p[r] = draw.top_p;
    top_k[r] = draw.top_k;
    min_p[r] = draw.min_p;
  }
}

absl::Status StepStage::Load(const ForwardBatch& batch, const StepShape& shape, void* stream,
                             bool* has_moved) {
  at_ = PlaceParts(batch, shape);
  ISTHMUS_RETURN_IF_ERROR(Grow(at_.end, has_moved));
  WriteRows(batch, shape);
  WriteSequences(batch, shape);
  if (shape.has_draws) WriteDraws(batch, shape);
  const std::byte* base = device_.data();
  tokens_ = reinterpret_cast<const int32_t*>(base + at_.tokens);
  positions_ = reinterpret_cast<const int64_t*>(base + at_.positions);
  logit_rows_ = reinterpret_cast<const int32_t*>(base + at_.logit_rows);
  batch_ = {.sequences = reinterpret_cast<const kernels::DeviceSequence*>(base + at_.sequences),
            .row_sequence = reinterpret_cast<const int32_t*>(base + at_.row_sequence),
            .row_position = reinterpret_cast<const int32_t*>(base + at_.row_position),
            .rows = shape.rows,
            .num_sequences = shape.sequences,
            .max_rows_per_sequence = shape.max_rows_per_sequence,
            .max_tokens = shape.max_tokens};
  draws_ = {};
  if (shape.has_draws) {
    draws_ = {.logits = {},
              .temperature = reinterpret_cast<const float*>(base + at_.temperature),
              .top_p = reinterpret_cast<const float*>(base + at_.top_p),
              .top_k = reinterpret_cast<const int32_t*>(base + at_.top_k),
              .min_p = reinterpret_cast<const float*>(base + at_.min_p),
              .seed = reinterpret_cast<const uint64_t*>(base + at_.seed),
              .counter = reinterpret_cast<const uint64_t*>(base + at_.counter)};
  }
  return kernels::CopyToDevice(device_.data(), host_.data(), at_.end, stream);
}

absl::Status DeviceSteps::Enqueue(const ForwardBatch& batch, const StepShape& shape,
                                  const kernels::Exec& exec, const Results& results) const {
  const kernels::DeviceBatch device_batch = stage_.device_batch();
  kernels::SamplingBatchArgs draws = stage_.draws();
  draws.logits = results.logits;
  draws.tokens = results.drawn;
  const ModelForward::StepInputs inputs = {
      .rows = shape.rows,
      .tokens = stage_.tokens(),
      .positions = {stage_.positions(), static_cast<size_t>(shape.rows)},
      .sequences = {},
      .device_batch = &device_batch,
      .max_tokens = shape.max_tokens,
      .logit_rows = {stage_.logit_rows(), static_cast<size_t>(shape.logit_rows)},
      .logits = results.logits,
      .draws = shape.has_draws ? &draws : nullptr};
  return forward_->Enqueue(batch, inputs, exec);
}

absl::Status DeviceSteps::RunGraph(const ForwardBatch& batch, const StepShape& shape,
                                   const kernels::Exec& exec, Results* results) {
  const uint64_t patches = exec.patches != nullptr ? exec.patches->OnBits() : ~uint64_t{0};
  const GraphKey key = {shape.rows, shape.max_tokens, patches, exec.batch_invariant,
                        shape.has_draws};
  const auto found = graphs_.find(key);
  if (found == graphs_.end()) {
    if (graphs_.size() >= kMaxGraphs) graphs_.clear();
    ISTHMUS_RETURN_IF_ERROR(Enqueue(batch, shape, exec, *results));
    graphs_[key] = {};
    return absl::OkStatus();
  }
  Graph& kept = found->second;
  if (kept.graph.is_empty()) {
    ISTHMUS_RETURN_IF_ERROR(kernels::DeviceGraph::BeginCapture(exec.stream));
    const absl::Status captured = Enqueue(batch, shape, exec, *results);
    absl::StatusOr<kernels::DeviceGraph> graph = kernels::DeviceGraph::EndCapture(exec.stream);
    ISTHMUS_RETURN_IF_ERROR(captured);
    ISTHMUS_RETURN_IF_ERROR(graph.status());
    kept.graph = *std::move(graph);
    kept.results = *results;
  }
  *results = kept.results;
  return kept.graph.Replay(exec.stream);
}

absl::Status DeviceSteps::Wait(void* stream) {
  if (!has_event_) {
    ISTHMUS_ASSIGN_OR_RETURN(done_, kernels::DeviceEvent::Create());
    has_event_ = true;
  }
  ISTHMUS_RETURN_IF_ERROR(done_.Record(stream));
  while (true) {
    ISTHMUS_ASSIGN_OR_RETURN(const bool has_passed, done_.HasPassed());
    if (has_passed) return absl::OkStatus();
    std::this_thread::yield();
  }
}

// The tokens that were drawn, and the logits of all other rows.
absl::Status DeviceSteps::CopyToHost(const ForwardBatch& batch, const Results& results,
                                     void* stream) {
  const auto wanted = static_cast<int64_t>(batch.logit_rows.size());
  const auto is_drawn = [&](int64_t r) {
    return results.drawn != nullptr && batch.draws[static_cast<size_t>(r)].has_value();
  };
  // One copy where rows lie together, as an engine has them.
  const bool lie_together = batch.logits.row_stride == logit_columns_;
  for (int64_t r = 0; r < wanted;) {
    int64_t end = r + 1;
    if (!is_drawn(r)) {
      while (lie_together && end < wanted && !is_drawn(end)) ++end;
      ISTHMUS_RETURN_IF_ERROR(kernels::CopyToHost(batch.logits.f32(r), results.logits.f32(r),
                                                  4 * (end - r) * logit_columns_, stream));
    }
    r = end;
  }
  if (results.drawn == nullptr) return absl::OkStatus();
  if (4 * wanted > drawn_.bytes()) {
    ISTHMUS_ASSIGN_OR_RETURN(drawn_, kernels::PinnedBuffer::Allocate(8 * wanted));
  }
  return kernels::CopyToHost(drawn_.data(), results.drawn, 4 * wanted, stream);
}

absl::Status DeviceSteps::Run(const ForwardBatch& batch, const kernels::Exec& exec) {
  const bool has_graph = IsDecode(batch, exec);
  const bool has_draws = WantsDraws(batch) && kernels::DrawsOnDevice(logit_columns_, exec);
  const StepShape shape = ShapeOf(batch, has_graph, has_draws);
  bool has_moved = false;
  ISTHMUS_RETURN_IF_ERROR(stage_.Load(batch, shape, exec.stream, &has_moved));
  if (has_moved) graphs_.clear();
  kernels::Workspace::Scope scope(exec.workspace);
  Results results;
  results.logits = kernels::F32Matrix(scope.Take<float>(shape.logit_rows * logit_columns_),
                                      shape.logit_rows, logit_columns_);
  if (has_draws) results.drawn = scope.Take<int32_t>(shape.logit_rows);
  ISTHMUS_RETURN_IF_ERROR(has_graph ? RunGraph(batch, shape, exec, &results)
                                    : Enqueue(batch, shape, exec, results));
  ISTHMUS_RETURN_IF_ERROR(CopyToHost(batch, results, exec.stream));
  ISTHMUS_RETURN_IF_ERROR(Wait(exec.stream));
  if (!has_draws) return absl::OkStatus();
  const auto* const drawn = drawn_.as<int32_t>();
  for (size_t r = 0; r < batch.draws.size(); ++r) {
    if (batch.draws[r].has_value()) batch.drawn[r] = drawn[r];
  }
  return absl::OkStatus();
}

}  // namespace isthmus::model
