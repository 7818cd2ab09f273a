// SPDX-License-Identifier: Apache-2.0
#include <grpcpp/completion_queue.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/cluster.grpc.pb.h"
#include "proto/worker.grpc.pb.h"
#include "services/base/fault.h"
#include "services/rpc/channel.h"
#include "services/rpc/status.h"
#include "services/rpc/worker_client.h"

namespace isthmus::rpc {
namespace {

// How long a cancellation may go unnoticed: of a call, and of a stream that lives as long as both
// processes and must not keep an idle one awake.
constexpr std::chrono::milliseconds kPollInterval(10);
constexpr std::chrono::milliseconds kStreamPollInterval(100);

std::chrono::system_clock::time_point After(absl::Duration timeout) {
  return std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout);
}

// Waits for the next event of `queue`, cancelling the call when asked to. The wait is bounded by
// the call's own deadline, after which gRPC delivers the event. False: the event says "no more".
bool WaitForEvent(grpc::CompletionQueue& queue, grpc::ClientContext& context,
                  const std::function<bool()>& is_cancelled,
                  std::chrono::milliseconds poll_interval = kPollInterval) {
  void* tag = nullptr;
  bool ok = false;
  bool was_cancelled = false;
  while (true) {
    const auto outcome =
        queue.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + poll_interval);
    if (outcome == grpc::CompletionQueue::GOT_EVENT) return ok;
    if (outcome == grpc::CompletionQueue::SHUTDOWN) return false;
    if (!was_cancelled && is_cancelled && is_cancelled()) {
      context.TryCancel();
      was_cancelled = true;
    }
  }
}

void DrainQueue(grpc::CompletionQueue& queue) {
  queue.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue.Next(&tag, &ok)) {
  }
}

class GrpcWorkerClient : public WorkerClient {
 public:
  explicit GrpcWorkerClient(const std::string& address)
      : address_(address),
        channel_(OpenChannel(address)),
        cluster_(v1::Cluster::NewStub(channel_)),
        prefill_(v1::PrefillService::NewStub(channel_)),
        decode_(v1::DecodeService::NewStub(channel_)) {}

  const std::string& address() const override { return address_; }

  absl::StatusOr<v1::DescribeReply> Describe(const CallOptions& options) override {
    return Unary<v1::DescribeReply>(*cluster_, &v1::Cluster::Stub::AsyncDescribe,
                                    v1::DescribeRequest(), options);
  }
  absl::StatusOr<v1::KvReservation> Reserve(const v1::ReserveCall& call,
                                            const CallOptions& options) override {
    return Unary<v1::KvReservation>(*decode_, &v1::DecodeService::Stub::AsyncReserve, call,
                                    options);
  }
  absl::StatusOr<v1::PrefillReply> Prefill(const v1::PrefillCall& call,
                                           const CallOptions& options) override {
    return Unary<v1::PrefillReply>(*prefill_, &v1::PrefillService::Stub::AsyncPrefill, call,
                                   options);
  }
  absl::StatusOr<v1::CancelReply> CancelPrefill(const v1::CancelCall& call,
                                                const CallOptions& options) override {
    return Unary<v1::CancelReply>(*prefill_, &v1::PrefillService::Stub::AsyncCancel, call, options);
  }
  absl::StatusOr<v1::HandoffReply> Handoff(const v1::HandoffCall& call,
                                           const CallOptions& options) override {
    return Unary<v1::HandoffReply>(*decode_, &v1::DecodeService::Stub::AsyncHandoff, call, options);
  }
  absl::StatusOr<v1::CancelReply> CancelDecode(const v1::CancelCall& call,
                                               const CallOptions& options) override {
    return Unary<v1::CancelReply>(*decode_, &v1::DecodeService::Stub::AsyncCancel, call, options);
  }
  absl::StatusOr<v1::DrainReply> Drain(const v1::DrainCall& call,
                                       const CallOptions& options) override {
    return Unary<v1::DrainReply>(*cluster_, &v1::Cluster::Stub::AsyncDrain, call, options);
  }

  absl::Status ReadTokens(const v1::TokensHello& hello, const CallOptions& options,
                          absl::FunctionRef<void()> on_open,
                          absl::FunctionRef<void(const v1::StepTokens&)> on_step) override;

 private:
  template <typename Reply, typename Stub, typename Method, typename Request>
  absl::StatusOr<Reply> Unary(Stub& stub, Method method, const Request& request,
                              const CallOptions& options) {
    grpc::ClientContext context;
    context.set_deadline(After(options.timeout));
    grpc::CompletionQueue queue;
    Reply reply;
    grpc::Status status;
    auto reader = (stub.*method)(&context, request, &queue);
    reader->Finish(&reply, &status, &context);
    WaitForEvent(queue, context, options.is_cancelled);
    DrainQueue(queue);
    if (!status.ok()) return FromGrpcStatus(status, context, address_);
    return reply;
  }

  const std::string address_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Cluster::Stub> cluster_;
  const std::unique_ptr<v1::PrefillService::Stub> prefill_;
  const std::unique_ptr<v1::DecodeService::Stub> decode_;
};

absl::Status GrpcWorkerClient::ReadTokens(const v1::TokensHello& hello, const CallOptions& options,
                                          absl::FunctionRef<void()> on_open,
                                          absl::FunctionRef<void(const v1::StepTokens&)> on_step) {
  if (!channel_->WaitForConnected(After(options.timeout))) {
    return WithFaultScope(absl::UnavailableError(absl::StrCat(address_, ": no connection within ",
                                                              absl::FormatDuration(options.timeout),
                                                              " for the token stream")),
                          FaultScope::kPeer);
  }
  grpc::ClientContext context;  // No deadline: the stream lives as long as both processes.
  grpc::CompletionQueue queue;
  v1::TokensControl control;
  *control.mutable_hello() = hello;
  v1::StepTokens step;
  auto stream = decode_->AsyncTokens(&context, &queue, &context);
  bool goes_on = WaitForEvent(queue, context, options.is_cancelled);
  if (goes_on) {
    stream->Write(control, &context);
    goes_on = WaitForEvent(queue, context, options.is_cancelled);
  }
  // The worker sends its headers when it has registered the stream.
  if (goes_on) {
    stream->ReadInitialMetadata(&context);
    goes_on = WaitForEvent(queue, context, options.is_cancelled);
  }
  if (goes_on) on_open();
  while (goes_on) {
    stream->Read(&step, &context);
    goes_on = WaitForEvent(queue, context, options.is_cancelled, kStreamPollInterval);
    if (goes_on) on_step(step);
  }
  grpc::Status status;
  stream->Finish(&status, &context);
  WaitForEvent(queue, context, options.is_cancelled);
  DrainQueue(queue);
  if (status.ok()) {
    return WithFaultScope(absl::UnavailableError(absl::StrCat(address_, ": token stream ended")),
                          FaultScope::kPeer);
  }
  return FromGrpcStatus(status, context, address_);
}

}  // namespace

std::unique_ptr<WorkerClient> ConnectWorker(const std::string& address) {
  return std::make_unique<GrpcWorkerClient>(address);
}

}  // namespace isthmus::rpc
