// SPDX-License-Identifier: Apache-2.0
#include "router/accept.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "router/sampling.h"
#include "services/base/request_limits.h"
#include "services/base/status_macros.h"
#include "services/rpc/identity.h"
#include "services/rpc/wire.h"
#include "services/text/chat_json.h"
#include "services/text/chat_request.h"

namespace isthmus::router {
namespace {

constexpr size_t kMaxRequestIdBytes = 128;
constexpr size_t kMaxConversationBytes = size_t{8} << 20;

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

absl::Status Acceptor::SetCacheSalt(const std::string& salt, RoutedRequest* routed) {
  if (salt.size() > kMaxCacheSaltBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache_salt: has ", salt.size(), " bytes, want at most ", kMaxCacheSaltBytes));
  }
  routed->cache_salt = salt;
  return absl::OkStatus();
}

absl::Status Acceptor::SetPriority(v1::Priority wanted, RoutedRequest* routed) {
  if (!v1::Priority_IsValid(wanted)) {
    return absl::InvalidArgumentError(
        absl::StrCat("priority: is ", wanted, ", want 0 to ", v1::Priority_MAX));
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
  ISTHMUS_ASSIGN_OR_RETURN(routed->sampling, CompleteSampling(sampling, config_, values, size));
  routed->max_output_tokens = routed->sampling.max_output_tokens();
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
  ISTHMUS_RETURN_IF_ERROR(SetCacheSalt(request.cache_salt(), &routed));
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
  ISTHMUS_RETURN_IF_ERROR(SetCacheSalt(request.cache_salt(), &routed));
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
