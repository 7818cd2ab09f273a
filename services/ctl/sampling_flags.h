// SPDX-License-Identifier: Apache-2.0
// The options of isthmusctl that say how tokens are drawn and when a reply ends.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/request.pb.h"

namespace CLI {  // NOLINT(readability-identifier-naming): the library's own name.
class App;
}  // namespace CLI

namespace isthmus::ctl {

// As on the command line; what is absent is left to the router.
struct SamplingFlags {
  double temperature = 0;
  double top_p = 1;
  uint32_t top_k = 0;
  std::optional<double> min_p;
  std::optional<uint64_t> seed;
  uint32_t max_tokens = 256;
  std::optional<uint32_t> min_tokens;
  std::optional<double> repetition_penalty;
  std::optional<double> frequency_penalty;
  std::optional<double> presence_penalty;
  std::vector<std::string> logit_bias;  // "id=bias"
  std::vector<uint32_t> banned_tokens;
  std::vector<std::string> stops;
  std::vector<uint32_t> stop_tokens;
  bool keeps_stop = false;
  bool ignores_end = false;
  uint32_t num_replies = 1;
  std::optional<uint32_t> top_logprobs;
  std::optional<uint32_t> top_prompt_logprobs;
};

void AddSamplingFlags(CLI::App* command, SamplingFlags& flags);

// InvalidArgument: a bias that is not "id=number", or a token that has two.
absl::StatusOr<v1::SamplingParams> ParamsOf(const SamplingFlags& flags);

}  // namespace isthmus::ctl
