// SPDX-License-Identifier: Apache-2.0
// A whole engine in this process, for the tools and the tests: weights, forward pass, pools and
// threads, built in order and owned together.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/patch.h"
#include "services/base/thread_pool.h"
#include "services/engine/engine.h"
#include "services/kv/sequence_cache.h"
#include "services/model/device_context.h"
#include "services/model/device_weights.h"
#include "services/model/forward.h"
#include "services/model/weights.h"

namespace isthmus::diag {

struct LocalEngineOptions {
  std::string checkpoint;  // Directory.
  kernels::Arithmetic arithmetic = kernels::Arithmetic::kReference;
  std::optional<int64_t> index_topk;
  std::string index_key_format = "default";  // As ParseIndexKeyFormat.
  int64_t chunk_tokens = 512;
  int64_t max_tokens = 65536;  // Tokens that the cache has room for, of all sequences.
  int32_t max_sequences = 8;
  int page_tokens = 256;
  int64_t scratch_bytes = 0;            // Of steps on the CPU, reserved; they grow beyond it.
  int threads = 0;                      // 0: one per processor, at most 64.
  std::string device = "cpu";           // Or cuda:<number>.
  bool batch_invariant = false;         // A GPU's bits do not depend on what runs together.
  std::map<std::string, bool> patches;  // Switched on or off.
};

class LocalEngine {
 public:
  static absl::StatusOr<std::unique_ptr<LocalEngine>> Create(const LocalEngineOptions& options);

  const model::Weights& weights() const { return *weights_; }
  model::ModelForward& forward() { return *forward_; }
  // The GPU, or null.
  const model::DeviceContext* device() const { return device_.get(); }
  kv::CachePool& pool() { return *pool_; }
  engine::Engine& engine() { return *engine_; }
  int64_t cache_tokens() const { return cache_tokens_; }  // Of all sequences together.
  // Threads and scratch memory of this engine.
  const kernels::Exec& exec() const { return exec_; }

 private:
  LocalEngine() = default;
  absl::Status OpenDevice(int device);

  std::unique_ptr<ThreadPool> threads_;
  kernels::Workspace workspace_;
  kernels::Exec exec_;
  int64_t cache_tokens_ = 0;
  PatchSet patches_;
  std::unique_ptr<model::DeviceContext> device_;
  std::unique_ptr<model::Weights> weights_;
  std::unique_ptr<model::DeviceWeights> device_weights_;
  std::unique_ptr<model::ModelForward> forward_;
  std::unique_ptr<kv::CachePool> pool_;
  std::unique_ptr<engine::Engine> engine_;
};

// Adds "name=on", "name=off", and "all=on" or "all=off", each; InvalidArgument: another form.
absl::Status ParseSwitches(const std::vector<std::string>& words,
                           std::map<std::string, bool>* switches);

// As kernels::ParseIndexKeyFormat, with the option's name in the error.
absl::StatusOr<std::optional<kernels::EntryFormat>> KeyFormatOf(const std::string& name,
                                                                kernels::Arithmetic arithmetic);

// "math" or "reference"; InvalidArgument otherwise.
absl::StatusOr<kernels::Arithmetic> ParseArithmetic(const std::string& name);

}  // namespace isthmus::diag
