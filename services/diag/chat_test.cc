// SPDX-License-Identifier: Apache-2.0
#include "services/diag/chat.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace isthmus::diag {
namespace {

constexpr char kCheckpoint[] = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";

class ChatTest : public testing::Test {
 protected:
  ChatTest() {
    LocalEngineOptions options;
    options.checkpoint = kCheckpoint;
    options.max_tokens = 1024;
    options.max_sequences = 1;
    options.threads = 1;
    local_ = *LocalEngine::Create(options);
    chat_ = *LocalChat::Create(local_.get(), kCheckpoint);
    request_.body = {{"messages", {{{"role", "user"}, {"content", "which words follow?"}}}}};
    request_.sampling.max_tokens = 24;
    request_.sampling.ignores_end_token = true;
    whole_ = Ask();
  }

  ChatReply Ask() {
    std::string streamed;
    const ChatReply reply =
        *chat_->Chat(request_, [&](absl::string_view text) { absl::StrAppend(&streamed, text); });
    EXPECT_EQ(streamed, reply.text);
    return reply;
  }

  std::unique_ptr<LocalEngine> local_;
  std::unique_ptr<LocalChat> chat_;
  ChatRequest request_;
  ChatReply whole_;
};

TEST_F(ChatTest, EndsBeforeAStopStringOrWithIt) {
  ASSERT_EQ(whole_.finish_reason, "length");
  ASSERT_GE(whole_.text.size(), 12u) << whole_.text;
  const std::string stop = whole_.text.substr(6, 4);
  const std::string before = whole_.text.substr(0, whole_.text.find(stop));
  request_.stops = {"never to be found", stop};
  const ChatReply cut = Ask();
  EXPECT_EQ(cut.text, before);
  EXPECT_EQ(cut.finish_reason, "stop");
  EXPECT_LT(cut.output_tokens, whole_.output_tokens);
  request_.keeps_stop = true;
  EXPECT_EQ(Ask().text, before + stop);
}

TEST_F(ChatTest, WhatMayStillBeginAStopStringComesInTheEnd) {
  request_.stops = {whole_.text + " and more"};
  const ChatReply reply = Ask();
  EXPECT_EQ(reply.text, whole_.text);
  EXPECT_EQ(reply.finish_reason, "length");
}

TEST_F(ChatTest, NoStringStopsAReplyThatIsTooShort) {
  request_.stops = {whole_.text.substr(0, 3)};
  request_.sampling.min_tokens = 24;
  const ChatReply reply = Ask();
  EXPECT_EQ(reply.output_tokens, 24);
}

TEST_F(ChatTest, AStopTokenIsNoText) {
  std::vector<int32_t> tokens;
  const auto keep = [&](const engine::Sequence& sequence) {
    tokens.assign(sequence.tokens.begin() + sequence.num_prompt_tokens, sequence.tokens.end());
    return absl::OkStatus();
  };
  ASSERT_TRUE(chat_
                  ->Chat(
                      request_, [](absl::string_view) {}, keep)
                  .ok());
  request_.sampling.stop_token_ids = {tokens[5]};
  const ChatReply cut = Ask();
  EXPECT_EQ(cut.finish_reason, "stop");
  EXPECT_LE(cut.output_tokens, 6);
  EXPECT_LT(cut.text.size(), whole_.text.size());
  EXPECT_EQ(whole_.text.substr(0, cut.text.size()), cut.text);
  request_.keeps_stop = true;
  EXPECT_GT(Ask().text.size(), cut.text.size());
}

}  // namespace
}  // namespace isthmus::diag
