// SPDX-License-Identifier: Apache-2.0
// Runs cases whose answers are known: facts in the context that must come back (`turns`), and
// conversations with tools whose next message must be exact (`messages`, `tools`, `expect`).
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/diag/chat.h"

namespace isthmus::diag {

struct CaseResult {
  std::string id;
  bool passed = false;
  std::string reply;   // Of the first turn that failed, or of the last.
  int64_t tokens = 0;  // Prompt tokens of the last turn.
  double seconds = 0.0;
};

// InvalidArgument when a case has neither form.
absl::StatusOr<CaseResult> RunCase(const ChatBackend& chat,
                                   const nlohmann::ordered_json& test_case);

// The list of cases in a file.
absl::StatusOr<nlohmann::ordered_json> ReadCases(const std::string& path);

// [{"id", "passed", "reply", "tokens", "seconds"}, ...]
nlohmann::ordered_json ResultsJson(const std::vector<CaseResult>& results);

}  // namespace isthmus::diag
