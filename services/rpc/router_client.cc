// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/router_client.h"

#include <grpcpp/client_context.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "proto/generate.grpc.pb.h"
#include "services/base/status_macros.h"
#include "services/rpc/channel.h"
#include "services/rpc/status.h"

namespace isthmus::rpc {
namespace {

void SetTimeout(grpc::ClientContext& context, absl::Duration timeout) {
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
}

absl::StatusOr<v1::Finish> ReadReply(grpc::ClientReader<v1::GenerateReply>& reader,
                                     const grpc::ClientContext& context, const std::string& address,
                                     const OnDelta& on_delta) {
  v1::GenerateReply event;
  v1::Finish finish;
  bool has_finish = false;
  while (reader.Read(&event)) {
    if (event.has_finish()) {
      finish = event.finish();
      has_finish = true;
    } else {
      on_delta(event.delta());
    }
  }
  ISTHMUS_RETURN_IF_ERROR(FromGrpcStatus(reader.Finish(), context, address));
  if (!has_finish) return absl::InternalError(absl::StrCat(address, ": the reply has no end"));
  return finish;
}

}  // namespace

struct RouterClient::State {
  std::string address;
  std::unique_ptr<v1::Generation::Stub> stub;
};

RouterClient::RouterClient(const std::string& address)
    : state_(new State{address, v1::Generation::NewStub(OpenChannel(address))}) {}

RouterClient::~RouterClient() = default;

absl::StatusOr<v1::Finish> RouterClient::Chat(const v1::ChatRequest& request,
                                              absl::Duration timeout, const OnDelta& on_delta) {
  grpc::ClientContext context;
  SetTimeout(context, timeout);
  const auto reader = state_->stub->Chat(&context, request);
  return ReadReply(*reader, context, state_->address, on_delta);
}

absl::StatusOr<v1::Finish> RouterClient::Generate(const v1::GenerateRequest& request,
                                                  absl::Duration timeout, const OnDelta& on_delta) {
  grpc::ClientContext context;
  SetTimeout(context, timeout);
  const auto reader = state_->stub->Generate(&context, request);
  return ReadReply(*reader, context, state_->address, on_delta);
}

absl::StatusOr<v1::StatusReply> RouterClient::Status(absl::Duration timeout) {
  grpc::ClientContext context;
  SetTimeout(context, timeout);
  v1::StatusReply reply;
  const grpc::Status status = state_->stub->Status(&context, v1::StatusRequest(), &reply);
  ISTHMUS_RETURN_IF_ERROR(FromGrpcStatus(status, context, state_->address));
  return reply;
}

}  // namespace isthmus::rpc
