// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/worker_client_in_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "services/base/fault.h"

namespace isthmus::rpc {
namespace {

using testing::ElementsAre;

constexpr absl::Duration kLong = absl::Seconds(20);

const CallOptions kPatient = {kLong, {}};

v1::ReserveCall ReserveOf(uint64_t num_prompt_tokens) {
  v1::ReserveCall call;
  call.set_num_prompt_tokens(num_prompt_tokens);
  return call;
}

// A server that reserves at once and prefills until it is cancelled.
class Pair {
 public:
  Pair() {
    methods.reserve = [this](const v1::ReserveCall& call, const ServedCall&) {
      ++num_reserved;
      v1::KvReservation reservation;
      reservation.set_held_tokens(call.num_prompt_tokens());
      return absl::StatusOr<v1::KvReservation>(reservation);
    };
    methods.prefill = [this](const v1::PrefillCall&,
                             const ServedCall& scope) -> absl::StatusOr<v1::PrefillReply> {
      is_running = true;
      while (!scope.is_cancelled()) RealClock().Sleep(absl::Milliseconds(1));
      was_cancelled = true;
      return WithFaultScope(absl::AbortedError("too late"), FaultScope::kDevice);
    };
    client = network.Connect("router", "worker");
  }
  void Serve() { server = network.Serve("worker", methods); }
  void AwaitRunning() const {
    while (!is_running) RealClock().Sleep(absl::Milliseconds(1));
  }

  InProcessNetwork network{{absl::Milliseconds(1), absl::Milliseconds(50)}, RealClock()};
  WorkerMethods methods;
  std::atomic<int> num_reserved = 0;
  std::atomic<bool> is_running = false;
  std::atomic<bool> was_cancelled = false;
  std::unique_ptr<WorkerClient> client;
  std::unique_ptr<InProcessServer> server;
};

void ExpectUnreachable(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
  EXPECT_EQ(status.message(), "worker: cannot be reached");
}

TEST(InProcessClientTest, ACallIsAnsweredAndErrorsCarryAddressAndScope) {
  Pair pair;
  pair.methods.handoff = [](const v1::HandoffCall&, const ServedCall&) {
    return absl::StatusOr<v1::HandoffReply>(
        WithFaultScope(absl::DataLossError("page 3"), FaultScope::kPeer));
  };
  pair.Serve();
  const auto reservation = pair.client->Reserve(ReserveOf(7), kPatient);
  ASSERT_TRUE(reservation.ok()) << reservation.status();
  EXPECT_EQ(reservation->held_tokens(), 7);
  const absl::Status status = pair.client->Handoff({}, kPatient).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "worker: page 3");
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
  EXPECT_EQ(pair.client->Describe(kPatient).status().code(), absl::StatusCode::kUnimplemented);
}

TEST(InProcessClientTest, NobodyThereIsUnavailableAtOnce) {
  Pair pair;
  ExpectUnreachable(pair.client->Reserve(ReserveOf(1), kPatient).status());
  pair.Serve();
  EXPECT_TRUE(pair.client->Reserve(ReserveOf(1), kPatient).ok());
  pair.server->Stop();
  ExpectUnreachable(pair.client->Reserve(ReserveOf(1), kPatient).status());
}

TEST(InProcessClientTest, ATimeoutAndACancellationReachTheServer) {
  for (const bool is_cancelled : {false, true}) {
    Pair pair;
    pair.Serve();
    CallOptions options = {absl::Milliseconds(20), [is_cancelled] { return is_cancelled; }};
    const absl::Status status = pair.client->Prefill({}, options).status();
    // The server may notice its deadline before we notice ours.
    if (!absl::IsAborted(status)) {
      EXPECT_EQ(status.code(),
                is_cancelled ? absl::StatusCode::kCancelled : absl::StatusCode::kDeadlineExceeded);
    }
    pair.server->Stop();
    EXPECT_EQ(pair.is_running, pair.was_cancelled);
  }
}

TEST(InProcessClientTest, AResetEndsCallsOnBothSides) {
  Pair pair;
  pair.Serve();
  Thread cutter(RealClock(), [&] {
    pair.AwaitRunning();
    pair.network.SetLink("router", "worker", LinkState::kReset);
  });
  ExpectUnreachable(pair.client->Prefill({}, kPatient).status());
  cutter.Join();
  ExpectUnreachable(pair.client->Reserve(ReserveOf(1), kPatient).status());
  pair.network.SetLink("router", "worker", LinkState::kUp);
  EXPECT_TRUE(pair.client->Reserve(ReserveOf(1), kPatient).ok());
  pair.server->Stop();
  EXPECT_TRUE(pair.was_cancelled);
}

TEST(InProcessClientTest, ASilentLinkDelaysOrBreaks) {
  Pair pair;
  pair.Serve();
  pair.network.SetLink("router", "worker", LinkState::kSilent);
  Thread mender(RealClock(), [&] {
    RealClock().Sleep(absl::Milliseconds(10));
    pair.network.SetLink("router", "worker", LinkState::kUp);
  });
  EXPECT_TRUE(pair.client->Reserve(ReserveOf(1), kPatient).ok());
  mender.Join();
  pair.network.SetLink("router", "worker", LinkState::kSilent);
  ExpectUnreachable(pair.client->Reserve(ReserveOf(1), kPatient).status());
}

TEST(InProcessClientTest, ALostAnswerIsUnavailableThoughTheCallWasServed) {
  Pair pair;
  pair.network.on_message = [](const InProcessMessage& message) {
    Passage passage;
    passage.breaks = message.is_answer;
    return passage;
  };
  pair.Serve();
  ExpectUnreachable(pair.client->Reserve(ReserveOf(1), kPatient).status());
  EXPECT_EQ(pair.num_reserved, 1);
}

TEST(InProcessClientTest, ARepeatedCallIsServedTwiceAndAnsweredOnce) {
  Pair pair;
  pair.network.on_message = [](const InProcessMessage& message) {
    Passage passage;
    if (!message.is_answer) passage.again_after = absl::Milliseconds(1);
    return passage;
  };
  pair.Serve();
  EXPECT_TRUE(pair.client->Reserve(ReserveOf(1), kPatient).ok());
  while (pair.num_reserved < 2) RealClock().Sleep(absl::Milliseconds(1));
  pair.server->Stop();
  EXPECT_EQ(pair.num_reserved, 2);
}

TEST(InProcessClientTest, AServerThatStopsEndsWhatItServes) {
  Pair pair;
  pair.Serve();
  Thread stopper(RealClock(), [&] {
    pair.AwaitRunning();
    pair.server->Stop();
    EXPECT_TRUE(pair.was_cancelled);
  });
  ExpectUnreachable(pair.client->Prefill({}, kPatient).status());
}

TEST(InProcessClientTest, AServerThatStopsWithGraceLetsCallsEnd) {
  Pair pair;
  pair.Serve();
  Thread stopper(RealClock(), [&] {
    pair.AwaitRunning();
    pair.server->Stop(kLong);
  });
  // Ends by its own deadline, and not by the server's end.
  const absl::Status status = pair.client->Prefill({}, {absl::Milliseconds(30), {}}).status();
  EXPECT_NE(status.code(), absl::StatusCode::kUnavailable) << status;
  ExpectUnreachable(pair.client->Reserve(ReserveOf(1), kPatient).status());
}

TEST(InProcessClientTest, TokensComeInOrderAndTheStreamEndsWithItsReader) {
  Pair pair;
  std::atomic<int> num_written = 0;
  pair.methods.tokens = [&](const v1::TokensHello&, const ServedCall&, const TokenSink& sink) {
    sink.open();
    v1::StepTokens step;
    v1::SequenceTokens* tokens = step.add_sequences();
    do {
      tokens->set_first_index(static_cast<uint64_t>(num_written++));
    } while (sink.write(step));
    return absl::UnavailableError("ends");
  };
  pair.Serve();
  std::vector<uint64_t> read;
  bool is_open = false;
  const CallOptions options = {kLong, [&] { return read.size() >= 3; }};
  const absl::Status status = pair.client->ReadTokens(
      {}, options, [&] { is_open = true; },
      [&](const v1::StepTokens& step) {
        EXPECT_TRUE(is_open);
        if (read.size() < 3) read.push_back(step.sequences(0).first_index());
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_THAT(read, ElementsAre(0, 1, 2));
  pair.server->Stop();
}

TEST(InProcessClientTest, AStreamThatDoesNotOpenTimesOut) {
  Pair pair;
  pair.methods.tokens = [](const v1::TokensHello&, const ServedCall& scope, const TokenSink&) {
    while (!scope.is_cancelled()) RealClock().Sleep(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  pair.Serve();
  const absl::Status status = pair.client->ReadTokens(
      {}, {absl::Milliseconds(10), {}}, [] { ADD_FAILURE() << "it opened"; },
      [](const v1::StepTokens&) { ADD_FAILURE() << "a token came"; });
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
}

}  // namespace
}  // namespace isthmus::rpc
