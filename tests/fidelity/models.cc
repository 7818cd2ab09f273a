// SPDX-License-Identifier: Apache-2.0
#include "tests/fidelity/models.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/testing/inputs.h"
#include "services/base/status_macros.h"

namespace isthmus::fidelity {

std::string BundledPath(const std::string& relative) {
  return absl::StrCat(ISTHMUS_SOURCE_DIR, "/tests/golden/", relative);
}

absl::StatusOr<std::unique_ptr<diag::LocalEngine>> OpenEngine(const EngineChoice& choice) {
  diag::LocalEngineOptions options;
  options.checkpoint = choice.checkpoint;
  options.arithmetic = choice.arithmetic;
  options.threads = choice.threads;
  options.device = choice.device;
  options.batch_invariant = choice.batch_invariant;
  options.patches = choice.patches;
  options.max_tokens = 16384;
  options.index_key_format = choice.index_key_format;
  if (choice.index_topk > 0) options.index_topk = choice.index_topk;
  return diag::LocalEngine::Create(options);
}

absl::StatusOr<diag::Dump> DumpOf(const EngineChoice& engine, const std::vector<int32_t>& ids,
                                  const DumpChoice& choice) {
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<diag::LocalEngine> local, OpenEngine(engine));
  diag::DumpOptions options;
  options.tokens = ids;
  options.chunk_tokens = choice.chunk_tokens;
  options.decode_tokens = choice.decode_tokens;
  options.set = choice.set;
  options.input_streams = choice.input_streams;
  return diag::RunDump(*local, options);
}

std::vector<int32_t> SeededIds(uint64_t seed, int64_t size, int64_t vocabulary) {
  kernels::testing::Random random(seed);
  std::vector<int32_t> ids;
  ids.reserve(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) ids.push_back(static_cast<int32_t>(random.Below(vocabulary)));
  return ids;
}

}  // namespace isthmus::fidelity
