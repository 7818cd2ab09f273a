// SPDX-License-Identifier: Apache-2.0
// A prefill and a decode worker in one process with what a router would send them: the scripted
// model over a loopback network unless a test says otherwise.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvtransfer/transport_loopback.h"
#include "services/base/clock.h"
#include "services/base/thread.h"
#include "services/model/scripted_forward.h"
#include "services/rpc/identity.h"
#include "services/worker/decode_service.h"
#include "services/worker/prefill_service.h"
#include "services/worker/worker_load.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {

inline constexpr uint64_t kTestRouter = 0x77;

inline WorkerConfig ScriptedConfig() {
  WorkerConfig config;
  config.model_kind = "scripted";
  config.page_tokens = 128;
  config.cache_tokens = 64 * 128;
  config.max_sequences = 8;
  config.scripted_vocab_size = 256;
  config.scripted_max_positions = 8000;
  return config;
}

inline WorkerConfig TinyModelConfig() {
  WorkerConfig config;
  config.checkpoint = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";
  config.cache_tokens = 8192;
  config.max_sequences = 8;
  config.threads = 1;
  return config;
}

// One request as a router sees it.
struct TestRequest {
  std::vector<uint32_t> prompt;
  uint32_t max_output_tokens = 6;
  v1::SamplingParams sampling;
  std::string transfer_id = rpc::NewTransferId();
  uint64_t router = kTestRouter;
  std::string cache_salt = {};
  v1::Priority priority = v1::PRIORITY_UNSPECIFIED;
  std::string request_id = "r";
  uint64_t ask_id = 0;
};

inline TestRequest RequestOf(size_t num_tokens, uint32_t max_output_tokens = 6,
                             uint32_t first = 10) {
  TestRequest request;
  for (size_t i = 0; i < num_tokens; ++i) {
    request.prompt.push_back(2 + (first + static_cast<uint32_t>(i) * 37) % 250);
  }
  request.max_output_tokens = max_output_tokens;
  request.sampling.set_wants_logits_digests(true);
  return request;
}

// What came out of a sequence.
struct TestReply {
  std::vector<int32_t> tokens;
  std::vector<uint32_t> digests;
  v1::SequenceEnd end = v1::SEQUENCE_END_UNSPECIFIED;
  v1::WorkerError error;
  int num_messages = 0;
};

class WorkerPair {
 public:
  explicit WorkerPair(const WorkerConfig& prefill_config = ScriptedConfig(),
                      const WorkerConfig& decode_config = ScriptedConfig(),
                      Clock& clock = RealClock())
      : clock_(clock) {
    prefill = Assemble(prefill_config, v1::WORKER_ROLE_PREFILL, "prefill");
    decode = Assemble(decode_config, v1::WORKER_ROLE_DECODE, "decode");
    prefill_service = std::make_unique<PrefillService>(prefill.get(), &metrics);
    decode_service = std::make_unique<DecodeService>(decode.get(), &metrics);
    tokens = OpenStream(kTestRouter);
  }
  ~WorkerPair() {
    prefill->StopSteps();
    decode->StopSteps();
    decode_service->Stop();
    decode->pool().CheckConservation();
    prefill->pool().CheckConservation();
  }

  std::shared_ptr<TokenQueue> OpenStream(uint64_t router) {
    v1::TokensHello hello;
    hello.set_router_incarnation(router);
    hello.set_worker_incarnation(decode->card().incarnation());
    auto opened = decode_service->OpenStream(hello);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return *std::move(opened);
  }

  absl::StatusOr<v1::KvReservation> Reserve(const TestRequest& request) {
    v1::ReserveCall call;
    call.set_transfer_id(request.transfer_id);
    call.set_request_id(request.request_id);
    call.set_ask_id(request.ask_id);
    call.set_num_prompt_tokens(request.prompt.size());
    call.mutable_prompt_token_ids()->Add(request.prompt.begin(), request.prompt.end());
    call.set_cache_salt(request.cache_salt);
    call.set_max_output_tokens(request.max_output_tokens);
    call.set_router_incarnation(request.router);
    call.set_num_replies(request.sampling.num_replies());
    call.set_priority(request.priority);
    return decode_service->Reserve(call);
  }
  v1::PrefillCall PrefillCall(const TestRequest& request,
                              const v1::KvReservation& reservation) const {
    v1::PrefillCall call;
    call.set_request_id("r");
    call.mutable_prompt_token_ids()->Add(request.prompt.begin(), request.prompt.end());
    *call.mutable_sampler()->mutable_sampling() = request.sampling;
    call.set_cache_salt(request.cache_salt);
    *call.mutable_reservation() = reservation;
    *call.mutable_target() = decode->card().transfer();
    call.set_priority(request.priority);
    return call;
  }
  absl::StatusOr<v1::KvHandoff> Prefill(const TestRequest& request,
                                        const v1::KvReservation& reservation) {
    absl::StatusOr<v1::PrefillReply> reply = prefill_service->Prefill(
        PrefillCall(request, reservation), {clock_.Now() + absl::Seconds(60), {}});
    if (!reply.ok()) return reply.status();
    return std::move(*reply->mutable_handoff());
  }
  absl::StatusOr<v1::HandoffReply> Handoff(const TestRequest& request,
                                           const v1::KvHandoff& handoff) {
    v1::HandoffCall call;
    call.set_request_id("r");
    *call.mutable_handoff() = handoff;
    call.set_max_output_tokens(request.max_output_tokens);
    call.set_router_incarnation(request.router);
    return decode_service->Handoff(call);
  }
  static v1::CancelCall CancelOf(const TestRequest& request, bool writer_is_done) {
    v1::CancelCall call;
    call.set_transfer_id(request.transfer_id);
    call.set_request_id("r");
    call.set_reason("a test wants it");
    call.set_writer_is_done(writer_is_done);
    return call;
  }

  // Up to the running sequence; the first token and its digest.
  absl::StatusOr<TestReply> Begin(const TestRequest& request) {
    const absl::StatusOr<v1::KvReservation> reservation = Reserve(request);
    if (!reservation.ok()) return reservation.status();
    const absl::StatusOr<v1::KvHandoff> handoff = Prefill(request, *reservation);
    if (!handoff.ok()) return handoff.status();
    return BeginFrom(request, *handoff);
  }
  absl::StatusOr<TestReply> BeginFrom(const TestRequest& request, const v1::KvHandoff& handoff) {
    const absl::StatusOr<v1::HandoffReply> admitted = Handoff(request, handoff);
    if (!admitted.ok()) return admitted.status();
    TestReply reply;
    reply.tokens.push_back(static_cast<int32_t>(handoff.first_tokens(0).token_id()));
    reply.digests.push_back(handoff.first_tokens(0).logits_crc32c());
    return reply;
  }

  // Reads one message into the reply that it belongs to. False: none came.
  static bool Read(TokenQueue& queue, const std::vector<TestRequest>& requests,
                   std::vector<TestReply>& replies) {
    const std::optional<v1::SequenceTokens> message = queue.PopFor(absl::Seconds(60));
    if (!message.has_value()) return false;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (requests[i].transfer_id != message->transfer_id()) continue;
      TestReply& reply = replies[i];
      EXPECT_EQ(message->first_index(), reply.tokens.size());
      EXPECT_EQ(reply.end, v1::SEQUENCE_END_UNSPECIFIED);
      reply.tokens.insert(reply.tokens.end(), message->token_ids().begin(),
                          message->token_ids().end());
      reply.digests.insert(reply.digests.end(), message->logits_crc32c().begin(),
                           message->logits_crc32c().end());
      reply.end = message->end();
      reply.error = message->error();
      ++reply.num_messages;
    }
    return true;
  }

  // The whole reply of one request that runs alone.
  TestReply Run(const TestRequest& request) { return End(request, Begin(request)); }
  TestReply RunFrom(const TestRequest& request, const v1::KvHandoff& handoff) {
    return End(request, BeginFrom(request, handoff));
  }
  TestReply End(const TestRequest& request, absl::StatusOr<TestReply> begun) {
    EXPECT_TRUE(begun.ok()) << begun.status();
    if (!begun.ok()) return {};
    std::vector<TestReply> replies = {*std::move(begun)};
    while (replies[0].end == v1::SEQUENCE_END_UNSPECIFIED) {
      if (!Read(*tokens, {request}, replies)) break;
    }
    return replies[0];
  }

  // What the scripted model replies to a request.
  std::vector<int32_t> Expected(const TestRequest& request) const {
    const auto& forward = static_cast<const model::ScriptedForward&>(prefill->engine().forward());
    const std::vector<int32_t> prompt(request.prompt.begin(), request.prompt.end());
    return model::ScriptedReply(forward.options(), prompt, request.max_output_tokens);
  }

  static bool IsAllFree(const Worker& worker) {
    const v1::WorkerLoad load = worker.load();
    return load.free_pages() == load.total_pages() &&
           load.free_state_slots() == load.total_state_slots();
  }

  transfer::LoopbackNetwork network;
  rpc::MetricsExporter metrics{"test", kAllMetrics};
  std::unique_ptr<Worker> prefill;
  std::unique_ptr<Worker> decode;
  std::unique_ptr<PrefillService> prefill_service;
  std::unique_ptr<DecodeService> decode_service;
  std::shared_ptr<TokenQueue> tokens;

 private:
  std::unique_ptr<Worker> Assemble(const WorkerConfig& config, v1::WorkerRole role,
                                   const std::string& address) {
    WorkerParts parts;
    parts.transport = transfer::MakeLoopbackTransport(&network, address, clock_);
    auto worker = Worker::Assemble(config, role, std::move(parts), clock_);
    EXPECT_TRUE(worker.ok()) << worker.status();
    return *std::move(worker);
  }

  Clock& clock_;
};

// Asks again and again, for at most ten seconds.
template <typename Question>
bool ComesTrue(Question&& question) {
  const absl::Time end = RealClock().Now() + absl::Seconds(10);
  while (!question()) {
    if (RealClock().Now() > end) return false;
    RealClock().Sleep(absl::Milliseconds(1));
  }
  return true;
}

}  // namespace isthmus::worker
