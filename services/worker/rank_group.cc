// SPDX-License-Identifier: Apache-2.0
#include "services/worker/rank_group.h"

#include <algorithm>
#include <utility>

#include "services/base/log.h"
#include "services/base/status_macros.h"

namespace isthmus::worker {
namespace {

constexpr int64_t kMinSlotBytes = int64_t{1} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<RankGroup>> RankGroup::Create(const model::Weights& whole,
                                                             const RankGroupOptions& options,
                                                             ThreadPool* threads) {
  std::unique_ptr<RankGroup> group(new RankGroup(options));
  // Contexts first, so that a GPU that is not there is named before anything is uploaded.
  group->members_.resize(options.devices.size());
  for (size_t rank = 0; rank < options.devices.size(); ++rank) {
    ISTHMUS_ASSIGN_OR_RETURN(group->members_[rank].context,
                             model::DeviceContext::Open(options.devices[rank]));
  }
  ISTHMUS_RETURN_IF_ERROR(group->Connect(whole.config().hidden_size));
  for (size_t rank = 0; rank < options.devices.size(); ++rank) {
    ISTHMUS_RETURN_IF_ERROR(group->AddRank(whole, static_cast<int>(rank), threads));
  }
  ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(options.devices[0]));
  return group;
}

absl::Status RankGroup::Connect(int64_t hidden_size) {
  const auto ranks = static_cast<int>(options_.devices.size());
  // A decode step's sums go through in one piece, longer ones in several.
  const int64_t slot_bytes = std::max(kMinSlotBytes, 4 * options_.max_sequences * hidden_size);
  // Before the step's own limit, so that whoever waits in vain can still say for whom.
  ISTHMUS_ASSIGN_OR_RETURN(peers_,
                           kernels::PeerGroup::Create({.ranks = ranks,
                                                       .devices = options_.devices,
                                                       .slot_bytes = (slot_bytes + 255) / 256 * 256,
                                                       .timeout = options_.step_limit / 2}));
  if (!kernels::NcclGroup::IsBuiltIn() || !kernels::IsRealDevice()) return absl::OkStatus();
  ISTHMUS_ASSIGN_OR_RETURN(nccl_, kernels::NcclGroup::Create(options_.devices));
  for (int rank = 0; rank < ranks; ++rank) peers_->communicator(rank).nccl = nccl_->handle(rank);
  return absl::OkStatus();
}

absl::Status RankGroup::AddRank(const model::Weights& whole, int rank, ThreadPool* threads) {
  Member& member = members_[static_cast<size_t>(rank)];
  const auto ranks = static_cast<int>(members_.size());
  ISTHMUS_ASSIGN_OR_RETURN(const model::ShardPlan plan,
                           model::PlanShard(whole.config(), rank, ranks));
  member.vocabulary = plan.vocabulary;
  ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(member.context->device()));
  ISTHMUS_ASSIGN_OR_RETURN(member.weights, model::DeviceWeights::Upload(whole, &plan, threads));
  ISTHMUS_ASSIGN_OR_RETURN(
      member.forward, model::ModelForward::Create(member.weights->views(), options_.arithmetic,
                                                  options_.page_tokens, options_.index_key_format));
  LogInfo("a rank's weights are on its device", {{"rank", rank},
                                                 {"ranks", ranks},
                                                 {"device", member.context->device()},
                                                 {"name", member.context->properties().name},
                                                 {"bytes", member.weights->bytes()}});
  return absl::OkStatus();
}

std::vector<int> RankGroup::replicas() const {
  return {options_.devices.begin() + 1, options_.devices.end()};
}

std::unique_ptr<model::Forward> RankGroup::Join(kv::CachePool& pool, Clock& clock) {
  std::vector<engine::Rank> ranks(members_.size());
  for (size_t r = 0; r < members_.size(); ++r) {
    const int device = members_[r].context->device();
    const auto number = static_cast<int>(r);
    ranks[r].forward = members_[r].forward.get();
    ranks[r].vocabulary = members_[r].vocabulary;
    ranks[r].exec = members_[r].context->exec();
    ranks[r].exec.communicator = &peers_->communicator(number);
    ranks[r].caches = engine::CopiesOf(pool, number);
    ranks[r].on_start = [device] { return kernels::UseDevice(device); };
  }
  return std::make_unique<engine::RankForward>(
      std::move(ranks), clock, options_.step_limit,
      [this](const absl::Status& why) { EndStalled(why); });
}

// Kernels that wait over peer memory have their own limit and trap; NCCL's wait for ever.
void RankGroup::EndStalled(const absl::Status& why) {
  LogError("the ranks do not go on together",
           {{"status", why.ToString()}, {"peers", peers_->Fault().ToString()}});
  if (nccl_ != nullptr) nccl_->Abort();
}

}  // namespace isthmus::worker
