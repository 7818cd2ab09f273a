// SPDX-License-Identifier: Apache-2.0
// One request's tokens inside an engine, with everything that its next token depends on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/logit_edits/logit_edits.h"
#include "kernels/logprobs/logprobs.h"
#include "services/base/prefix_hash.h"
#include "services/base/urgency.h"
#include "services/engine/admission.h"
#include "services/engine/token_counts.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::engine {

// What the client asked for. Validated by Engine::Admit (sampler.h says what is allowed).
struct SamplingParams {
  float temperature = 0.0f;  // 0: greedy.
  float top_p = 1.0f;
  int32_t top_k = 0;  // 0: no limit.
  float min_p = 0.0f;
  uint64_t seed = 0;
  // Of further replies to the same prompt, whose first tokens are drawn here as well.
  std::vector<uint64_t> further_seeds = {};

  // What changes the logits before a token is drawn (kernels/logit_edits).
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  std::vector<kernels::LogitBias> logit_bias = {};
  std::vector<int32_t> banned_token_ids = {};

  // What ends the reply. Neither the end token nor a stop token is drawn before output token number
  // min_tokens.
  int64_t max_tokens = 256;  // Output tokens, the end token included.
  int64_t min_tokens = 0;
  std::vector<int32_t> stop_token_ids = {};
  bool ignores_end_token = false;

  // What is told about the tokens: log probabilities of each output token, or prompt token, and of
  // so many likeliest ones; for diagnosis a digest of the logits behind every output token.
  std::optional<int32_t> top_logprobs = {};
  std::optional<int32_t> top_prompt_logprobs = {};
  bool wants_logits_digests = false;
};

enum class FinishReason : uint8_t {
  kNone,    // Still running.
  kStop,    // The model's end token or a stop token, which is the last of `tokens`.
  kLength,  // max_tokens, or the model's limit of positions.
};

// "" while running, "stop" or "length", as the OpenAI API spells them.
inline const char* FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    default:
      return "";
  }
}

struct DrawnToken {
  int32_t id = 0;
  uint32_t logits_crc32c = 0;            // When wanted; 0 for a drafted token.
  kernels::TokenLogprobs logprobs = {};  // When wanted.
};

// What the prefix cache knows of a sequence (prefix_reuse.h). Nothing of it changes the output.
struct PrefixTrace {
  PrefixHash root;
  std::vector<PrefixHash> chain;  // Names of whole blocks, as far as somebody asked.
  int64_t num_published = 0;      // Blocks.
  // Tokens after which pages of others end that this one could not go on from; 0: none.
  int64_t branch = 0;
};

struct Sequence {
  std::string request_id;
  std::vector<int32_t> tokens;  // The prompt, then the output.
  int64_t num_prompt_tokens = 0;
  // Prefixes are shared only under the same salt.
  std::string cache_salt;
  PrefixTrace prefix;
  // Prompt tokens that were not computed here, because the cache had them.
  int64_t num_reused_tokens = 0;
  SamplingParams sampling;
  // Draws made so far, one per output token, drafted ones included, so that it does not matter how
  // many tokens a step gains: with the seed the whole state of the sampler. Travels in the handoff.
  uint64_t num_draws = 0;
  // Of `tokens`, as far as a penalty has asked for them.
  TokenCounts counts;
  // When wanted: CRC32C of the f32 logits that each output token was drawn from; 0 for a drafted
  // one, which was not drawn from a row that anybody sees.
  std::vector<uint32_t> logits_crc32c;
  // When wanted: of each output token, and of each prompt token but the first as far as computed.
  std::vector<kernels::TokenLogprobs> logprobs;
  std::vector<kernels::TokenLogprobs> prompt_logprobs;
  // First tokens of further replies, one per further_seeds, once it has its own.
  std::vector<DrawnToken> further_first;
  // Who goes first: of the router's choice.
  Urgency urgency;
  // Its line in the book of those that share the pool, where there is one (admission.h).
  Admission::Claim claim;
  // Tokens that were cached when its pages were taken away: up to here a step recomputes.
  int64_t num_once_cached = 0;
  // No step goes past so many cached tokens, so that one ends there; not ahead: none is wanted.
  int64_t wanted_boundary = 0;
  // Number of the engine's step that it last took part in.
  uint64_t last_step = 0;
  FinishReason finish = FinishReason::kNone;
  kv::SequenceCache cache;

  bool is_finished() const { return finish != FinishReason::kNone; }
  int64_t num_output_tokens() const {
    return static_cast<int64_t>(tokens.size()) - num_prompt_tokens;
  }
  // Whether rows of the prompt are wanted for their log probabilities still: a prefix must then be
  // computed although a cache may hold it.
  bool lacks_prompt_logprobs() const {
    return sampling.top_prompt_logprobs.has_value() &&
           static_cast<int64_t>(prompt_logprobs.size()) + 1 < num_prompt_tokens;
  }
  // Tokens that are known but not yet in the cache: the rest of the prompt, or the last output.
  int64_t num_pending() const { return static_cast<int64_t>(tokens.size()) - cache.num_tokens(); }
};

}  // namespace isthmus::engine
