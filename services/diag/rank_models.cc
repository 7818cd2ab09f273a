// SPDX-License-Identifier: Apache-2.0
#include "services/diag/rank_models.h"

#include <algorithm>
#include <numeric>

#include "services/base/clock.h"
#include "services/base/status_macros.h"
#include "services/base/thread.h"

namespace isthmus::diag {
namespace {

std::vector<int> DevicesOf(const RandomModelOptions& options) {
  std::vector<int> devices(static_cast<size_t>(options.ranks), options.device);
  if (kernels::IsRealDevice()) std::iota(devices.begin(), devices.end(), options.device);
  return devices;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankModels>> RankModels::Create(const RandomModelOptions& options,
                                                               bool is_alone) {
  std::unique_ptr<RankModels> out(new RankModels());
  const bool has_devices =
      !kernels::IsRealDevice() || options.device + options.ranks <= kernels::NumDevices();
  if (options.ranks == 1 || is_alone || !has_devices) {
    out->models_.resize(1);
    ISTHMUS_ASSIGN_OR_RETURN(out->models_[0], RandomModel::Create(options));
    return out;
  }
  const std::vector<int> devices = DevicesOf(options);
  const int64_t slot_bytes =
      std::max<int64_t>(int64_t{1} << 20, 4 * options.batch * options.config.hidden_size);
  ISTHMUS_ASSIGN_OR_RETURN(out->group_,
                           kernels::PeerGroup::Create({.ranks = options.ranks,
                                                       .devices = devices,
                                                       .slot_bytes = (slot_bytes + 255) / 256 * 256,
                                                       .timeout = absl::Seconds(30)}));
  if (kernels::NcclGroup::IsBuiltIn() && kernels::IsRealDevice()) {
    ISTHMUS_ASSIGN_OR_RETURN(out->nccl_, kernels::NcclGroup::Create(devices));
  }
  out->models_.resize(static_cast<size_t>(options.ranks));
  for (int r = 0; r < options.ranks; ++r) {
    kernels::Communicator& communicator = out->group_->communicator(r);
    if (out->nccl_ != nullptr) communicator.nccl = out->nccl_->handle(r);
    RandomModelOptions of_rank = options;
    of_rank.rank = r;
    of_rank.device = devices[static_cast<size_t>(r)];
    of_rank.communicator = &communicator;
    ISTHMUS_ASSIGN_OR_RETURN(out->models_[static_cast<size_t>(r)], RandomModel::Create(of_rank));
  }
  return out;
}

absl::Status RankModels::ForEach(
    const std::function<absl::Status(size_t rank, const RandomModel&)>& body) {
  std::vector<absl::Status> results(models_.size());
  {
    std::vector<Thread> threads;
    threads.reserve(models_.size());
    for (size_t r = 0; r < models_.size(); ++r) {
      threads.emplace_back(RealClock(), [&, r] {
        results[r] = kernels::UseDevice(models_[r]->device().device());
        if (results[r].ok()) results[r] = body(r, *models_[r]);
      });
    }
    for (Thread& thread : threads) thread.Join();
  }
  for (const absl::Status& result : results) ISTHMUS_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

}  // namespace isthmus::diag
