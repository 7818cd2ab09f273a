// SPDX-License-Identifier: Apache-2.0
// The first step of a request: check every field, name it, encode it, set its deadline.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/cluster.pb.h"
#include "proto/generate.pb.h"
#include "router/router_config.h"
#include "services/base/urgency.h"
#include "services/text/chat_encoder.h"
#include "services/text/tokenizer.h"

namespace isthmus::router {

// A request that is ready to be placed.
struct RoutedRequest {
  std::string request_id;
  std::vector<uint32_t> prompt;  // At least one token.
  v1::SamplingParams sampling;   // Complete (sampling.h).
  std::string cache_salt;
  uint64_t max_output_tokens = 0;  // At least 1; with the prompt at most the model's limit.
  bool is_chat = false;
  bool thinking = false;
  Priority priority = Priority::kNormal;
  absl::Time accepted_at;
  absl::Time deadline;

  Urgency urgency() const { return {priority, deadline, accepted_at}; }
};

// The id that a client gave its request, or a fresh one when it gave none. InvalidArgument: more
// than 128 bytes, or a byte that is not printable ASCII.
absl::StatusOr<std::string> RequestIdOf(const std::string& wanted);

// Immutable after creation; const calls may run in several threads at once.
class Acceptor {
 public:
  // Reads tokenizer.json and the encoder profile of `config.checkpoint`.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Create(const RouterConfig& config);

  // `values` are those of the workers, `client_deadline` may be infinite. InvalidArgument names the
  // field, the value and what is allowed.
  absl::StatusOr<RoutedRequest> AcceptGenerate(const v1::GenerateRequest& request,
                                               const v1::ClusterValues& values, absl::Time now,
                                               absl::Time client_deadline) const;
  absl::StatusOr<RoutedRequest> AcceptChat(const v1::ChatRequest& request,
                                           const v1::ClusterValues& values, absl::Time now,
                                           absl::Time client_deadline) const;

  const text::Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  explicit Acceptor(const RouterConfig& config) : config_(config) {}
  absl::Status Finish(const v1::SamplingParams& sampling, const v1::ClusterValues& values,
                      absl::Time now, absl::Time client_deadline, RoutedRequest* routed) const;
  static absl::Status SetCacheSalt(const std::string& salt, RoutedRequest* routed);
  static absl::Status SetPriority(v1::Priority wanted, RoutedRequest* routed);
  absl::Status SetPromptText(absl::string_view text, RoutedRequest* routed) const;

  const RouterConfig config_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  text::EncoderProfile encoder_;
};

}  // namespace isthmus::router
