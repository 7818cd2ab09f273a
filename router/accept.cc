// SPDX-License-Identifier: Apache-2.0
#include "router/accept.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"
#include "services/rpc/identity.h"
#include "services/rpc/wire.h"
#include "services/text/chat_json.h"
#include "services/text/chat_request.h"

namespace isthmus::router {
namespace {

constexpr size_t kMaxRequestIdBytes = 128;
constexpr size_t kMaxConversationBytes = size_t{8} << 20;

absl::Status OutOfRange(absl::string_view field, double value, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": is ", value, ", want ", wanted));
}

}  // namespace

absl::StatusOr<std::string> RequestIdOf(const std::string& wanted) {
  if (wanted.empty()) return rpc::NewRequestId();
  if (wanted.size() > kMaxRequestIdBytes) {
    return absl::InvalidArgumentError(absl::StrCat("request_id: has ", wanted.size(),
                                                   " bytes, want at most ", kMaxRequestIdBytes));
  }
  const bool is_printable =
      std::all_of(wanted.begin(), wanted.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (!is_printable) {
    return absl::InvalidArgumentError("request_id: has a byte that is not printable ASCII");
  }
  return wanted;
}

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Create(const RouterConfig& config) {
  if (config.checkpoint.empty()) {
    return absl::InvalidArgumentError("checkpoint: no directory is given");
  }
  std::unique_ptr<Acceptor> acceptor(new Acceptor(config));
  ISTHMUS_ASSIGN_OR_RETURN(acceptor->tokenizer_,
                           text::Tokenizer::Load(config.checkpoint + "/tokenizer.json"));
  ISTHMUS_ASSIGN_OR_RETURN(acceptor->encoder_, text::LoadEncoderProfile(config.checkpoint));
  return acceptor;
}

absl::Status Acceptor::SetSampler(const v1::SamplingParams& sampling,
                                  v1::SamplerState* state) const {
  state->set_temperature(sampling.has_temperature() ? sampling.temperature()
                                                    : config_.default_temperature);
  state->set_top_p(sampling.has_top_p() ? sampling.top_p() : config_.default_top_p);
  state->set_top_k(sampling.top_k());
  state->set_seed(sampling.has_seed() ? sampling.seed() : rpc::NewIncarnation());
  state->set_wants_logits_digests(sampling.wants_logits_digests());
  // Written so that a NaN fails.
  if (!(state->temperature() >= 0.0 && state->temperature() <= 2.0)) {
    return OutOfRange("sampling.temperature", state->temperature(), "0 to 2");
  }
  if (!(state->top_p() > 0.0 && state->top_p() <= 1.0)) {
    return OutOfRange("sampling.top_p", state->top_p(), "above 0, at most 1");
  }
  if (state->top_k() > uint32_t{INT32_MAX}) {
    return OutOfRange("sampling.top_k", state->top_k(), "at most 2147483647");
  }
  return absl::OkStatus();
}

absl::Status Acceptor::SetPriority(v1::Priority wanted, RoutedRequest* routed) {
  if (!v1::Priority_IsValid(wanted)) {
    return OutOfRange("priority", wanted, absl::StrCat("0 to ", v1::Priority_MAX));
  }
  routed->priority = rpc::PriorityOf(wanted);
  return absl::OkStatus();
}

absl::Status Acceptor::SetPromptText(absl::string_view text, RoutedRequest* routed) const {
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer_->Encode(text));
  routed->prompt.assign(ids.begin(), ids.end());
  return absl::OkStatus();
}

absl::Status Acceptor::Finish(const v1::SamplingParams& sampling, const v1::ClusterValues& values,
                              absl::Time now, absl::Time client_deadline,
                              RoutedRequest* routed) const {
  ISTHMUS_RETURN_IF_ERROR(SetSampler(sampling, &routed->sampler));
  if (routed->prompt.empty()) return absl::InvalidArgumentError("prompt: has no tokens");
  const uint64_t size = routed->prompt.size();
  const uint64_t limit = values.max_sequence_tokens();
  if (size >= limit) {
    return absl::InvalidArgumentError(
        absl::StrCat("prompt: has ", size, " tokens, want at most ", limit - 1));
  }
  for (size_t i = 0; i < routed->prompt.size(); ++i) {
    if (routed->prompt[i] < values.vocab_size()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "prompt: token ", i, " has id ", routed->prompt[i], ", want below ", values.vocab_size()));
  }
  uint64_t wanted = static_cast<uint64_t>(config_.default_output_tokens);
  if (sampling.has_max_output_tokens()) {
    wanted = sampling.max_output_tokens();
    if (wanted == 0) return OutOfRange("sampling.max_output_tokens", 0, "at least 1");
  }
  // A reply that meets the model's limit ends with FINISH_REASON_LENGTH, like any other limit.
  routed->max_output_tokens = std::min(wanted, limit - size);
  routed->accepted_at = now;
  routed->deadline = std::min(client_deadline, now + config_.request_timeout);
  return absl::OkStatus();
}

absl::StatusOr<RoutedRequest> Acceptor::AcceptGenerate(const v1::GenerateRequest& request,
                                                       const v1::ClusterValues& values,
                                                       absl::Time now,
                                                       absl::Time client_deadline) const {
  RoutedRequest routed;
  ISTHMUS_ASSIGN_OR_RETURN(routed.request_id, RequestIdOf(request.request_id()));
  ISTHMUS_RETURN_IF_ERROR(SetPriority(request.priority(), &routed));
  if (request.has_text()) {
    ISTHMUS_RETURN_IF_ERROR(SetPromptText(request.text(), &routed));
  } else {
    routed.prompt.assign(request.token_ids().ids().begin(), request.token_ids().ids().end());
  }
  ISTHMUS_RETURN_IF_ERROR(Finish(request.sampling(), values, now, client_deadline, &routed));
  return routed;
}

absl::StatusOr<RoutedRequest> Acceptor::AcceptChat(const v1::ChatRequest& request,
                                                   const v1::ClusterValues& values, absl::Time now,
                                                   absl::Time client_deadline) const {
  RoutedRequest routed;
  routed.is_chat = true;
  routed.thinking = request.thinking();
  ISTHMUS_ASSIGN_OR_RETURN(routed.request_id, RequestIdOf(request.request_id()));
  ISTHMUS_RETURN_IF_ERROR(SetPriority(request.priority(), &routed));
  if (request.conversation_json().size() > kMaxConversationBytes) {
    return absl::InvalidArgumentError(absl::StrCat("conversation_json: has ",
                                                   request.conversation_json().size(),
                                                   " bytes, want at most ", kMaxConversationBytes));
  }
  ISTHMUS_ASSIGN_OR_RETURN(const nlohmann::ordered_json conversation,
                           text::ParseChatJson("conversation_json", request.conversation_json()));
  if (!conversation.is_object()) {
    return absl::InvalidArgumentError("conversation_json: want an object with messages");
  }
  ISTHMUS_ASSIGN_OR_RETURN(const nlohmann::ordered_json messages,
                           text::MessagesFromOpenAi(conversation));
  text::ChatOptions options;
  options.thinking = request.thinking();
  options.reasoning_effort = request.reasoning_effort();
  options.encoder = encoder_;
  ISTHMUS_ASSIGN_OR_RETURN(const std::string prompt, text::EncodeChat(messages, options));
  ISTHMUS_RETURN_IF_ERROR(SetPromptText(prompt, &routed));
  ISTHMUS_RETURN_IF_ERROR(Finish(request.sampling(), values, now, client_deadline, &routed));
  return routed;
}

}  // namespace isthmus::router
