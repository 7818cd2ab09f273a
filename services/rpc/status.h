// SPDX-License-Identifier: Apache-2.0
// A status on the wire: the canonical code and message as gRPC carries them, and the fault scope as
// trailing metadata, so that the caller knows what is spoiled and not only what happened.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "proto/worker.pb.h"

namespace isthmus::rpc {

// For the end of a server method. Adds the fault scope to `context` unless the status is OK.
grpc::Status ToGrpcStatus(const absl::Status& status, grpc::ServerContextBase* context);

// For the end of a call to `peer` (its address, which opens the message). Without a scope from the
// other side, UNAVAILABLE spoils the peer and everything else the request.
absl::Status FromGrpcStatus(const grpc::Status& status, const grpc::ClientContext& context,
                            absl::string_view peer);

// The same inside a message, for a sequence that fails while its stream goes on.
v1::WorkerError ToWorkerError(const absl::Status& status);
absl::Status FromWorkerError(const v1::WorkerError& error);

}  // namespace isthmus::rpc
