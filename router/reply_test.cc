// SPDX-License-Identifier: Apache-2.0
// What a request and its reply are made of: accept and stream.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "router/accept.h"
#include "router/stream.h"
#include "services/base/reply_seed.h"
#include "services/text/utf8.h"

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
  EXPECT_EQ(routed->sampling.temperature(), 1.0);
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
  EXPECT_FALSE(Accept(request)->sampling.wants_logits_digests());
  request.mutable_sampling()->set_wants_logits_digests(true);
  EXPECT_TRUE(Accept(request)->sampling.wants_logits_digests());
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

RoutedRequest OneReply() {
  RoutedRequest request;
  request.request_id = "r";
  request.prompt = {1, 2, 3};
  request.sampling.set_num_replies(1);
  request.sampling.set_seed(7);
  return request;
}

// What the client has read of one reply.
struct Streamed {
  std::string content;
  std::string reasoning;
  std::vector<uint32_t> tokens;
  v1::ReplyEnd end;

  void Add(const v1::TokenDelta& delta) {
    content += delta.content();
    reasoning += delta.reasoning_content();
    tokens.insert(tokens.end(), delta.token_ids().begin(), delta.token_ids().end());
  }
};

// The ids in messages of `per_message`; the last one has the end.
Streamed StreamIds(const RoutedRequest& request, const std::vector<int32_t>& ids,
                   size_t per_message = 1, v1::SequenceEnd end = v1::SEQUENCE_END_STOP) {
  ReplyStream stream(&TinyAcceptor().tokenizer(), &request, 1, 0);
  Streamed out;
  for (size_t at = 0; at < ids.size() && !stream.has_stopped(); at += per_message) {
    v1::SequenceTokens tokens;
    for (size_t i = at; i < std::min(at + per_message, ids.size()); ++i) {
      tokens.add_token_ids(static_cast<uint32_t>(ids[i]));
    }
    out.Add(stream.Push(tokens));
  }
  out.Add(stream.PushEnd());
  out.end = stream.End(end);
  EXPECT_EQ(out.end.output_tokens(), out.tokens.size());
  return out;
}

// A reply that is `text`, token by token, then the end token.
Streamed StreamText(const std::string& text, bool is_chat, bool thinking) {
  RoutedRequest request = OneReply();
  request.is_chat = is_chat;
  request.thinking = thinking;
  std::vector<int32_t> ids = *TinyAcceptor().tokenizer().Encode(text);
  ids.push_back(1);
  return StreamIds(request, ids);
}

TEST(ReplyStreamTest, DigestsAndLogprobsStayWithTheirTokens) {
  RoutedRequest request = OneReply();
  ReplyStream stream(&TinyAcceptor().tokenizer(), &request, 1, 0);
  v1::SequenceTokens tokens;
  tokens.add_token_ids(20);
  tokens.add_logits_crc32c(0xabcd);
  tokens.add_logprobs()->set_rank(4);
  const v1::TokenDelta delta = stream.Push(tokens);
  EXPECT_EQ(delta.logits_crc32c(0), 0xabcd);
  EXPECT_EQ(delta.logprobs(0).rank(), 4);
}

// Stop strings at every place of a text, over every size of message: the model is a search in the
// whole text, token by token.
TEST(ReplyStreamTest, AStopStringEndsTheReplyWhereverItStands) {
  const std::string text = "Grüße aus Köln, 港口 🙂 and more: aab aaab.";
  const text::Tokenizer& tokenizer = TinyAcceptor().tokenizer();
  std::vector<int32_t> ids = *tokenizer.Encode(text);
  ids.push_back(1);
  int num_inside_a_token = 0;
  for (size_t begin = 0; begin < text.size(); ++begin) {
    for (size_t size = 1; begin + size <= text.size() && size <= 9; ++size) {
      const std::string stop = text.substr(begin, size);
      if (text::FirstInvalidUtf8(stop).has_value()) continue;
      const size_t found = text.find(stop);
      // The token that completes it is the last one.
      std::vector<int32_t> read;
      std::string bytes;
      while (bytes.size() < found + size) {
        read.push_back(ids[read.size()]);
        bytes += std::string(tokenizer.TokenBytes(read.back()));
      }
      num_inside_a_token += bytes.size() > found + size ? 1 : 0;
      for (const bool keeps : {false, true}) {
        RoutedRequest request = OneReply();
        request.sampling.add_stop_strings(stop);
        request.sampling.set_include_stop_string(keeps);
        for (const size_t per_message : {1, 2, 5, 100}) {
          const Streamed out = StreamIds(request, ids, per_message);
          ASSERT_EQ(out.content, text.substr(0, keeps ? found + size : found)) << stop;
          ASSERT_EQ(out.tokens, std::vector<uint32_t>(read.begin(), read.end())) << stop;
          ASSERT_EQ(out.end.finish_reason(), v1::FINISH_REASON_STOP);
          ASSERT_EQ(out.end.stop_string(), stop);
        }
      }
    }
  }
  EXPECT_GT(num_inside_a_token, 10);
}

TEST(ReplyStreamTest, AStopStringCountsFromTheLeastLengthOn) {
  RoutedRequest request = OneReply();
  std::vector<int32_t> ids = *TinyAcceptor().tokenizer().Encode("ab ab ab ab");
  request.sampling.add_stop_strings("ab");
  EXPECT_EQ(StreamIds(request, ids).content, "");
  request.sampling.set_min_output_tokens(static_cast<uint32_t>(ids.size()));
  EXPECT_EQ(StreamIds(request, ids).content, "ab ab ab ");
  EXPECT_EQ(StreamIds(request, ids, 100).tokens.size(), ids.size());
}

TEST(ReplyStreamTest, AStopTokenIsReportedAndIsNoText) {
  RoutedRequest request = OneReply();
  std::vector<int32_t> ids = *TinyAcceptor().tokenizer().Encode("one two");
  const auto stop = static_cast<uint32_t>(ids.back());
  const std::string stop_text(TinyAcceptor().tokenizer().TokenBytes(ids.back()));
  request.sampling.add_stop_token_ids(stop);
  Streamed out = StreamIds(request, ids);
  EXPECT_EQ(out.content + stop_text, "one two");
  EXPECT_EQ(out.tokens.size(), ids.size());
  EXPECT_EQ(out.end.stop_token_id(), stop);
  request.sampling.set_include_stop_string(true);
  EXPECT_EQ(StreamIds(request, ids).content, "one two");
  // A length, or the model's own end, is no stop of the request.
  ids = {20, 1};
  EXPECT_EQ(StreamIds(request, ids).end.stop_case(), v1::ReplyEnd::STOP_NOT_SET);
  out = StreamIds(request, {20, 21}, 1, v1::SEQUENCE_END_LENGTH);
  EXPECT_EQ(out.end.finish_reason(), v1::FINISH_REASON_LENGTH);
}

TEST(ReplyStreamTest, AStopStringIsSearchedInTheRawTextOfAChat) {
  RoutedRequest request = OneReply();
  request.is_chat = true;
  request.thinking = true;
  request.sampling.add_stop_strings("k>The");
  const std::vector<int32_t> ids =
      *TinyAcceptor().tokenizer().Encode("It was noted.</think>The code.");
  const Streamed out = StreamIds(request, ids);
  EXPECT_EQ(out.reasoning, "It was noted.</thin");
  EXPECT_EQ(out.content, "");
  EXPECT_EQ(out.end.stop_string(), "k>The");
}

TEST(ReplySetTest, EachReplyHasItsEndAndItsSeed) {
  RoutedRequest request = OneReply();
  request.sampling.set_num_replies(2);
  request.sampling.add_stop_strings("x");
  ReplySet replies(&TinyAcceptor().tokenizer(), &request, 1);
  v1::SequenceTokens tokens;
  tokens.set_reply_index(1);
  const std::vector<int32_t> ids = *TinyAcceptor().tokenizer().Encode("yx");
  for (const int32_t id : ids) {
    tokens.add_token_ids(static_cast<uint32_t>(id));
  }
  const auto stopped = replies.Take(tokens);
  ASSERT_TRUE(stopped.ok()) << stopped.status();
  EXPECT_TRUE(stopped->must_be_cancelled);
  ASSERT_EQ(stopped->events.size(), 2u);
  EXPECT_EQ(stopped->events[0].delta().reply_index(), 1);
  EXPECT_EQ(stopped->events[1].reply_end().reply_index(), 1);
  EXPECT_EQ(stopped->events[1].reply_end().seed(), ReplySeed(7, 1));
  EXPECT_FALSE(replies.has_ended());
  EXPECT_EQ(replies.Take(tokens).status().code(), absl::StatusCode::kInternal);
  v1::SequenceTokens last;
  last.add_token_ids(20);
  last.set_end(v1::SEQUENCE_END_LENGTH);
  const auto ended = replies.Take(last);
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_FALSE(ended->must_be_cancelled);
  EXPECT_EQ(ended->events.back().reply_end().seed(), 7);
  EXPECT_TRUE(replies.has_ended());
  EXPECT_EQ(replies.Finish().usage().output_tokens(),
            1 + static_cast<uint64_t>(tokens.token_ids_size()));
}

TEST(ReplySetTest, AMissingTokenIsAnError) {
  RoutedRequest request = OneReply();
  ReplySet replies(&TinyAcceptor().tokenizer(), &request, 1);
  v1::SequenceTokens tokens;
  tokens.set_first_index(1);
  tokens.add_token_ids(20);
  EXPECT_EQ(replies.Take(tokens).status().code(), absl::StatusCode::kInternal);
}

TEST(ReplyStreamTest, PlainTextPassesAsItIs) {
  const Streamed out = StreamText("Grüße, 港!</think>", false, false);
  EXPECT_EQ(out.content, "Grüße, 港!</think>");
  EXPECT_EQ(out.end.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(out.end.message_json(), "");
}

TEST(ReplyStreamTest, AChatIsTakenApart) {
  const Streamed out = StreamText("It was noted.</think>The code is amber falcon.", true, true);
  EXPECT_EQ(out.reasoning, "It was noted.");
  EXPECT_EQ(out.content, "The code is amber falcon.");
  const auto message = nlohmann::json::parse(out.end.message_json());
  EXPECT_EQ(message["content"], "The code is amber falcon.");
  EXPECT_EQ(message["reasoning_content"], "It was noted.");
  EXPECT_FALSE(message.contains("tool_calls"));
}

TEST(ReplyStreamTest, AToolCallChangesTheFinishReason) {
  const text::ToolCall call = {"get_weather", R"({"place": "Lisbon"})"};
  const Streamed out = StreamText("\n\n" + text::RenderToolCalls({call}), true, false);
  EXPECT_EQ(out.end.finish_reason(), v1::FINISH_REASON_TOOL_CALLS);
  const auto message = nlohmann::json::parse(out.end.message_json());
  ASSERT_EQ(message["tool_calls"].size(), 1);
  EXPECT_EQ(message["tool_calls"][0]["function"]["name"], "get_weather");
  EXPECT_EQ(nlohmann::json::parse(
                message["tool_calls"][0]["function"]["arguments"].get<std::string>())["place"],
            "Lisbon");
}

}  // namespace
}  // namespace isthmus::router
