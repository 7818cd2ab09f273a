// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/router_client.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "proto/cluster.grpc.pb.h"
#include "proto/generate.grpc.pb.h"
#include "services/base/status_macros.h"
#include "services/rpc/channel.h"
#include "services/rpc/status.h"
#include "services/rpc/wire.h"

namespace isthmus::rpc {
namespace {

void SetTimeout(grpc::ClientContext& context, absl::Duration timeout) {
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
}

absl::StatusOr<Outcome> ReadReplies(grpc::ClientReader<v1::GenerateReply>& reader,
                                    const grpc::ClientContext& context, const std::string& address,
                                    uint32_t num_replies, const OnDelta& on_delta) {
  v1::GenerateReply event;
  Outcome outcome;
  bool has_finish = false;
  while (reader.Read(&event)) {
    if (event.has_finish()) {
      outcome.finish = event.finish();
      has_finish = true;
    } else if (event.has_reply_end()) {
      outcome.ends.push_back(event.reply_end());
    } else if (event.has_prompt_logprobs()) {
      for (const v1::TokenLogprobs& one : event.prompt_logprobs().tokens()) {
        outcome.prompt_logprobs.push_back(one);
      }
    } else {
      on_delta(event.delta());
    }
  }
  ISTHMUS_RETURN_IF_ERROR(FromGrpcStatus(reader.Finish(), context, address));
  std::ranges::sort(outcome.ends, {}, &v1::ReplyEnd::reply_index);
  const size_t wanted = std::max(1u, num_replies);
  if (!has_finish || outcome.ends.size() != wanted) {
    return absl::InternalError(absl::StrCat(address, ": the stream has ", has_finish ? "a" : "no",
                                            " finish and the ends of ", outcome.ends.size(),
                                            " replies, want ", wanted));
  }
  return outcome;
}

}  // namespace

v1::SamplingParams ToSamplingParams(const SamplingOptions& options) {
  v1::SamplingParams params;
  params.set_temperature(options.temperature);
  params.set_top_p(options.top_p);
  params.set_top_k(options.top_k);
  if (options.seed.has_value()) params.set_seed(*options.seed);
  params.set_max_output_tokens(options.max_tokens);
  return params;
}

absl::string_view FinishReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
      return "stop";
    case v1::FINISH_REASON_LENGTH:
      return "length";
    case v1::FINISH_REASON_TOOL_CALLS:
      return "tool_calls";
    default:
      return "";
  }
}

struct RouterClient::State {
  explicit State(const std::string& server)
      : address(server), channel(OpenChannel(server)), stub(v1::Generation::NewStub(channel)) {}
  const std::string address;
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::Generation::Stub> stub;
};

RouterClient::RouterClient(const std::string& address) : state_(new State(address)) {}

RouterClient::~RouterClient() = default;

absl::StatusOr<Outcome> RouterClient::Chat(const v1::ChatRequest& request, absl::Duration timeout,
                                           const OnDelta& on_delta) {
  grpc::ClientContext context;
  SetTimeout(context, timeout);
  const auto reader = state_->stub->Chat(&context, request);
  return ReadReplies(*reader, context, state_->address, request.sampling().num_replies(), on_delta);
}

absl::StatusOr<Outcome> RouterClient::Generate(const v1::GenerateRequest& request,
                                               absl::Duration timeout, const OnDelta& on_delta) {
  grpc::ClientContext context;
  SetTimeout(context, timeout);
  const auto reader = state_->stub->Generate(&context, request);
  return ReadReplies(*reader, context, state_->address, request.sampling().num_replies(), on_delta);
}

absl::StatusOr<v1::StatusReply> RouterClient::Status(absl::Duration timeout) {
  grpc::ClientContext context;
  SetTimeout(context, timeout);
  v1::StatusReply reply;
  const grpc::Status status = state_->stub->Status(&context, v1::StatusRequest(), &reply);
  ISTHMUS_RETURN_IF_ERROR(FromGrpcStatus(status, context, state_->address));
  return reply;
}

absl::StatusOr<v1::DrainReply> RouterClient::Drain(const std::string& worker,
                                                   const std::string& reason,
                                                   absl::Duration patience) {
  v1::DrainTarget target;
  target.set_address(worker);
  target.set_reason(reason);
  ToWire(patience, target.mutable_patience());
  v1::DrainReply reply;
  grpc::ClientContext context;
  // Whoever drains answers at the end of its patience; this is for the way.
  SetTimeout(context, patience + absl::Seconds(10));
  grpc::Status status = state_->stub->Drain(&context, target, &reply);
  if (status.error_code() != grpc::StatusCode::UNIMPLEMENTED || !worker.empty()) {
    ISTHMUS_RETURN_IF_ERROR(FromGrpcStatus(status, context, state_->address));
    return reply;
  }
  v1::DrainCall call;
  call.set_reason(reason);
  ToWire(patience, call.mutable_patience());
  grpc::ClientContext direct;
  SetTimeout(direct, patience + absl::Seconds(10));
  status = v1::Cluster::NewStub(state_->channel)->Drain(&direct, call, &reply);
  ISTHMUS_RETURN_IF_ERROR(FromGrpcStatus(status, direct, state_->address));
  return reply;
}

}  // namespace isthmus::rpc
