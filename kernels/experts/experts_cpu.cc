// SPDX-License-Identifier: Apache-2.0
// The trusted CPU path, the one that serves. Tokens are grouped by expert; the products of all
// experts, routed and shared, run in one parallel loop over output panels, so that a decode step
// with one token and six experts still fills the threads. Experts without tokens are never touched.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/core/formats.h"
#include "kernels/core/gemm.h"
#include "kernels/core/quantise.h"
#include "kernels/core/scratch_count.h"
#include "kernels/core/workspace.h"
#include "kernels/experts/experts_rows.h"
#include "kernels/experts/experts_variants.h"

namespace isthmus::kernels {
namespace {

// Consecutive rows of the grouped batch that go through one expert.
struct ExpertGroup {
  const ExpertWeights* expert = nullptr;
  int64_t first = 0;
  int64_t count = 0;
  MatrixView x;  // Its inputs: gathered, or rows of the batch where they already lie together.
  float limit = 0.0f;
};

// The batch in the order of the experts; the shared expert's rows, one per token, come last.
struct GroupedBatch {
  int64_t rows = 0;  // tokens * k, and tokens more with a shared expert.
  int64_t num_groups = 0;
  ExpertGroup* groups = nullptr;
  int32_t* token = nullptr;    // [rows]
  int32_t* group = nullptr;    // [rows]
  float* weight = nullptr;     // [rows]
  int64_t* rows_of = nullptr;  // [tokens][k]: rows of a token in ascending expert id.
};

int64_t RowGrain(int64_t cols) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(cols, 1)); }

// A counting sort: stable, so rows of one expert stay in token order.
GroupedBatch GroupByExpert(const ExpertsArgs& args, Workspace::Scope& scope) {
  const int64_t tokens = args.x.rows;
  const int64_t routed = tokens * args.k;
  const auto num_experts = static_cast<int64_t>(args.experts.size());
  GroupedBatch batch;
  batch.rows = routed + (args.shared != nullptr ? tokens : 0);
  batch.groups = scope.Take<ExpertGroup>(std::min(num_experts, routed) + 1);
  batch.token = scope.Take<int32_t>(batch.rows);
  batch.group = scope.Take<int32_t>(batch.rows);
  batch.weight = scope.Take<float>(batch.rows);
  batch.rows_of = scope.Take<int64_t>(routed);

  auto* next = scope.Take<int64_t>(num_experts + 1);
  std::fill_n(next, num_experts + 1, 0);
  for (int64_t i = 0; i < routed; ++i) ++next[args.ids[i] + 1];
  for (int64_t e = 0; e < num_experts; ++e) {
    if (next[e + 1] > 0) {
      batch.groups[batch.num_groups++] = {&args.experts[static_cast<size_t>(e)], next[e],
                                          next[e + 1], MatrixView{}, args.limit};
    }
    next[e + 1] += next[e];
  }
  auto* filled = scope.Take<int64_t>(tokens);
  std::fill_n(filled, tokens, 0);
  for (int64_t i = 0; i < routed; ++i) {
    const int64_t row = next[args.ids[i]]++;
    batch.token[row] = static_cast<int32_t>(i / args.k);
    batch.weight[row] = args.weights[i];
  }
  // Rows ascend with the expert, so each token meets its experts in ascending order.
  for (int64_t row = 0; row < routed; ++row) {
    const int64_t t = batch.token[row];
    batch.rows_of[t * args.k + filled[t]++] = row;
  }
  if (args.shared != nullptr) {
    for (int64_t t = 0; t < tokens; ++t) {
      batch.token[routed + t] = static_cast<int32_t>(t);
      batch.weight[routed + t] = 1.0f;
    }
    if (tokens > 0) {
      batch.groups[batch.num_groups++] = {args.shared, routed, tokens, MatrixView{},
                                          args.shared_limit};
    }
  }
  for (int64_t i = 0; i < batch.num_groups; ++i) {
    std::fill_n(batch.group + batch.groups[i].first, batch.groups[i].count,
                static_cast<int32_t>(i));
  }
  return batch;
}

// Whether any of the experts that run quantises the input of its w1.
bool AnyQuantises(const ExpertsArgs& args, const GroupedBatch& batch) {
  return std::any_of(batch.groups, batch.groups + batch.num_groups, [&](const ExpertGroup& g) {
    return QuantisesInput(g.expert->w1, args.arithmetic) ||
           QuantisesInput(g.expert->w3, args.arithmetic);
  });
}

// x, quantised once for all experts where the arithmetic asks for it.
MatrixView QuantisedInput(const ExpertsArgs& args, const GroupedBatch& batch, const Exec& exec,
                          Workspace::Scope& scope) {
  if (!AnyQuantises(args, batch)) return args.x;
  const MatrixView& x = args.x;
  const MatrixView q = F32Matrix(scope.Take<float>(x.rows * x.cols), x.rows, x.cols);
  ParallelFor(exec, x.rows, RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      RoundTripFp8Row(x.f32(t), x.cols, kActivationGroup, q.f32(t));
    }
  });
  return q;
}

// Sets the inputs of every group. `gathered` has batch.rows rows.
void GatherInputs(const ExpertsArgs& args, const GroupedBatch& batch, const MatrixView& quantised,
                  const MatrixView& gathered, const Exec& exec) {
  const auto source = [&](const ExpertGroup& g) -> const MatrixView& {
    return QuantisesInput(g.expert->w1, args.arithmetic) ? quantised : args.x;
  };
  for (int64_t i = 0; i < batch.num_groups; ++i) {
    ExpertGroup& g = batch.groups[i];
    const int64_t token = batch.token[g.first];
    // Tokens ascend within a group; where none is left out they lie together already.
    const bool together = batch.token[g.first + g.count - 1] - token + 1 == g.count;
    g.x = together ? source(g).Rows(token, g.count) : gathered.Rows(g.first, g.count);
  }
  ParallelFor(exec, batch.rows, RowGrain(args.x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const ExpertGroup& g = batch.groups[batch.group[row]];
      float* out = gathered.f32(row);
      if (g.x.f32(row - g.first) != out) continue;
      std::memcpy(out, source(g).f32(batch.token[row]),
                  static_cast<size_t>(args.x.cols) * sizeof(float));
    }
  });
}

// gate = q(silu(gate) * up * weight), row by row.
void GateRows(const ExpertsArgs& args, const GroupedBatch& batch, const MatrixView& gate,
              const MatrixView& up, const Exec& exec) {
  const bool round = args.arithmetic == Arithmetic::kReference;
  ParallelFor(exec, batch.rows, RowGrain(4 * gate.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const ExpertGroup& g = batch.groups[batch.group[row]];
      const int64_t width = g.expert->w1.rows;
      float* h = gate.f32(row);
      GateRow(h, up.f32(row), width, g.limit, batch.weight[row], round);
      if (QuantisesInput(g.expert->w2, args.arithmetic)) {
        RoundTripFp8Row(h, width, kActivationGroup, h);
      }
    }
  });
}

void CombineRows(const ExpertsArgs& args, const GroupedBatch& batch, const MatrixView& y,
                 Workspace::Scope& scope, const Exec& exec) {
  const int64_t hidden = args.x.cols;
  const int64_t k = args.k;
  const bool round = args.arithmetic == Arithmetic::kReference;
  auto** rows = scope.Take<const float*>(args.x.rows * k);
  for (int64_t i = 0; i < args.x.rows * k; ++i) rows[i] = y.f32(batch.rows_of[i]);
  ParallelFor(exec, args.x.rows, RowGrain(hidden), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const float* shared = args.shared != nullptr ? y.f32(args.x.rows * k + t) : nullptr;
      float* routed = args.routed.data != nullptr ? args.routed.f32(t) : nullptr;
      CombineRow({rows + t * k, static_cast<size_t>(k)}, shared, hidden, round, routed,
                 args.out.f32(t));
    }
  });
}

// Scratch of `products` products per group, which share their inputs. Groups whose rows are packed
// (gemm.h) end in a tile that is not full: the more of them there are the more is taken, so here
// all tokens lie in as many as can be.
int64_t GemmBytes(const ExpertsSize& size, int64_t groups, int64_t inputs, int64_t products,
                  int threads) {
  const int64_t routed = size.tokens * size.k;
  const int64_t packed = std::min(size.num_experts, routed / (kFusedRows + 1));
  std::vector<GemmInput> all;
  for (int64_t i = 0; i < groups; ++i) {
    int64_t rows = 1;
    if (size.tokens > kFusedRows && i < packed) {
      rows = (routed + packed - 1) / packed + kMaxTileRows - 1;
    }
    if (size.has_shared && i == groups - 1) rows = size.tokens;
    for (int64_t p = 0; p < products; ++p) all.push_back({rows, inputs, p > 0});
  }
  return GemmScratchBytes(all, threads);
}

// Rows of the widest intermediate of the experts that run.
int64_t Intermediate(const GroupedBatch& batch) {
  int64_t widest = 0;
  for (int64_t i = 0; i < batch.num_groups; ++i) {
    widest = std::max(widest, batch.groups[i].expert->w1.rows);
  }
  return widest;
}

}  // namespace

int64_t ExpertsScratchBytes(const ExpertsSize& size, int threads) {
  const int64_t tokens = size.tokens;
  const int64_t routed = tokens * size.k;
  const int64_t rows = routed + (size.has_shared ? tokens : 0);
  const int64_t groups = std::min(size.num_experts, routed) + (size.has_shared ? 1 : 0);
  ScratchCount scratch;
  scratch.Take<ExpertGroup>(std::min(size.num_experts, routed) + 1);
  scratch.Take<int32_t>(rows);
  scratch.Take<int32_t>(rows);
  scratch.Take<float>(rows);
  scratch.Take<int64_t>(routed);
  scratch.Take<int64_t>(size.num_experts + 1);
  scratch.Take<int64_t>(tokens);
  scratch.Take<float>(rows * size.hidden);
  scratch.Take<float>(rows * size.intermediate);
  scratch.Take<float>(rows * size.intermediate);
  scratch.Take<GemmTask>(2 * groups);
  if (size.quantises) scratch.Take<float>(tokens * size.hidden);
  scratch.Lend(GemmBytes(size, groups, size.hidden, /*products=*/2, threads));
  scratch.Lend(GemmBytes(size, groups, size.intermediate, /*products=*/1, threads));
  scratch.Take<const float*>(routed);
  return scratch.peak_bytes();
}

absl::Status LaunchExpertsCpu(const ExpertsArgs& args, const Exec& exec) {
  Workspace::Scope scope(exec.workspace);
  const int64_t hidden = args.x.cols;
  const GroupedBatch batch = GroupByExpert(args, scope);
  const int64_t intermediate = Intermediate(batch);
  // Gathered inputs first, then the outputs of w2.
  const MatrixView y = F32Matrix(scope.Take<float>(batch.rows * hidden), batch.rows, hidden);
  const MatrixView gate =
      F32Matrix(scope.Take<float>(batch.rows * intermediate), batch.rows, intermediate);
  const MatrixView up =
      F32Matrix(scope.Take<float>(batch.rows * intermediate), batch.rows, intermediate);
  auto* tasks = scope.Take<GemmTask>(2 * batch.num_groups);

  GatherInputs(args, batch, QuantisedInput(args, batch, exec, scope), y, exec);
  for (int64_t i = 0; i < batch.num_groups; ++i) {
    const ExpertGroup& g = batch.groups[i];
    const int64_t width = g.expert->w1.rows;
    tasks[2 * i] = {g.x, g.expert->w1, gate.Rows(g.first, g.count).Columns(0, width)};
    tasks[2 * i + 1] = {g.x, g.expert->w3, up.Rows(g.first, g.count).Columns(0, width)};
  }
  GemmMany({tasks, static_cast<size_t>(2 * batch.num_groups)}, exec);
  GateRows(args, batch, gate, up, exec);
  for (int64_t i = 0; i < batch.num_groups; ++i) {
    const ExpertGroup& g = batch.groups[i];
    const MatrixView h = gate.Rows(g.first, g.count).Columns(0, g.expert->w1.rows);
    tasks[i] = {h, g.expert->w2, y.Rows(g.first, g.count)};
  }
  GemmMany({tasks, static_cast<size_t>(batch.num_groups)}, exec);
  CombineRows(args, batch, y, scope, exec);
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
