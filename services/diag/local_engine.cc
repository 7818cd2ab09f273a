// SPDX-License-Identifier: Apache-2.0
#include "services/diag/local_engine.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/patches.h"
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
  local->workspace_.Reserve(options.scratch_bytes);
  local->exec_.workspace = &local->workspace_;
  ISTHMUS_ASSIGN_OR_RETURN(const int device, model::ParseDevice(options.device));
  model::WeightOptions weight_options;
  weight_options.index_topk = options.index_topk;
  if (device >= 0) weight_options.residency = model::WeightOptions::kMapped;
  ISTHMUS_ASSIGN_OR_RETURN(local->weights_, model::Weights::Load(options.checkpoint, weight_options,
                                                                 local->threads_.get()));
  model::ModelViews views = local->weights_->views();
  if (device >= 0) {
    ISTHMUS_RETURN_IF_ERROR(local->OpenDevice(device));
    views = local->device_weights_->views();
  }
  ISTHMUS_ASSIGN_OR_RETURN(local->patches_,
                           kernels::ResolvePatches(options.patches, options.batch_invariant));
  local->exec_.patches = &local->patches_;
  local->exec_.batch_invariant = options.batch_invariant;
  ISTHMUS_ASSIGN_OR_RETURN(const std::optional<kernels::EntryFormat> keys,
                           KeyFormatOf(options.index_key_format, options.arithmetic));
  ISTHMUS_ASSIGN_OR_RETURN(local->forward_, model::ModelForward::Create(views, options.arithmetic,
                                                                        options.page_tokens, keys));
  ISTHMUS_ASSIGN_OR_RETURN(local->pool_,
                           kv::CachePool::Create(local->forward_->layout(), options.max_tokens,
                                                 options.max_sequences, device));
  engine::EngineOptions engine_options;
  engine_options.chunk_tokens = options.chunk_tokens;
  engine_options.eos_token_id = local->weights_->config().eos_token_id;
  local->engine_ = std::make_unique<engine::Engine>(local->forward_.get(), local->pool_.get(),
                                                    engine_options, local->exec_);
  return local;
}

absl::Status LocalEngine::OpenDevice(int device) {
  ISTHMUS_ASSIGN_OR_RETURN(device_, model::DeviceContext::Open(device));
  ISTHMUS_ASSIGN_OR_RETURN(
      device_weights_, model::DeviceWeights::Upload(*weights_, /*plan=*/nullptr, threads_.get()));
  exec_ = device_->exec();
  exec_.threads = threads_.get();
  return absl::OkStatus();
}

absl::Status ParseSwitches(const std::vector<std::string>& words,
                           std::map<std::string, bool>* switches) {
  for (const std::string& word : words) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (parts.second != "on" && parts.second != "off") {
      return absl::InvalidArgumentError(
          absl::StrCat("patches: \"", word, "\" is not <name>=on or <name>=off"));
    }
    if (parts.first == "all") {
      for (const Patch* patch : kernels::AllPatches()) {
        (*switches)[std::string(patch->name)] = parts.second == "on";
      }
    } else {
      (*switches)[parts.first] = parts.second == "on";
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<kernels::EntryFormat>> KeyFormatOf(const std::string& name,
                                                                kernels::Arithmetic arithmetic) {
  auto format = kernels::ParseIndexKeyFormat(name, arithmetic);
  if (format.ok()) return format;
  return absl::InvalidArgumentError(absl::StrCat("index keys: ", format.status().message()));
}

absl::StatusOr<kernels::Arithmetic> ParseArithmetic(const std::string& name) {
  if (name == "math") return kernels::Arithmetic::kMath;
  if (name == "reference") return kernels::Arithmetic::kReference;
  return absl::InvalidArgumentError(
      absl::StrCat("arithmetic is \"", name, "\", must be math or reference"));
}

}  // namespace isthmus::diag
