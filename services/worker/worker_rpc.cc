// SPDX-License-Identifier: Apache-2.0
#include "services/worker/worker_rpc.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/cluster.grpc.pb.h"
#include "proto/worker.grpc.pb.h"
#include "services/base/log.h"
#include "services/rpc/status.h"
#include "services/rpc/timekeeper.h"
#include "services/rpc/wire.h"
#include "services/worker/worker_load.h"

namespace isthmus::worker {
namespace {

// How soon the thread of an idle token stream sees that its router is gone.
constexpr absl::Duration kStreamWait = absl::Milliseconds(100);
// Tokens of one stream go out once in token_gather_time on average, each time all that have come:
// at a thousand steps a second, a message and a wake-up of three processes for every token would
// cost more than decode has to spare. So many messages need not wait for it after a pause. The
// first token of a reply does not come this way, and the last one does not wait.
constexpr int kGatherBurst = 3;
// How soon a call that waits for the end of a drain sees that its caller is gone.
constexpr absl::Duration kDrainWait = absl::Milliseconds(200);
// Waits that nobody bounds.
constexpr absl::Duration kLongestCall = absl::Minutes(10);
// Sequences in one message at most.
constexpr int kMaxMerged = 1024;
// Threads for health checks, drains and whatever else is short.
constexpr int kSpareThreads = 16;
// Token streams beyond the most routers: of those that are refused or come back.
constexpr int kSpareStreams = 16;

absl::Duration TimeLeft(grpc::ServerContext* context) {
  return std::min(absl::FromChrono(context->deadline()) - absl::Now(), kLongestCall);
}

template <typename Reply>
grpc::Status Answer(absl::StatusOr<Reply> result, Reply* reply, grpc::ServerContext* context) {
  if (!result.ok()) return rpc::ToGrpcStatus(result.status(), context);
  *reply = *std::move(result);
  return grpc::Status::OK;
}

class PrefillRpc : public v1::PrefillService::Service {
 public:
  PrefillRpc(PrefillService* service, Clock* clock) : service_(service), clock_(clock) {}

  grpc::Status Prefill(grpc::ServerContext* context, const v1::PrefillCall* call,
                       v1::PrefillReply* reply) override {
    const absl::Duration left = absl::FromChrono(context->deadline()) - absl::Now();
    const CallScope scope = {clock_->Now() + left, [context] { return context->IsCancelled(); }};
    return Answer(service_->Prefill(*call, scope), reply, context);
  }
  grpc::Status Cancel(grpc::ServerContext* context, const v1::CancelCall* call,
                      v1::CancelReply* reply) override {
    return Answer(service_->Cancel(*call, TimeLeft(context)), reply, context);
  }

 private:
  PrefillService* const service_;
  Clock* const clock_;
};

class DecodeRpc : public v1::DecodeService::Service {
 public:
  DecodeRpc(DecodeService* service, absl::Duration gather_time)
      : service_(service), gather_time_(gather_time) {}

  grpc::Status Reserve(grpc::ServerContext* context, const v1::ReserveCall* call,
                       v1::KvReservation* reply) override {
    return Answer(service_->Reserve(*call), reply, context);
  }
  grpc::Status Handoff(grpc::ServerContext* context, const v1::HandoffCall* call,
                       v1::HandoffReply* reply) override {
    return Answer(service_->Handoff(*call), reply, context);
  }
  grpc::Status Cancel(grpc::ServerContext* context, const v1::CancelCall* call,
                      v1::CancelReply* reply) override {
    return Answer(service_->Cancel(*call, TimeLeft(context)), reply, context);
  }

  grpc::Status Tokens(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::StepTokens, v1::TokensControl>* stream) override {
    const OpenStream open(&num_streams_);
    // Streams that say nothing would take the threads of calls.
    const int most = static_cast<int>(TokenStreams::max_routers()) + kSpareStreams;
    if (open.count() > most) {
      const std::string text =
          absl::StrCat(open.count(), " token streams are open, want at most ", most);
      return rpc::ToGrpcStatus(absl::ResourceExhaustedError(text), context);
    }
    v1::TokensControl control;
    if (!rpc::ReadWithin(rpc::kOpeningPatience, &keeper_, context, stream, &control) ||
        !control.has_hello()) {
      return rpc::ToGrpcStatus(absl::InvalidArgumentError("hello: must open the stream"), context);
    }
    const auto queue = service_->OpenStream(control.hello());
    if (!queue.ok()) return rpc::ToGrpcStatus(queue.status(), context);
    stream->SendInitialMetadata();
    const uint64_t router = control.hello().router_incarnation();
    LogInfo("a router reads tokens", {{"router", absl::StrFormat("%016x", router)}});
    WriteTokens(context, **queue, stream);
    service_->CloseStream(router, *queue);
    LogInfo("a router's token stream has ended", {{"router", absl::StrFormat("%016x", router)}});
    return rpc::ToGrpcStatus(absl::UnavailableError("the token stream ends"), context);
  }

 private:
  class OpenStream {
   public:
    explicit OpenStream(std::atomic<int>* num_streams)
        : num_streams_(num_streams), count_(++*num_streams) {}
    ~OpenStream() { --*num_streams_; }
    OpenStream(const OpenStream&) = delete;
    OpenStream& operator=(const OpenStream&) = delete;

    // Of streams that were open when this one was, with it.
    int count() const { return count_; }

   private:
    std::atomic<int>* const num_streams_;
    const int count_;
  };

  void WriteTokens(grpc::ServerContext* context, TokenQueue& queue,
                   grpc::ServerReaderWriter<v1::StepTokens, v1::TokensControl>* stream) const {
    absl::Time next_at = absl::InfinitePast();
    uint64_t seen_ends = 0;
    while (!context->IsCancelled()) {
      std::optional<v1::SequenceTokens> tokens = queue.PopFor(kStreamWait);
      if (!tokens.has_value()) {
        if (queue.is_closed()) return;
        continue;
      }
      const absl::Duration pause = next_at - RealClock().Now();
      if (pause > absl::ZeroDuration()) queue.WaitForEnd(seen_ends, pause);
      seen_ends = queue.num_ends();
      v1::StepTokens step;
      while (tokens.has_value()) {
        *step.add_sequences() = *std::move(tokens);
        if (step.sequences_size() >= kMaxMerged) break;
        tokens = queue.PopFor(absl::ZeroDuration());
      }
      next_at = std::max(next_at, RealClock().Now() - kGatherBurst * gather_time_) + gather_time_;
      if (!stream->Write(step)) return;
    }
  }

  DecodeService* const service_;
  const absl::Duration gather_time_;
  std::atomic<int> num_streams_ = 0;
  rpc::Timekeeper keeper_;
};

}  // namespace

struct WorkerRpc::State : public v1::Cluster::Service {
  State(Worker* host, PrefillService* prefill_service, DecodeService* decode_service,
        class Drain* drain_state)
      : worker(host),
        prefill(prefill_service),
        decode(decode_service),
        drain(drain_state),
        prefill_rpc(prefill_service, &host->clock()),
        decode_rpc(decode_service, host->config().token_gather_time),
        card(host->card()) {}

  grpc::Status Describe(grpc::ServerContext*, const v1::DescribeRequest*,
                        v1::DescribeReply* reply) override {
    {
      MutexLock lock(mutex);
      *reply->mutable_card() = card;
    }
    *reply->mutable_load() = LoadOf(*worker, *prefill, *decode);
    reply->set_is_draining(drain->is_draining());
    return grpc::Status::OK;
  }

  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainCall* call,
                     v1::DrainReply* reply) override {
    drain->Begin(call->reason());
    const absl::Duration patience = std::min(rpc::FromWire(call->patience()), TimeLeft(context));
    const absl::Time end = worker->clock().Now() + patience;
    int64_t left = drain->num_left();
    while (left > 0 && worker->clock().Now() < end && !context->IsCancelled()) {
      left = drain->AwaitIdle(std::min(end - worker->clock().Now(), kDrainWait));
    }
    reply->set_transfers(static_cast<uint64_t>(left));
    return grpc::Status::OK;
  }

  Worker* const worker;
  PrefillService* const prefill;
  DecodeService* const decode;
  class Drain* const drain;
  PrefillRpc prefill_rpc;
  DecodeRpc decode_rpc;
  Mutex mutex;
  v1::WorkerCard card;  // Guarded by mutex.
};

WorkerRpc::WorkerRpc(Worker* worker, PrefillService* prefill, DecodeService* decode, Drain* drain)
    : state_(new State(worker, prefill, decode, drain)) {}

WorkerRpc::~WorkerRpc() = default;

std::vector<grpc::Service*> WorkerRpc::services() const {
  return {state_.get(), &state_->prefill_rpc, &state_->decode_rpc};
}

void WorkerRpc::SetAddress(const std::string& address) {
  MutexLock lock(state_->mutex);
  state_->card.set_address(address);
}

v1::WorkerCard WorkerRpc::card() const {
  MutexLock lock(state_->mutex);
  return state_->card;
}

int WorkerRpc::MaxThreads(const WorkerConfig& config) {
  // Each sequence and each waiting prompt may have a call and its Cancel; each router a stream.
  const int calls = 2 * (config.max_sequences + config.max_queued_sequences);
  const int streams = static_cast<int>(TokenStreams::max_routers()) + kSpareStreams;
  return calls + streams + kSpareThreads;
}

}  // namespace isthmus::worker
