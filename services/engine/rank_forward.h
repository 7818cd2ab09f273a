// SPDX-License-Identifier: Apache-2.0
// The ranks of a tensor-parallel group behind one Forward: a thread per rank, each with its device,
// its share of the weights and its copy of the cache. The engine sees one model. The only threads
// of this folder, and whoever puts the process together makes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/core/exec.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/base/thread.h"
#include "services/kv/sequence_cache.h"
#include "services/model/forward.h"
#include "services/model/shard_plan.h"

namespace isthmus::engine {

// Cache memory that the engine's pools hold, and a rank's memory of the same size in which the same
// offset is the same page or state slot.
struct CacheCopy {
  const std::byte* whole = nullptr;
  int64_t bytes = 0;
  std::byte* copy = nullptr;
};

// The copies of one pool's pages and state slots in another of the same sizes.
std::vector<CacheCopy> CopiesOf(kv::CachePool& whole, kv::CachePool& copy);
// In the pool's own replicas; of rank 0, none.
std::vector<CacheCopy> CopiesOf(kv::CachePool& pool, int rank);

// One rank. The owner keeps everything alive.
struct Rank {
  model::Forward* forward = nullptr;  // Over the rank's share of the weights.
  kernels::Exec exec;                 // With the rank's communicator, stream and workspace.
  model::Range vocabulary;            // The columns of the logits that it computes.
  std::vector<CacheCopy> caches;      // Empty: it works in the engine's own memory.
  // Once, on the rank's thread, before its first step: makes its device the thread's.
  std::function<absl::Status()> on_start;
};

// The watchdog of the group as well. A step must end on every rank within a limit, and on every
// rank alike: a rank that hangs or fails alone leaves the others in an all-reduce that cannot end.
// Then `on_stall` runs, once; it must make every rank's step return (abort NCCL's communicators; a
// kernel that waits over peer memory has a deadline of its own and traps). The group is of no use
// any more: this and every later step fails with scope device, so that the process ends, its
// supervisor starts another and routers retry elsewhere. Ranks that do not return even then, for
// another limit, end the process at once: they hold memory of the caller.
class RankForward : public model::Forward {
 public:
  RankForward(std::vector<Rank> ranks, Clock& clock, absl::Duration step_limit,
              std::function<void(const absl::Status& why)> on_stall);
  // Waits for steps that are still running.
  ~RankForward() override;

  // Phase, patches and batch_invariant of `exec` go to every rank; the rest of it is each rank's
  // own. Taps see the tensors of rank 0. No rank draws tokens: each has columns of the logits.
  absl::Status Run(const model::ForwardBatch& batch, const kernels::Exec& exec) override;

  int64_t vocab_size() const override { return first().vocab_size(); }
  int64_t max_positions() const override { return first().max_positions(); }
  const kernels::KvLayout& layout() const override { return first().layout(); }

 private:
  struct RankStep;  // A batch as one rank sees it.
  struct End {
    bool has_come = false;
    absl::Status status;
  };

  const model::Forward& first() const { return *ranks_[0].forward; }
  void Serve(size_t rank);
  absl::Status RunRank(const Rank& rank, const model::ForwardBatch& batch,
                       const kernels::Exec& exec) const;
  // With mutex_ held: of the running step.
  bool HaveAllEnded() const;
  bool HasOneFailed() const;
  bool HaveAllEndedAlike() const;
  absl::Status WhyUnlike() const;

  const std::vector<Rank> ranks_;
  Clock& clock_;
  const absl::Duration step_limit_;
  const std::function<void(const absl::Status&)> on_stall_;

  Mutex mutex_;
  CondVar changed_;
  // Guarded by mutex_. The running step: the caller's, until all ranks have ended it.
  const model::ForwardBatch* batch_ = nullptr;
  const kernels::Exec* exec_ = nullptr;
  std::vector<End> ends_;  // By rank.
  uint64_t num_steps_ = 0;
  bool is_stopping_ = false;
  absl::Status broken_;

  std::vector<Thread> threads_;  // Last: they use all of the above.
};

}  // namespace isthmus::engine
