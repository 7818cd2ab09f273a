// SPDX-License-Identifier: Apache-2.0
// The random models of the ranks of a tensor-parallel group, one thread and one device each.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/all_reduce/nccl_group.h"
#include "kernels/core/peer_group.h"
#include "services/diag/random_model.h"

namespace isthmus::diag {

class RankModels {
 public:
  // `options` of rank 0. With communication when there are as many devices as ranks, or when they
  // are emulated; else one rank's share alone. `is_alone` asks for that.
  static absl::StatusOr<std::unique_ptr<RankModels>> Create(const RandomModelOptions& options,
                                                            bool is_alone);

  const RandomModel& first() const { return *models_[0]; }
  size_t size() const { return models_.size(); }
  bool has_communication() const { return group_ != nullptr; }
  bool has_nccl() const { return nccl_ != nullptr; }

  // Calls `body` for every rank, each on a thread of its own with the rank's device, and waits. The
  // first error that is not OK.
  absl::Status ForEach(const std::function<absl::Status(size_t rank, const RandomModel&)>& body);

 private:
  std::unique_ptr<kernels::PeerGroup> group_;
  std::unique_ptr<kernels::NcclGroup> nccl_;
  std::vector<std::unique_ptr<RandomModel>> models_;
};

}  // namespace isthmus::diag
