// SPDX-License-Identifier: Apache-2.0
// From output tokens to what the client reads: text as it becomes certain, and the parsed reply at
// the end. Knows no network.
#pragma once

#include <memory>
#include <string>

#include "proto/generate.pb.h"
#include "proto/worker.pb.h"
#include "router/accept.h"
#include "services/text/detokenizer.h"
#include "services/text/reply_parser.h"

namespace isthmus::router {

// One reply; not for several threads at once.
class ReplyStream {
 public:
  // `tokenizer` must outlive it. `end_token_id` is counted and reported, but is no text.
  ReplyStream(const text::Tokenizer* tokenizer, const RoutedRequest& request,
              uint32_t end_token_id);

  // What the ids of `tokens` add. Always has the ids and their digests; the text may be held back
  // for now.
  v1::TokenDelta Push(const v1::SequenceTokens& tokens);

  // What was held back until the end, which may be nothing.
  v1::TokenDelta PushEnd();

  // After PushEnd: finish reason, usage, parsed message. Timings and transfer are the caller's.
  v1::Finish Finish(v1::SequenceEnd end) const;

  uint64_t num_output_tokens() const { return num_output_tokens_; }

 private:
  void AddText(const std::string& text, v1::TokenDelta* delta);

  const bool is_chat_;
  const std::string request_id_;
  const uint64_t num_prompt_tokens_;
  const uint32_t end_token_id_;
  text::Detokenizer detokenizer_;
  text::ReplyParser parser_;
  uint64_t num_output_tokens_ = 0;
};

}  // namespace isthmus::router
