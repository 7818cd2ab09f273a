// SPDX-License-Identifier: Apache-2.0
#include "services/worker/call_checks.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/base/fault.h"
#include "services/base/reply_seed.h"
#include "services/base/request_limits.h"
#include "services/engine/sampler.h"
#include "services/rpc/identity.h"
#include "services/rpc/wire.h"

namespace isthmus::worker {
namespace {

constexpr size_t kTransferIdBytes = 16;
constexpr absl::Duration kMaxLease = absl::Hours(24);

// No vocabulary has such an id.
int32_t Clamped(uint32_t value) {
  return static_cast<int32_t>(std::min(value, uint32_t{INT32_MAX}));
}

}  // namespace

absl::Status CheckTransferId(const std::string& transfer_id) {
  if (transfer_id.size() == kTransferIdBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("transfer_id: has ", transfer_id.size(), " bytes, want ", kTransferIdBytes));
}

absl::Status CheckCacheSalt(const std::string& salt) {
  if (salt.size() <= kMaxCacheSaltBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("cache_salt: has ", salt.size(), " bytes, want at most ", kMaxCacheSaltBytes));
}

absl::Status CheckLease(const v1::KvReservation& reservation) {
  const absl::Duration lease = rpc::FromWire(reservation.lease());
  if (lease > absl::ZeroDuration() && lease <= kMaxLease) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "reservation.lease: is ", absl::FormatDuration(lease), ", want more than 0 and at most 24h"));
}

absl::StatusOr<std::vector<int32_t>> TokensOf(
    const google::protobuf::RepeatedField<uint32_t>& ids) {
  std::vector<int32_t> tokens;
  tokens.reserve(static_cast<size_t>(ids.size()));
  for (const uint32_t id : ids) {
    if (id > uint32_t{INT32_MAX}) {
      return absl::InvalidArgumentError(absl::StrCat("prompt_token_ids: no token has id ", id));
    }
    tokens.push_back(static_cast<int32_t>(id));
  }
  return tokens;
}

engine::SamplingParams SamplingOf(const v1::SamplingParams& params) {
  engine::SamplingParams sampling;
  sampling.temperature = static_cast<float>(params.temperature());
  sampling.top_p = params.has_top_p() ? static_cast<float>(params.top_p()) : 1.0f;
  sampling.top_k = Clamped(params.top_k());
  sampling.min_p = static_cast<float>(params.min_p());
  sampling.seed = params.seed();
  // One too many are as good as any number for being refused.
  const auto most = static_cast<uint32_t>(kMaxReplies) + 1;
  for (uint32_t i = 1; i < std::min(params.num_replies(), most); ++i) {
    sampling.further_seeds.push_back(ReplySeed(params.seed(), i));
  }
  if (params.has_repetition_penalty()) {
    sampling.repetition_penalty = static_cast<float>(params.repetition_penalty());
  }
  sampling.frequency_penalty = static_cast<float>(params.frequency_penalty());
  sampling.presence_penalty = static_cast<float>(params.presence_penalty());
  for (const auto& [id, bias] : params.logit_bias()) {
    sampling.logit_bias.push_back({Clamped(id), static_cast<float>(bias)});
  }
  for (const uint32_t id : params.banned_token_ids()) {
    sampling.banned_token_ids.push_back(Clamped(id));
  }
  for (const uint32_t id : params.stop_token_ids()) {
    sampling.stop_token_ids.push_back(Clamped(id));
  }
  sampling.min_tokens = params.min_output_tokens();
  sampling.ignores_end_token = params.ignores_end_token();
  if (params.has_top_logprobs()) sampling.top_logprobs = Clamped(params.top_logprobs());
  if (params.has_top_prompt_logprobs()) {
    sampling.top_prompt_logprobs = Clamped(params.top_prompt_logprobs());
  }
  sampling.wants_logits_digests = params.wants_logits_digests();
  return sampling;
}

void ToWire(const kernels::TokenLogprobs& logprobs, v1::TokenLogprobs* wire) {
  const auto set = [](const kernels::TokenLogprob& one, v1::TokenLogprob* to) {
    to->set_token_id(static_cast<uint32_t>(one.id));
    to->set_logprob(one.logprob);
  };
  set(logprobs.chosen, wire->mutable_chosen());
  wire->set_rank(static_cast<uint32_t>(logprobs.rank));
  for (const kernels::TokenLogprob& one : logprobs.top) set(one, wire->add_top());
}

kernels::TokenLogprobs FromWire(const v1::TokenLogprobs& wire) {
  const auto of = [](const v1::TokenLogprob& one) {
    return kernels::TokenLogprob{Clamped(one.token_id()), one.logprob()};
  };
  kernels::TokenLogprobs logprobs;
  logprobs.chosen = of(wire.chosen());
  logprobs.rank = wire.rank();
  for (const v1::TokenLogprob& one : wire.top()) logprobs.top.push_back(of(one));
  return logprobs;
}

absl::Status Draining() {
  return WithFaultScope(absl::UnavailableError("this worker is draining"), FaultScope::kPeer);
}

}  // namespace isthmus::worker
