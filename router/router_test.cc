// SPDX-License-Identifier: Apache-2.0
// The router's steps without a network: accept, admission, place, relay, stream.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/time/clock.h"
#include "router/accept.h"
#include "router/admission.h"
#include "router/place.h"
#include "router/stream.h"
#include "router/token_relay.h"

namespace isthmus::router {
namespace {

using testing::HasSubstr;

const std::function<bool()> kStays = [] { return false; };

const Acceptor& TinyAcceptor() {
  static const std::unique_ptr<Acceptor> acceptor = [] {
    RouterConfig config;
    config.checkpoint = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";
    config.default_output_tokens = 50;
    auto created = Acceptor::Create(config);
    EXPECT_TRUE(created.ok()) << created.status();
    return *std::move(created);
  }();
  return *acceptor;
}

v1::ClusterValues Values() {
  v1::ClusterValues values;
  values.set_max_sequence_tokens(100);
  values.set_vocab_size(1920);
  values.set_end_token_id(1);
  return values;
}

absl::StatusOr<RoutedRequest> Accept(const v1::GenerateRequest& request,
                                     absl::Time client_deadline = absl::InfiniteFuture()) {
  return TinyAcceptor().AcceptGenerate(request, Values(), absl::UnixEpoch(), client_deadline);
}

v1::GenerateRequest Ids(int count) {
  v1::GenerateRequest request;
  for (int i = 0; i < count; ++i) request.mutable_token_ids()->add_ids(20);
  return request;
}

TEST(AcceptTest, FillsDefaultsAndBoundsTheReplyByTheModel) {
  const auto routed = Accept(Ids(10));
  ASSERT_TRUE(routed.ok()) << routed.status();
  EXPECT_EQ(routed->max_output_tokens, 50);
  EXPECT_EQ(routed->sampler.temperature(), 1.0);
  EXPECT_NE(routed->request_id, "");
  EXPECT_EQ(routed->deadline, absl::UnixEpoch() + absl::Minutes(10));
  EXPECT_EQ(Accept(Ids(90))->max_output_tokens, 10);
  EXPECT_EQ(Accept(Ids(99))->max_output_tokens, 1);
}

TEST(AcceptTest, AClientsEarlierDeadlineCounts) {
  const absl::Time early = absl::UnixEpoch() + absl::Seconds(3);
  EXPECT_EQ(Accept(Ids(1), early)->deadline, early);
}

TEST(AcceptTest, RefusesEveryBadFieldByName) {
  const auto expect = [](const v1::GenerateRequest& request, const std::string& text) {
    const absl::Status status = Accept(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  expect(Ids(0), "prompt: has no tokens");
  expect(Ids(100), "prompt: has 100 tokens, want at most 99");
  v1::GenerateRequest request = Ids(2);
  request.mutable_token_ids()->add_ids(1920);
  expect(request, "prompt: token 2 has id 1920, want below 1920");
  request = Ids(1);
  request.set_request_id("two words");
  expect(request, "request_id: has a byte that is not printable ASCII");
  request = Ids(1);
  request.mutable_sampling()->set_temperature(-0.5);
  expect(request, "sampling.temperature: is -0.5, want 0 to 2");
  request.mutable_sampling()->set_temperature(std::nan(""));
  expect(request, "sampling.temperature: is nan");
  request.mutable_sampling()->set_temperature(INFINITY);
  expect(request, "sampling.temperature: is inf");
  request = Ids(1);
  request.mutable_sampling()->set_top_p(1.5);
  expect(request, "sampling.top_p: is 1.5");
  request = Ids(1);
  request.mutable_sampling()->set_top_k(3000000000u);
  expect(request, "sampling.top_k");
  request = Ids(1);
  request.mutable_sampling()->set_max_output_tokens(0);
  expect(request, "sampling.max_output_tokens: is 0");
}

TEST(AcceptTest, EncodesAChat) {
  v1::ChatRequest request;
  request.set_conversation_json(R"({"messages": [{"role": "user", "content": "Hello."}]})");
  const auto routed =
      TinyAcceptor().AcceptChat(request, Values(), absl::UnixEpoch(), absl::InfiniteFuture());
  ASSERT_TRUE(routed.ok()) << routed.status();
  EXPECT_TRUE(routed->is_chat);
  EXPECT_EQ(TinyAcceptor().tokenizer().Decode(
                std::vector<int32_t>(routed->prompt.begin(), routed->prompt.end())),
            "<｜begin▁of▁sentence｜><｜User｜>Hello.<｜Assistant｜></think>");
}

TEST(AdmissionTest, AdmitsQueuesAndRefusesInThatOrder) {
  Admission admission(1, 1);
  const absl::Time later = absl::Now() + absl::Minutes(1);
  auto first = std::make_unique<absl::StatusOr<Admission::Place>>(admission.Enter(later, kStays));
  ASSERT_TRUE(first->ok());
  std::atomic<bool> is_in = false;
  std::thread waiter([&] {
    const auto second = admission.Enter(later, kStays);
    EXPECT_TRUE(second.ok()) << second.status();
    is_in = true;
  });
  while (admission.queued() == 0) absl::SleepFor(absl::Milliseconds(1));
  const absl::Status third = admission.Enter(later, kStays).status();
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(is_in);
  first.reset();
  waiter.join();
  EXPECT_TRUE(is_in);
  EXPECT_EQ(admission.active(), 0);
}

TEST(AdmissionTest, AWaitEndsWithItsClientOrItsDeadline) {
  Admission admission(1, 4);
  const auto first = admission.Enter(absl::InfiniteFuture(), kStays);
  EXPECT_EQ(admission.Enter(absl::InfiniteFuture(), [] { return true; }).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_EQ(admission.Enter(absl::Now() + absl::Milliseconds(5), kStays).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(admission.queued(), 0);
}

TEST(PlaceTest, NamesTheValueThatDiffersBothWays) {
  v1::WorkerCard prefill;
  prefill.mutable_values()->set_index_topk(64);
  prefill.mutable_values()->set_checkpoint_fingerprint(0xa);
  prefill.mutable_values()->set_arithmetic("math");
  v1::WorkerCard decode = prefill;
  EXPECT_TRUE(CheckPair(prefill, decode).ok());
  decode.mutable_values()->set_checkpoint_fingerprint(0xb);
  EXPECT_EQ(CheckPair(prefill, decode).message(),
            "checkpoint fingerprint differs: prefill worker's is 000000000000000a, decode "
            "worker's 000000000000000b");
  decode.mutable_values()->set_index_topk(4);
  EXPECT_EQ(CheckPair(prefill, decode).message(),
            "model.index_topk differs: prefill worker's is 64, decode worker's 4");
  decode = prefill;
  decode.mutable_values()->set_arithmetic("reference");
  EXPECT_EQ(CheckPair(prefill, decode).code(), absl::StatusCode::kFailedPrecondition);
  decode = prefill;
  decode.mutable_values()->set_layout_fingerprint(3);
  EXPECT_EQ(CheckPair(prefill, decode).code(), absl::StatusCode::kFailedPrecondition);
  decode = prefill;
  decode.set_protocol_version(9);
  EXPECT_EQ(CheckPair(prefill, decode).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(PlaceTest, WithoutWorkersSaysWhoIsMissing) {
  const absl::Status status = Place({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "usable workers: 0 for prefill, 0 for decode");
}

v1::StepTokens StepOf(const std::string& transfer_id, uint32_t token) {
  v1::StepTokens step;
  step.add_sequences()->set_transfer_id(transfer_id);
  step.mutable_sequences(0)->add_token_ids(token);
  return step;
}

TEST(TokenRelayTest, DeliversToSubscribersAndEndsThemAllWithTheStream) {
  TokenRelay relay;
  const auto a = relay.Subscribe("a");
  const auto b = relay.Subscribe("b");
  relay.Deliver(StepOf("a", 5));
  relay.Deliver(StepOf("nobody", 6));
  EXPECT_EQ(a->PopFor(absl::ZeroDuration())->token_ids(0), 5);
  EXPECT_EQ(b->size(), 0);
  relay.FailAll(absl::UnavailableError("gone"));
  const auto last = b->PopFor(absl::ZeroDuration());
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->end(), v1::SEQUENCE_END_FAILED);
  EXPECT_EQ(last->error().code(), static_cast<int>(absl::StatusCode::kUnavailable));
}

TEST(TokenRelayTest, ASlowReaderLosesItsQueueAndNobodyElseDoes) {
  TokenRelay relay;
  const auto slow = relay.Subscribe("slow");
  const auto quick = relay.Subscribe("quick");
  for (size_t i = 0; i <= slow->capacity(); ++i) relay.Deliver(StepOf("slow", 1));
  EXPECT_TRUE(slow->is_closed());
  relay.Deliver(StepOf("quick", 2));
  EXPECT_FALSE(quick->is_closed());
  EXPECT_EQ(quick->size(), 1);
}

// The deltas and the end of a reply that is `text`, token by token, then the end token.
struct Streamed {
  std::string content;
  std::string reasoning;
  v1::Finish finish;
};
Streamed StreamText(const std::string& text, bool is_chat, bool thinking) {
  RoutedRequest request;
  request.request_id = "r";
  request.prompt = {1, 2, 3};
  request.is_chat = is_chat;
  request.thinking = thinking;
  const text::Tokenizer& tokenizer = TinyAcceptor().tokenizer();
  ReplyStream stream(&tokenizer, request, 1);
  Streamed out;
  std::vector<int32_t> ids = *tokenizer.Encode(text);
  ids.push_back(1);
  const auto add = [&out](const v1::TokenDelta& delta) {
    out.content += delta.content();
    out.reasoning += delta.reasoning_content();
  };
  for (const int32_t id : ids) {
    google::protobuf::RepeatedField<uint32_t> one;
    one.Add(static_cast<uint32_t>(id));
    add(stream.Push(one));
  }
  add(stream.PushEnd());
  out.finish = stream.Finish(v1::SEQUENCE_END_STOP);
  EXPECT_EQ(out.finish.usage().output_tokens(), ids.size());
  return out;
}

TEST(ReplyStreamTest, PlainTextPassesAsItIs) {
  const Streamed out = StreamText("Grüße, 港!</think>", false, false);
  EXPECT_EQ(out.content, "Grüße, 港!</think>");
  EXPECT_EQ(out.finish.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(out.finish.message_json(), "");
}

TEST(ReplyStreamTest, AChatIsTakenApart) {
  const Streamed out = StreamText("It was noted.</think>The code is amber falcon.", true, true);
  EXPECT_EQ(out.reasoning, "It was noted.");
  EXPECT_EQ(out.content, "The code is amber falcon.");
  const auto message = nlohmann::json::parse(out.finish.message_json());
  EXPECT_EQ(message["content"], "The code is amber falcon.");
  EXPECT_EQ(message["reasoning_content"], "It was noted.");
  EXPECT_FALSE(message.contains("tool_calls"));
}

TEST(ReplyStreamTest, AToolCallChangesTheFinishReason) {
  const text::ToolCall call = {"get_weather", R"({"place": "Lisbon"})"};
  const Streamed out = StreamText("\n\n" + text::RenderToolCalls({call}), true, false);
  EXPECT_EQ(out.finish.finish_reason(), v1::FINISH_REASON_TOOL_CALLS);
  const auto message = nlohmann::json::parse(out.finish.message_json());
  ASSERT_EQ(message["tool_calls"].size(), 1);
  EXPECT_EQ(message["tool_calls"][0]["function"]["name"], "get_weather");
  EXPECT_EQ(nlohmann::json::parse(
                message["tool_calls"][0]["function"]["arguments"].get<std::string>())["place"],
            "Lisbon");
}

}  // namespace
}  // namespace isthmus::router
