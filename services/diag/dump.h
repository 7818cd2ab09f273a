// SPDX-License-Identifier: Apache-2.0
// Every intermediate of a forward pass under the names of the golden files, for comparison with an
// independent implementation (golden/tiny-random-nvfp4/README.md).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/diag/local_engine.h"

namespace isthmus::diag {

enum class DumpSet : uint8_t {
  kGolden,  // prefill.* and decode.*
  kLayers,  // layers.ref
  kStages,  // stages.ref
  kCache,   // cache.ref: what the cache holds after the last token
};

// "golden", "layers", "stages" or "cache"; InvalidArgument otherwise.
absl::StatusOr<DumpSet> ParseDumpSet(const std::string& name);

struct DumpOptions {
  std::vector<int32_t> tokens;
  int64_t chunk_tokens = 0;   // 0: all tokens before the decoded ones in one step.
  int64_t decode_tokens = 0;  // The last so many are fed one at a time, and only their rows kept.
  DumpSet set = DumpSet::kGolden;
  // A safetensors file with layerN.streams [tokens, 4, hidden]: layer N + 1 starts from it.
  std::string input_streams;
};

// A tensor of a dump: f32, i32 or u8 values, rows in order of position.
struct DumpTensor {
  std::string dtype;  // "F32", "I32" or "U8"
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};
using Dump = std::map<std::string, DumpTensor>;

// Runs the tokens through `local` and collects the set. index_scores are padded with -infinity to
// the entries of the last row, topk with -1 to index_topk.
absl::StatusOr<Dump> RunDump(LocalEngine& local, const DumpOptions& options);

// Writes a dump; the file appears under its name only when complete.
absl::Status WriteDump(const std::string& path, const Dump& dump, const std::string& arithmetic);

// Token ids: decimal numbers separated by white space. InvalidArgument names the first that is not.
absl::StatusOr<std::vector<int32_t>> ReadTokenFile(const std::string& path);

}  // namespace isthmus::diag
