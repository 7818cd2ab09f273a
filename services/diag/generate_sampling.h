// SPDX-License-Identifier: Apache-2.0
// The options of isthmus-diag generate that say how tokens are drawn and when a reply ends: those
// of isthmusctl, by the same names, for an engine in this process.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/sequence.h"

namespace CLI {  // NOLINT(readability-identifier-naming): the library's own name.
class App;
class Option;
}  // namespace CLI

namespace isthmus::diag {

// As on the command line.
struct GenerateSampling {
  engine::SamplingParams params;
  std::vector<std::string> logit_bias;  // "id=bias"
  std::vector<std::string> stops;
  bool keeps_stop = false;
  int num_replies = 1;
  bool has_max_tokens = false;  // Given, not the default.
};

// Options that a restored sequence brings itself exclude `restore`.
void AddSamplingFlags(CLI::App* command, CLI::Option* restore, GenerateSampling& flags);

// Of reply number `reply`. InvalidArgument: a bias that is not "id=number". What the numbers may be
// is the engine's to say.
absl::StatusOr<engine::SamplingParams> ParamsOf(const GenerateSampling& flags, int reply);

}  // namespace isthmus::diag
