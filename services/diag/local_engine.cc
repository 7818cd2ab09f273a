// SPDX-License-Identifier: Apache-2.0
#include "services/diag/local_engine.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"

namespace isthmus::diag {

absl::StatusOr<std::unique_ptr<LocalEngine>> LocalEngine::Create(
    const LocalEngineOptions& options) {
  std::unique_ptr<LocalEngine> local(new LocalEngine());
  const int processors = static_cast<int>(std::thread::hardware_concurrency());
  local->threads_ = std::make_unique<ThreadPool>(
      options.threads > 0 ? options.threads : std::clamp(processors, 1, 64));
  local->cache_tokens_ = options.max_tokens;
  local->exec_.threads = local->threads_.get();
  local->exec_.workspace = &local->workspace_;
  model::WeightOptions weight_options;
  weight_options.index_topk = options.index_topk;
  ISTHMUS_ASSIGN_OR_RETURN(local->weights_, model::Weights::Load(options.checkpoint, weight_options,
                                                                 local->threads_.get()));
  ISTHMUS_ASSIGN_OR_RETURN(
      local->forward_,
      model::ModelForward::Create(local->weights_.get(), options.arithmetic, options.page_tokens));
  ISTHMUS_ASSIGN_OR_RETURN(
      local->pool_,
      kv::CachePool::Create(local->forward_->layout(), options.max_tokens, options.max_sequences));
  engine::EngineOptions engine_options;
  engine_options.chunk_tokens = options.chunk_tokens;
  engine_options.eos_token_id = local->weights_->config().eos_token_id;
  local->engine_ = std::make_unique<engine::Engine>(local->forward_.get(), local->pool_.get(),
                                                    engine_options, local->exec_);
  return local;
}

absl::StatusOr<kernels::Arithmetic> ParseArithmetic(const std::string& name) {
  if (name == "math") return kernels::Arithmetic::kMath;
  if (name == "reference") return kernels::Arithmetic::kReference;
  return absl::InvalidArgumentError(
      absl::StrCat("arithmetic is \"", name, "\", must be math or reference"));
}

}  // namespace isthmus::diag
