// SPDX-License-Identifier: Apache-2.0
// The GPUs of a tensor-parallel worker: a rank each, with its share of the weights, its replica of
// the cache and what it meets the others with. The engine sees one forward pass.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/all_reduce/nccl_group.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/peer_group.h"
#include "services/base/clock.h"
#include "services/base/thread_pool.h"
#include "services/engine/rank_forward.h"
#include "services/kv/sequence_cache.h"
#include "services/model/device_context.h"
#include "services/model/device_weights.h"
#include "services/model/forward.h"
#include "services/model/shard_plan.h"
#include "services/model/weights.h"

namespace isthmus::worker {

struct RankGroupOptions {
  std::vector<int> devices;  // Of each rank; a number twice only where GPUs are emulated.
  kernels::Arithmetic arithmetic = kernels::Arithmetic::kReference;
  int32_t page_tokens = 256;
  std::optional<kernels::EntryFormat> index_key_format;  // Unset: the arithmetic's.
  int64_t max_sequences = 1;
  // A step that takes longer is one that will not end (engine/rank_forward.h).
  absl::Duration step_limit = absl::Minutes(1);
};

class RankGroup {
 public:
  // Uploads every rank's share of `whole`, which is needed no longer afterwards, but for its
  // config. Leaves the calling thread on the device of rank 0. Errors: as of PlanShard, PeerGroup,
  // NcclGroup and DeviceWeights.
  static absl::StatusOr<std::unique_ptr<RankGroup>> Create(const model::Weights& whole,
                                                           const RankGroupOptions& options,
                                                           ThreadPool* threads);

  const kernels::KvLayout& layout() const { return members_[0].forward->layout(); }
  const model::DeviceContext& first() const { return *members_[0].context; }
  // The devices of all ranks but the first, for the cache.
  std::vector<int> replicas() const;

  // The ranks as one forward pass over the sequences of `pool`, which lies on the device of rank 0
  // and has replicas on the others. Called once; group and pool must outlive what it returns.
  std::unique_ptr<model::Forward> Join(kv::CachePool& pool, Clock& clock);

 private:
  struct Member {
    std::unique_ptr<model::DeviceContext> context;
    std::unique_ptr<model::DeviceWeights> weights;
    std::unique_ptr<model::ModelForward> forward;
    model::Range vocabulary;
  };

  explicit RankGroup(const RankGroupOptions& options) : options_(options) {}
  absl::Status Connect(int64_t hidden_size);
  absl::Status AddRank(const model::Weights& whole, int rank, ThreadPool* threads);
  void EndStalled(const absl::Status& why);

  const RankGroupOptions options_;
  std::unique_ptr<kernels::PeerGroup> peers_;
  std::unique_ptr<kernels::NcclGroup> nccl_;  // Null: built without it, or emulated.
  std::vector<Member> members_;               // By rank.
};

}  // namespace isthmus::worker
