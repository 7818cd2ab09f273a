// SPDX-License-Identifier: Apache-2.0
// The client side of the router's Generation service, for tools and tests. No gRPC type appears
// here.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/generate.pb.h"

namespace isthmus::rpc {

using OnDelta = std::function<void(const v1::TokenDelta& delta)>;

// What a tool's options say about sampling; the units are SamplingParams'.
struct SamplingOptions {
  double temperature = 0;
  double top_p = 1;
  uint32_t top_k = 0;
  std::optional<uint64_t> seed;  // Absent: the router draws one.
  uint32_t max_tokens = 256;
};
v1::SamplingParams ToSamplingParams(const SamplingOptions& options);

// "stop", "length" or "tool_calls", as in OpenAI's API; "" for anything else.
absl::string_view FinishReasonName(v1::FinishReason reason);

// What a stream that ended with OK has said beside its deltas.
struct Outcome {
  std::vector<v1::ReplyEnd> ends;                  // By reply; at least one.
  std::vector<v1::TokenLogprobs> prompt_logprobs;  // Of each prompt token but the first.
  v1::Finish finish;
};

class RouterClient {
 public:
  explicit RouterClient(const std::string& address);
  ~RouterClient();

  // Stream the replies into `on_delta` and return their ends. Errors carry the router's address; a
  // stream without a finish, or without an end of each reply, is Internal.
  absl::StatusOr<Outcome> Chat(const v1::ChatRequest& request, absl::Duration timeout,
                               const OnDelta& on_delta);
  absl::StatusOr<Outcome> Generate(const v1::GenerateRequest& request, absl::Duration timeout,
                                   const OnDelta& on_delta);
  absl::StatusOr<v1::StatusReply> Status(absl::Duration timeout);

  // Drains the worker at `worker` ("host:port"), or who listens here when that is empty: the
  // router, or a worker that was connected to directly. Answers when nothing is left there or after
  // `patience`, with what is left.
  absl::StatusOr<v1::DrainReply> Drain(const std::string& worker, const std::string& reason,
                                       absl::Duration patience);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace isthmus::rpc
