// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/status.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "services/base/fault.h"

namespace isthmus::rpc {
namespace {

constexpr char kScopeKey[] = "isthmus-fault-scope";
constexpr char kRoomKey[] = "isthmus-room-soon";
// Metadata of one call is limited to 8 KiB by default; a message is cut well below.
constexpr size_t kMaxMessageBytes = 4096;

absl::Status WithNamedScope(absl::Status status, absl::string_view name) {
  for (const FaultScope scope :
       {FaultScope::kRequest, FaultScope::kPeer, FaultScope::kDevice, FaultScope::kProcess}) {
    if (name == FaultScopeName(scope)) return WithFaultScope(std::move(status), scope);
  }
  return status;
}

// Numbers outside the canonical codes come from a stranger.
absl::StatusCode CanonicalCode(int code) {
  return code >= 0 && code <= 16 ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown;
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status, grpc::ServerContextBase* context) {
  if (status.ok()) return grpc::Status::OK;
  context->AddTrailingMetadata(kScopeKey, std::string(FaultScopeName(FaultScopeOf(status))));
  if (HasRoomSoon(status)) context->AddTrailingMetadata(kRoomKey, "true");
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      std::string(status.message().substr(0, kMaxMessageBytes)));
}

absl::Status FromGrpcStatus(const grpc::Status& status, const grpc::ClientContext& context,
                            absl::string_view peer) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(CanonicalCode(status.error_code()),
                      absl::StrCat(peer, ": ", status.error_message()));
  const auto& metadata = context.GetServerTrailingMetadata();
  if (metadata.find(kRoomKey) != metadata.end()) result = WithRoomSoon(std::move(result));
  const auto found = metadata.find(kScopeKey);
  if (found != metadata.end()) {
    return WithNamedScope(std::move(result),
                          absl::string_view(found->second.data(), found->second.size()));
  }
  const bool is_gone = result.code() == absl::StatusCode::kUnavailable;
  return WithFaultScope(std::move(result), is_gone ? FaultScope::kPeer : FaultScope::kRequest);
}

v1::WorkerError ToWorkerError(const absl::Status& status) {
  v1::WorkerError error;
  error.set_code(static_cast<int>(status.code()));
  error.set_text(std::string(status.message().substr(0, kMaxMessageBytes)));
  error.set_fault_scope(std::string(FaultScopeName(FaultScopeOf(status))));
  return error;
}

absl::Status FromWorkerError(const v1::WorkerError& error) {
  return WithNamedScope(absl::Status(CanonicalCode(error.code()), error.text()),
                        error.fault_scope());
}

}  // namespace isthmus::rpc
