// SPDX-License-Identifier: Apache-2.0
// What a request and its reply are made of: accept and stream.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "router/accept.h"
#include "router/stream.h"

namespace isthmus::router {
namespace {

using testing::HasSubstr;

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
  request.set_priority(static_cast<v1::Priority>(7));
  expect(request, "priority: is 7, want 0 to 3");
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

TEST(AcceptTest, PassesOnThePriority) {
  v1::GenerateRequest request = Ids(1);
  EXPECT_EQ(Accept(request)->priority, Priority::kNormal);
  request.set_priority(v1::PRIORITY_HIGH);
  const Urgency urgency = Accept(request)->urgency();
  EXPECT_EQ(urgency.priority, Priority::kHigh);
  EXPECT_EQ(urgency.arrived, absl::UnixEpoch());
  EXPECT_EQ(urgency.deadline, absl::UnixEpoch() + absl::Minutes(10));
}

TEST(AcceptTest, PassesOnTheWishForDigests) {
  v1::GenerateRequest request = Ids(1);
  EXPECT_FALSE(Accept(request)->sampler.wants_logits_digests());
  request.mutable_sampling()->set_wants_logits_digests(true);
  EXPECT_TRUE(Accept(request)->sampler.wants_logits_digests());
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
    v1::SequenceTokens one;
    one.add_token_ids(static_cast<uint32_t>(id));
    add(stream.Push(one));
  }
  add(stream.PushEnd());
  out.finish = stream.Finish(v1::SEQUENCE_END_STOP);
  EXPECT_EQ(out.finish.usage().output_tokens(), ids.size());
  return out;
}

TEST(ReplyStreamTest, DigestsStayWithTheirTokens) {
  RoutedRequest request;
  request.prompt = {1};
  ReplyStream stream(&TinyAcceptor().tokenizer(), request, 1);
  v1::SequenceTokens tokens;
  tokens.add_token_ids(20);
  tokens.add_logits_crc32c(0xabcd);
  EXPECT_EQ(stream.Push(tokens).logits_crc32c(0), 0xabcd);
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
