// SPDX-License-Identifier: Apache-2.0
// One request's tokens inside an engine, with everything that its next token depends on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "services/base/urgency.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::engine {

// What the client asked for. Validated by ValidateSampling (kernels/sampling) and Engine::Admit.
struct SamplingParams {
  float temperature = 0.0f;  // 0: greedy.
  float top_p = 1.0f;
  int32_t top_k = 0;  // 0: no limit.
  uint64_t seed = 0;
  int64_t max_tokens = 256;  // Output tokens, the end token included.
  // For diagnosis: a digest of the logits behind every output token.
  bool wants_logits_digests = false;
};

enum class FinishReason : uint8_t {
  kNone,    // Still running.
  kStop,    // The model's end token, which is the last of `tokens`.
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

struct Sequence {
  std::string request_id;
  std::vector<int32_t> tokens;  // The prompt, then the output.
  int64_t num_prompt_tokens = 0;
  SamplingParams sampling;
  // Draws made so far, one per output token, drafted ones included, so that it does not matter how
  // many tokens a step gains: with the seed the whole state of the sampler. Travels in the handoff.
  uint64_t num_draws = 0;
  // When wanted: CRC32C of the f32 logits that each output token was drawn from; 0 for a drafted
  // one, which was not drawn from a row that anybody sees.
  std::vector<uint32_t> logits_crc32c;
  // Who goes first: of the router's choice.
  Urgency urgency;
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
  // Tokens that are known but not yet in the cache: the rest of the prompt, or the last output.
  int64_t num_pending() const { return static_cast<int64_t>(tokens.size()) - cache.num_tokens(); }
};

}  // namespace isthmus::engine
