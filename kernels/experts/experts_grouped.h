// SPDX-License-Identifier: Apache-2.0
// What the kernels of experts.grouped_w4a8 and its kin hand to one another in device memory;
// internal to this folder.
//
// Every (token, expert) is a row. The rows of an expert lie together, in token order; the experts
// ascend; padding tokens have none. The shared expert's rows come last, one per token, at tokens *
// k. An expert with rows is a job, the shared one the first. A job's rows are multiplied in blocks
// of block_rows.
#pragma once

#include <cstdint>

#include "kernels/core/weight.h"
#include "kernels/experts/experts.h"

namespace isthmus::kernels::grouped {

inline constexpr int64_t kGroup = 128;   // Inputs under one scale of a quantised row.
inline constexpr int kMaxExperts = 512;  // A thread each in RouteAndQuantise.

// A tiled matrix.
struct JobWeight {
  const uint8_t* tiles;
  const uint8_t* scales;  // fp8 only: [blocks of rows][scale_columns]
  float factor;           // What its sums are multiplied with in the end.
  int32_t scale_columns;
  int32_t first_row;
  WeightFormat format;
};

struct Job {
  JobWeight w1, w3, w2;
  int32_t first_row;
  int32_t num_rows;
  float limit;
};

struct JobList {
  int32_t num_jobs;
  int32_t num_blocks;
  int32_t num_routed_rows;
  // Of a job, the blocks of the jobs before it.
  int32_t first_block[kMaxExperts + 2];
};

// How the rows of a product are quantised. kF16: as kE4m3, kept as the f16 of the values of the
// codes, for sm_90. kFp4: those of routed experts as NVFP4, of the shared one as kE4m3.
enum class RowKind : uint8_t { kF16, kE4m3, kFp4 };

// Rows as NVFP4 (kernels/core/nvfp4_rows.h), codes in the order of Fp4WordPlace.
struct Fp4Target {
  uint8_t* codes;     // [rows, inputs / 2]
  uint8_t* scales;    // [rows, inputs / 16]
  float* row_scales;  // [rows]
};

// Pointers to what one call works with. hidden, intermediate: multiples of kGroup.
struct Scratch {
  RowKind row_kind;
  JobList* list;
  Job* jobs;           // [experts + 1]
  int32_t* row_token;  // [rows]
  float* row_weight;   // [rows]
  int32_t* rows_of;    // [tokens, k]: a token's rows in ascending expert id; padding: -1
  uint8_t* x_codes;    // [tokens, hidden], in the order of CodePlace
  float* x_scales;     // [tokens, hidden / kGroup]
  uint16_t* h;         // [rows, intermediate], bf16
  uint8_t* h_codes;    // [rows, intermediate], in the order of CodePlace
  float* h_scales;     // [rows, intermediate / kGroup]
  uint16_t* y;         // [rows, hidden], bf16
  Fp4Target x_fp4;     // [tokens, hidden]; of kFp4 only, as the next
  Fp4Target h_fp4;     // [tokens * k, intermediate]
};

// The batch as the kernels see it.
struct Batch {
  const int32_t* ids;            // [tokens, k]
  const float* weights;          // [tokens, k]
  const ExpertWeights* experts;  // [num_experts]
  ExpertWeights shared;
  int32_t tokens;
  int32_t k;
  int32_t num_experts;
  int32_t hidden;
  int32_t intermediate;
  int32_t block_rows;
  float limit;
  float shared_limit;
  bool has_shared;
};

enum class ProductKind : uint8_t { kGate, kDown };

struct ProductArgs {
  Scratch scratch;
  int32_t inputs;      // K
  int32_t outputs;     // N
  int32_t block_rows;  // 8, 16 or 32.
  int32_t tokens;
  int32_t shared_cost;  // Of a unit of the shared expert, in units of the others.
  // The tiles of the shared expert: kGate fetches them ahead.
  const uint8_t* shared_tiles[3];
  int64_t shared_bytes[3];
};
// One of the two products: h from x_codes, y from h_codes.
using ProductLaunch = absl::Status (*)(const ProductArgs& args, const Exec& exec);

// All of a variant but its products.
absl::Status RunGrouped(const ExpertsArgs& args, const Exec& exec, RowKind row_kind,
                        ProductLaunch gate, ProductLaunch down);

// The list of jobs, the places of rows, and x quantised. x: [tokens, hidden], rows x_stride apart,
// aligned to 16 bytes. (grouped_rows.cu, as the next two.)
absl::Status LaunchRoute(const Batch& batch, const Scratch& scratch, const float* x,
                         int64_t x_stride, const Exec& exec);
// h_codes and h_scales from h; with kFp4 of the shared expert's rows alone.
absl::Status LaunchQuantiseHidden(const Batch& batch, const Scratch& scratch, const Exec& exec);
// out, and routed where it is not null, from y.
absl::Status LaunchCombine(const Batch& batch, const Scratch& scratch, float* routed,
                           int64_t routed_stride, float* out, int64_t out_stride, const Exec& exec);

// x_fp4 from x, and h_fp4 from h (grouped_rows_fp4.cu).
absl::Status LaunchQuantiseInputFp4(const Batch& batch, const Scratch& scratch, const float* x,
                                    int64_t x_stride, const Exec& exec);
absl::Status LaunchQuantiseHiddenFp4(const Batch& batch, const Scratch& scratch, const Exec& exec);

}  // namespace isthmus::kernels::grouped
