// SPDX-License-Identifier: Apache-2.0
// How decode steps of a local engine take to many sequences, and to long ones.
//
// Machines are shared and noisy. Sizes are measured by turns in each of several rounds, and a size
// is compared with the others of its own round; what is reported are medians over the rounds.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/diag/local_engine.h"

namespace isthmus::diag {

// The middle one of an odd number of values, the upper one of the two in the middle otherwise.
double Median(std::vector<double> values);

struct BatchBench {
  std::vector<int64_t> batches = {1, 2, 4, 8, 16, 32};
  int64_t context = 200;  // Prompt tokens of each sequence.
  int64_t steps = 24;     // In a row, of one size.
  int64_t rounds = 9;     // Measured; one more before them is not.
};

struct BatchPoint {
  int64_t batch = 0;
  std::vector<double> tokens_per_s;                 // One per round.
  std::vector<double> ratios;                       // To the first size, of the same round.
  std::map<std::string, double> operation_seconds;  // Of one step; medians over the rounds.
};

// Decode tokens per second of all sequences together. The engine needs room for the largest batch,
// each with context + all steps. InvalidArgument: a number that is not positive.
absl::StatusOr<std::vector<BatchPoint>> BenchBatches(LocalEngine& local, const BatchBench& bench);

// A sequence of `tokens` random prompt tokens (seeded by `seed`) whose first output token is there
// and whose reply goes on whatever it says.
absl::StatusOr<engine::Sequence> StartReply(LocalEngine& local, int64_t tokens, uint32_t seed,
                                            int64_t max_tokens);

// Seconds of each operation of one decode step of `sequences`, by its name in the forward pass
// ("indexer", "attention"), layers summed. The step has no effect: each token writes what the next
// real step writes. On the CPU only; Unimplemented otherwise.
absl::StatusOr<std::map<std::string, double>> TimeOperations(
    LocalEngine& local, std::span<engine::Sequence* const> sequences);

struct ContextBench {
  std::vector<int64_t> contexts = {1024, 4096, 16384, 65536};  // Ascending.
  int64_t steps = 8;                                           // In a row, of one context.
  int64_t rounds = 9;
};

struct ContextPoint {
  int64_t context = 0;
  std::vector<double> step_seconds;                 // Median of the steps, one per round.
  std::map<std::string, double> operation_seconds;  // Medians over the rounds.
};

// Decode steps of one sequence of each length, by turns. The engine needs room for all of them.
absl::StatusOr<std::vector<ContextPoint>> BenchContexts(LocalEngine& local,
                                                        const ContextBench& bench);

}  // namespace isthmus::diag
