// SPDX-License-Identifier: Apache-2.0
// From output tokens to what the client reads: text as it becomes certain, stop strings, and the
// parsed reply at the end. Knows no network.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/generate.pb.h"
#include "proto/worker.pb.h"
#include "router/accept.h"
#include "services/text/detokenizer.h"
#include "services/text/reply_parser.h"
#include "services/text/stop_strings.h"

namespace isthmus::router {

// One reply; not for several threads at once.
class ReplyStream {
 public:
  // Both must outlive it. `end_token_id` is counted and reported, but is no text; so are the
  // request's stop tokens, unless it wants to see what stopped it.
  ReplyStream(const text::Tokenizer* tokenizer, const RoutedRequest* request, uint32_t end_token_id,
              uint32_t reply_index);

  // What the tokens of `tokens` add, up to the one that completes a stop string: their ids with
  // what is told about them; the text may be held back for now.
  v1::TokenDelta Push(const v1::SequenceTokens& tokens);

  // Whether a stop string has ended the reply: nothing more is pushed.
  bool has_stopped() const { return stops_.match().has_value(); }

  // What was held back until the end, which may be nothing.
  v1::TokenDelta PushEnd();

  // After PushEnd. `end` is the worker's word, which a stop string overrules.
  v1::ReplyEnd End(v1::SequenceEnd end) const;

  uint64_t num_output_tokens() const { return num_output_tokens_; }

 private:
  bool IsStopToken(uint32_t id) const;
  bool IsText(uint32_t id) const;
  void AddText(const std::string& text, v1::TokenDelta* delta);
  void AddCertain(const std::string& text, v1::TokenDelta* delta);

  const RoutedRequest* const request_;
  const uint32_t end_token_id_;
  const uint32_t reply_index_;
  text::Detokenizer detokenizer_;
  text::StopStrings stops_;
  text::ReplyParser parser_;
  uint64_t num_output_tokens_ = 0;
  uint32_t last_token_id_ = 0;
};

// All replies to a request; not for several threads at once.
class ReplySet {
 public:
  // As for ReplyStream.
  ReplySet(const text::Tokenizer* tokenizer, const RoutedRequest* request, uint32_t end_token_id);

  struct Taken {
    // What to write, in this order: a delta when there is anything in it, and the reply's end when
    // this is its end.
    std::vector<v1::GenerateReply> events;
    // A stop string has ended the reply, and its worker does not know.
    bool must_be_cancelled = false;
  };
  // Internal: a token is missing or doubled, or belongs to no reply that is open.
  absl::StatusOr<Taken> Take(const v1::SequenceTokens& tokens);

  bool has_ended() const { return num_open_ == 0; }

  // Of all replies.
  uint64_t num_output_tokens() const;

  // The end of all: usage. Timings and transfer are the caller's.
  v1::Finish Finish() const;

 private:
  const RoutedRequest* const request_;
  std::vector<ReplyStream> replies_;
  std::vector<bool> is_open_;
  size_t num_open_ = 0;
};

}  // namespace isthmus::router
