// SPDX-License-Identifier: Apache-2.0
// A prefill and a decode worker in one process, without gRPC: the bundled model, UCX over tcp.
#include "services/worker/worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "services/base/fault.h"
#include "services/rpc/identity.h"
#include "services/worker/decode_service.h"
#include "services/worker/page_groups.h"
#include "services/worker/prefill_service.h"
#include "services/worker/testing/worker_pair.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {
namespace {

using testing::HasSubstr;

constexpr uint64_t kRouter = 0x77;
constexpr uint32_t kPromptTokens = 300;
constexpr uint32_t kOutputTokens = 6;

WorkerConfig TinyConfig() {
  WorkerConfig config;
  config.checkpoint = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";
  config.cache_tokens = 4096;
  config.max_sequences = 3;
  config.threads = 1;
  config.quarantine_time = absl::Seconds(12);
  return config;
}

// Both workers with a token stream between decode and "the router".
class Workers {
 public:
  explicit Workers(const WorkerConfig& decode_config = TinyConfig()) {
    auto prefill_worker = Worker::Create(TinyConfig(), v1::WORKER_ROLE_PREFILL, RealClock());
    auto decode_worker = Worker::Create(decode_config, v1::WORKER_ROLE_DECODE, clock);
    EXPECT_TRUE(prefill_worker.ok()) << prefill_worker.status();
    EXPECT_TRUE(decode_worker.ok()) << decode_worker.status();
    prefill = *std::move(prefill_worker);
    decode = *std::move(decode_worker);
    prefill_service = std::make_unique<PrefillService>(prefill.get(), &metrics);
    decode_service = std::make_unique<DecodeService>(decode.get(), &metrics);
    v1::TokensHello hello;
    hello.set_router_incarnation(kRouter);
    hello.set_worker_incarnation(decode->card().incarnation());
    auto opened = decode_service->OpenStream(hello);
    EXPECT_TRUE(opened.ok()) << opened.status();
    tokens = *std::move(opened);
  }
  ~Workers() {
    decode->Stop();
    decode->pool().CheckConservation();
    prefill->pool().CheckConservation();
  }

  v1::ReserveCall ReserveCall() const {
    v1::ReserveCall call;
    call.set_transfer_id(transfer_id);
    call.set_request_id("r");
    call.set_num_prompt_tokens(kPromptTokens);
    *call.mutable_prompt_token_ids() = PrefillCall({}).prompt_token_ids();
    call.set_max_output_tokens(kOutputTokens);
    call.set_router_incarnation(kRouter);
    return call;
  }
  v1::PrefillCall PrefillCall(const v1::KvReservation& reservation) const {
    v1::PrefillCall call;
    call.set_request_id("r");
    for (uint32_t i = 0; i < kPromptTokens; ++i) call.add_prompt_token_ids(10 + (i * 37) % 1900);
    *call.mutable_reservation() = reservation;
    *call.mutable_target() = decode->card().transfer();
    return call;
  }
  absl::StatusOr<v1::KvHandoff> Prefill(const v1::PrefillCall& call) {
    absl::StatusOr<v1::PrefillReply> reply =
        prefill_service->Prefill(call, {absl::Now() + absl::Seconds(60), [] { return false; }});
    if (!reply.ok()) return reply.status();
    return std::move(*reply->mutable_handoff());
  }
  v1::HandoffCall HandoffCall(const v1::KvHandoff& handoff) const {
    v1::HandoffCall call;
    call.set_request_id("r");
    *call.mutable_handoff() = handoff;
    call.set_max_output_tokens(kOutputTokens);
    call.set_router_incarnation(kRouter);
    return call;
  }
  // Reserve and Prefill, which are expected to succeed.
  v1::KvHandoff ReserveAndPrefill() {
    const auto reservation = decode_service->Reserve(ReserveCall());
    EXPECT_TRUE(reservation.ok()) << reservation.status();
    const auto handoff = Prefill(PrefillCall(*reservation));
    EXPECT_TRUE(handoff.ok()) << handoff.status();
    return *handoff;
  }
  bool AllFree() const {
    const v1::WorkerLoad load = decode->load();
    return load.free_pages() == load.total_pages() &&
           load.free_state_slots() == load.total_state_slots();
  }

  // Stands still until a test moves it; absolute times are those of the machine.
  SimulatedClock clock{absl::Now()};
  rpc::MetricsExporter metrics{"test", kAllMetrics};
  const std::string transfer_id = rpc::NewTransferId();
  std::unique_ptr<Worker> prefill;
  std::unique_ptr<Worker> decode;
  std::unique_ptr<PrefillService> prefill_service;
  std::unique_ptr<DecodeService> decode_service;
  std::shared_ptr<TokenQueue> tokens;
};

TEST(WorkerTest, ASequenceCrossesOverAndEndsWithItsPagesFree) {
  Workers workers;
  const v1::KvHandoff handoff = workers.ReserveAndPrefill();
  EXPECT_GT(handoff.kv_bytes(), 0);
  EXPECT_EQ(handoff.sampler().num_draws(), 1);
  const auto reply = workers.decode_service->Handoff(workers.HandoffCall(handoff));
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->digests_verified(), static_cast<uint64_t>(handoff.digests_size()));
  uint64_t next_index = 1;
  v1::SequenceEnd end = v1::SEQUENCE_END_UNSPECIFIED;
  while (end == v1::SEQUENCE_END_UNSPECIFIED) {
    const auto tokens = workers.tokens->PopFor(absl::Seconds(60));
    ASSERT_TRUE(tokens.has_value());
    EXPECT_EQ(tokens->first_index(), next_index);
    next_index += static_cast<uint64_t>(tokens->token_ids_size());
    end = tokens->end();
  }
  EXPECT_NE(end, v1::SEQUENCE_END_FAILED);
  EXPECT_LE(next_index, kOutputTokens);
  EXPECT_TRUE(workers.AllFree());
  EXPECT_EQ(workers.decode_service->num_transfers(), 0);
}

TEST(WorkerTest, ACorruptByteIsFoundAndItsGroupNamed) {
  Workers workers;
  const size_t num_groups = static_cast<size_t>(workers.ReserveAndPrefill().digests_size());
  ASSERT_TRUE(
      workers.decode_service->Handoff(workers.HandoffCall(v1::KvHandoff())).status().code() ==
      absl::StatusCode::kAborted);
  for (size_t i = 0; i < num_groups; i += 3) {
    Workers fresh;
    const auto reservation = fresh.decode_service->Reserve(fresh.ReserveCall());
    ASSERT_TRUE(reservation.ok());
    const auto handoff = fresh.Prefill(fresh.PrefillCall(*reservation));
    ASSERT_TRUE(handoff.ok()) << handoff.status();
    const v1::PageGroupDigest& digest = handoff->digests(static_cast<int>(i));
    kv::CachePool& pool = fresh.decode->pool();
    const uint32_t kind = digest.cache_kind();
    if (kind < kernels::kNumPagedKinds) {
      const uint32_t page = reservation->pages(static_cast<int>(kind))
                                .pages(static_cast<int>(digest.page_index()))
                                .page();
      *pool.pages(static_cast<kernels::CacheKindIndex>(kind)).address(static_cast<int32_t>(page)) ^=
          std::byte{4};
    } else {
      pool.slots().address(static_cast<int32_t>(
          reservation->state().slot()))[pool.layout().kinds[kind].offset] ^= std::byte{4};
    }
    const absl::Status status = fresh.decode_service->Handoff(fresh.HandoffCall(*handoff)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("page group (kind " + std::to_string(kind) + ", page " +
                          std::to_string(digest.page_index())));
    EXPECT_EQ(fresh.decode_service->num_transfers(), 0);
  }
}

TEST(WorkerTest, ALeaseEndsAndItsPagesComeOutOfQuarantine) {
  Workers workers;
  const v1::KvHandoff handoff = workers.ReserveAndPrefill();
  EXPECT_FALSE(workers.AllFree());
  workers.clock.Sleep(absl::Minutes(3));
  workers.decode_service->Sweep();
  EXPECT_EQ(workers.decode_service->num_transfers(), 0);
  EXPECT_FALSE(workers.AllFree());  // A write might still land.
  const absl::Status late = workers.decode_service->Handoff(workers.HandoffCall(handoff)).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kAborted);
  workers.clock.Sleep(absl::Seconds(11));  // Longer than a push may take.
  workers.decode_service->Sweep();
  EXPECT_FALSE(workers.AllFree());
  workers.clock.Sleep(absl::Seconds(2));
  workers.decode_service->Sweep();
  EXPECT_TRUE(workers.AllFree());
}

TEST(WorkerTest, CallsMayBeRepeated) {
  Workers workers;
  const auto first = workers.decode_service->Reserve(workers.ReserveCall());
  const auto second = workers.decode_service->Reserve(workers.ReserveCall());
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(first->SerializeAsString(), second->SerializeAsString());
  v1::CancelCall cancel;
  cancel.set_transfer_id(workers.transfer_id);
  cancel.set_writer_is_done(true);
  EXPECT_TRUE(workers.decode_service->Cancel(cancel, absl::Seconds(10))->was_known());
  EXPECT_TRUE(workers.AllFree());
  EXPECT_FALSE(workers.decode_service->Cancel(cancel, absl::Seconds(10))->was_known());
}

TEST(WorkerTest, CancellingARunningSequenceFreesItBeforeTheAnswer) {
  Workers workers;
  v1::ReserveCall reserve = workers.ReserveCall();
  reserve.set_max_output_tokens(2000);
  const auto reservation = workers.decode_service->Reserve(reserve);
  ASSERT_TRUE(reservation.ok()) << reservation.status();
  v1::PrefillCall prefill = workers.PrefillCall(*reservation);
  prefill.mutable_sampler()->mutable_sampling()->set_temperature(2);
  const auto handoff = workers.Prefill(prefill);
  ASSERT_TRUE(handoff.ok()) << handoff.status();
  v1::HandoffCall call = workers.HandoffCall(*handoff);
  call.set_max_output_tokens(2000);
  ASSERT_TRUE(workers.decode_service->Handoff(call).ok());
  v1::CancelCall cancel;
  cancel.set_transfer_id(workers.transfer_id);
  const auto reply = workers.decode_service->Cancel(cancel, absl::Seconds(60));
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(workers.AllFree());
  EXPECT_EQ(workers.decode_service->num_transfers(), 0);
}

TEST(WorkerTest, TheEndOfARoutersStreamEndsItsTransfers) {
  Workers workers;
  ASSERT_TRUE(workers.decode_service->Reserve(workers.ReserveCall()).ok());
  workers.decode_service->CloseStream(kRouter, workers.tokens);
  EXPECT_EQ(workers.decode_service->num_transfers(), 0);
  v1::ReserveCall another = workers.ReserveCall();
  another.set_transfer_id(rpc::NewTransferId());
  EXPECT_EQ(workers.decode_service->Reserve(another).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(WorkerTest, RefusesWhatDoesNotFit) {
  Workers workers;
  v1::ReserveCall call = workers.ReserveCall();
  call.set_transfer_id("short");
  EXPECT_THAT(std::string(workers.decode_service->Reserve(call).status().message()),
              HasSubstr("transfer_id: has 5 bytes, want 16"));
  call = workers.ReserveCall();
  call.set_num_prompt_tokens(0);
  EXPECT_EQ(workers.decode_service->Reserve(call).status().code(),
            absl::StatusCode::kInvalidArgument);
  call.set_num_prompt_tokens(1 << 20);
  EXPECT_EQ(workers.decode_service->Reserve(call).status().code(),
            absl::StatusCode::kInvalidArgument);
  for (int i = 0; i < 3; ++i) {
    call = workers.ReserveCall();
    call.set_transfer_id(rpc::NewTransferId());
    EXPECT_TRUE(workers.decode_service->Reserve(call).ok());
  }
  call.set_transfer_id(rpc::NewTransferId());
  EXPECT_EQ(workers.decode_service->Reserve(call).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(WorkerTest, AWorkerAnswersForItsRoleAlone) {
  Workers workers;
  PrefillService wrong(workers.decode.get(), &workers.metrics);
  const absl::Status status =
      wrong.Prefill({}, {absl::Now() + absl::Seconds(1), [] { return false; }}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "this worker's role is decode, the call is for prefill");
}

TEST(WorkerTest, AnotherLayoutCostsNoPrefillAndNoByte) {
  WorkerConfig other = TinyConfig();
  other.page_tokens = 128;
  Workers workers(other);
  const auto reservation = workers.decode_service->Reserve(workers.ReserveCall());
  ASSERT_TRUE(reservation.ok());
  const absl::Status status = workers.Prefill(workers.PrefillCall(*reservation)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("kv layout differs"));
}

TEST(WorkerTest, NothingIsWrittenPastTheLease) {
  WorkerConfig hasty = TinyConfig();
  hasty.reservation_lease = absl::Nanoseconds(1);
  Workers workers(hasty);
  const auto reservation = workers.decode_service->Reserve(workers.ReserveCall());
  ASSERT_TRUE(reservation.ok()) << reservation.status();
  const absl::Status status = workers.Prefill(workers.PrefillCall(*reservation)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("reservation.lease: is 1ns"));
}

// Keys cross to the other worker as they are stored: the second time both have them already.
TEST(WorkerTest, ServesIndexKeysOfEveryFormat) {
  for (const char* format : {"fp4", "fp8", "bf16"}) {
    WorkerConfig config = TinyModelConfig();
    config.index_key_format = format;
    WorkerPair pair(config, config);
    EXPECT_EQ(pair.decode->card().values().index_key_format(), format);
    const TestReply reply = pair.Run(RequestOf(700, 6));
    EXPECT_EQ(reply.end, v1::SEQUENCE_END_LENGTH) << format << reply.error.DebugString();
    const TestReply again = pair.Run(RequestOf(700, 6));
    EXPECT_EQ(again.tokens, reply.tokens) << format;
    EXPECT_EQ(again.digests, reply.digests) << format;
  }
}

TEST(WorkerTest, IndexKeysInAnotherFormatAreRefusedBeforeTheFirstByte) {
  WorkerConfig fp8 = TinyModelConfig();
  fp8.index_key_format = "fp8";
  WorkerPair pair(fp8, TinyModelConfig());
  const TestRequest request = RequestOf(20);
  const auto reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok()) << reservation.status();
  const absl::Status status = pair.Prefill(request, *reservation).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  const auto layout = [](const Worker& worker) {
    return absl::StrFormat("%016x", worker.card().values().layout_fingerprint());
  };
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("kv layout differs"), HasSubstr(layout(*pair.prefill)),
                             HasSubstr(layout(*pair.decode))));
  EXPECT_EQ(pair.prefill->card().values().index_key_format(), "fp8");
  EXPECT_TRUE(
      pair.decode_service->Cancel(WorkerPair::CancelOf(request, true), absl::Seconds(1)).ok());
}

// Alone and among others, through both workers, with the bundled model: tokens and logits.
TEST(WorkerTest, ABatchOfEightChangesNoBit) {
  WorkerConfig config = TinyModelConfig();
  config.chunk_tokens = 48;
  config.max_batch_tokens = 96;
  WorkerPair pair(config, config);
  std::vector<TestRequest> requests;
  for (uint32_t i = 0; i < 8; ++i) {
    requests.push_back(RequestOf(1 + 37 * i, 10, 100 * i));
    requests.back().sampling.set_temperature(i % 2 == 0 ? 0.0 : 0.8);
    requests.back().sampling.set_seed(i);
  }
  std::vector<TestReply> alone;
  for (const TestRequest& request : requests) alone.push_back(pair.Run(request));
  for (TestRequest& request : requests) request.transfer_id = rpc::NewTransferId();
  std::vector<TestReply> together(requests.size());
  {
    std::vector<Thread> threads;
    for (size_t i = 0; i < requests.size(); ++i) {
      threads.emplace_back(RealClock(), [&, i] {
        const absl::StatusOr<TestReply> begun = pair.Begin(requests[i]);
        EXPECT_TRUE(begun.ok()) << begun.status();
        if (begun.ok()) together[i] = *begun;
      });
    }
  }
  const auto is_running = [](const TestReply& reply) {
    return reply.end == v1::SEQUENCE_END_UNSPECIFIED;
  };
  while (std::ranges::any_of(together, is_running)) {
    ASSERT_TRUE(WorkerPair::Read(*pair.tokens, requests, together));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(together[i].tokens, alone[i].tokens) << i;
    EXPECT_EQ(together[i].digests, alone[i].digests) << i;
    EXPECT_EQ(together[i].digests.size(), together[i].tokens.size()) << i;
    EXPECT_NE(together[i].digests[0], 0u) << i;
  }
}

TEST(WorkerTest, UnknownPatchesAndMissingCheckpointsAreNamed) {
  WorkerConfig config = TinyConfig();
  config.patches["no.such_patch"] = true;
  EXPECT_THAT(
      std::string(Worker::Create(config, v1::WORKER_ROLE_DECODE, RealClock()).status().message()),
      HasSubstr("no.such_patch"));
  config = TinyConfig();
  config.checkpoint = "/nonexistent";
  EXPECT_THAT(
      std::string(Worker::Create(config, v1::WORKER_ROLE_DECODE, RealClock()).status().message()),
      HasSubstr("/nonexistent"));
}

}  // namespace
}  // namespace isthmus::worker
