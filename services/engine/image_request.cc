// SPDX-License-Identifier: Apache-2.0
#include "services/engine/image_request.h"

#include <bit>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

namespace isthmus::engine {
namespace {

// Every field of a request, in order. A field that is added to SamplingParams does not compile
// until it is named here; whoever adds one raises kVersion (sequence_image.cc) with it.
template <typename Visit>
void VisitRequest(Sequence& sequence, Visit& visit) {
  visit(sequence.request_id);
  visit(sequence.num_prompt_tokens);
  visit(sequence.num_draws);
  visit(sequence.finish);
  visit(sequence.logprobs);
  visit(sequence.prompt_logprobs);
  visit(sequence.further_first);
  auto& [temperature, top_p, top_k, min_p, seed, further_seeds, repetition_penalty,
         frequency_penalty, presence_penalty, logit_bias, banned_token_ids, max_tokens, min_tokens,
         stop_token_ids, ignores_end_token, top_logprobs, top_prompt_logprobs,
         wants_logits_digests] = sequence.sampling;
  visit(temperature);
  visit(top_p);
  visit(top_k);
  visit(min_p);
  visit(seed);
  visit(further_seeds);
  visit(repetition_penalty);
  visit(frequency_penalty);
  visit(presence_penalty);
  visit(logit_bias);
  visit(banned_token_ids);
  visit(max_tokens);
  visit(min_tokens);
  visit(stop_token_ids);
  visit(ignores_end_token);
  visit(top_logprobs);
  visit(top_prompt_logprobs);
  visit(wants_logits_digests);
}

// The parts of what is no number, list or string.
template <typename Visit>
void VisitParts(kernels::LogitBias& value, Visit& visit) {
  auto& [id, bias] = value;
  visit(id);
  visit(bias);
}
template <typename Visit>
void VisitParts(kernels::TokenLogprob& value, Visit& visit) {
  auto& [id, logprob] = value;
  visit(id);
  visit(logprob);
}
template <typename Visit>
void VisitParts(kernels::TokenLogprobs& value, Visit& visit) {
  auto& [chosen, rank, top] = value;
  visit(chosen);
  visit(rank);
  visit(top);
}
template <typename Visit>
void VisitParts(DrawnToken& value, Visit& visit) {
  auto& [id, logits_crc32c, logprobs] = value;
  visit(id);
  visit(logits_crc32c);
  visit(logprobs);
}

template <typename T>
concept Number = std::is_integral_v<T> || std::is_enum_v<T>;
template <typename T>
concept HasParts = requires(T& value, int& visit) {
  VisitParts(value, visit);
};

struct FieldCounter {
  uint32_t count = 0;
  template <typename T>
  void operator()(const T&) {
    ++count;
  }
};

struct FieldWriter {
  std::vector<std::byte>& out;

  void Word(uint64_t value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  template <Number T>
  void operator()(T& value) {
    Word(static_cast<uint64_t>(value));
  }
  void operator()(float& value) { Word(std::bit_cast<uint32_t>(value)); }
  void operator()(double& value) { Word(std::bit_cast<uint64_t>(value)); }
  void operator()(std::string& value) {
    Word(value.size());
    const auto bytes = std::as_bytes(std::span(value));
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  template <typename T>
  void operator()(std::optional<T>& value) {
    Word(value.has_value() ? 1 : 0);
    if (value.has_value()) (*this)(*value);
  }
  template <typename T>
  void operator()(std::vector<T>& values) {
    Word(values.size());
    for (T& value : values) (*this)(value);
  }
  template <HasParts T>
  void operator()(T& value) {
    VisitParts(value, *this);
  }
};

struct FieldReader {
  std::span<const std::byte> bytes;
  bool is_whole = true;  // Every field was there and is a value of its type.

  uint64_t Word() {
    uint64_t value = 0;
    if (bytes.size() < sizeof(value)) {
      is_whole = false;
      return 0;
    }
    std::memcpy(&value, bytes.data(), sizeof(value));
    bytes = bytes.subspan(sizeof(value));
    return value;
  }
  template <Number T>
  void operator()(T& value) {
    const uint64_t word = Word();
    value = static_cast<T>(word);
    is_whole = is_whole && static_cast<uint64_t>(value) == word;
  }
  void operator()(FinishReason& value) {
    const uint64_t word = Word();
    is_whole = is_whole && word <= static_cast<uint64_t>(FinishReason::kLength);
    value = is_whole ? static_cast<FinishReason>(word) : FinishReason::kNone;
  }
  void operator()(float& value) {
    uint32_t bits = 0;
    (*this)(bits);
    value = std::bit_cast<float>(bits);
  }
  void operator()(double& value) { value = std::bit_cast<double>(Word()); }
  void operator()(std::string& value) {
    const uint64_t size = Word();
    if (size > bytes.size()) {
      is_whole = false;
      return;
    }
    value.assign(reinterpret_cast<const char*>(bytes.data()), size);
    bytes = bytes.subspan(size);
  }
  template <typename T>
  void operator()(std::optional<T>& value) {
    bool has_value = false;
    (*this)(has_value);
    if (has_value) (*this)(value.emplace());
  }
  // Grows as elements are found, each of at least a word, whatever their number is said to be.
  template <typename T>
  void operator()(std::vector<T>& values) {
    const uint64_t count = Word();
    for (uint64_t i = 0; i < count && is_whole; ++i) (*this)(values.emplace_back());
  }
  template <HasParts T>
  void operator()(T& value) {
    VisitParts(value, *this);
  }
};

}  // namespace

uint32_t NumRequestFields() {
  FieldCounter counter;
  Sequence sequence;
  VisitRequest(sequence, counter);
  return counter.count;
}

void AppendRequest(const Sequence& sequence, std::vector<std::byte>& out) {
  FieldWriter fields{out};
  // This visitor changes nothing that it visits.
  VisitRequest(const_cast<Sequence&>(sequence),
               fields);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
}

bool ReadRequest(std::span<const std::byte> bytes, Sequence& sequence) {
  FieldReader fields{bytes};
  VisitRequest(sequence, fields);
  return fields.is_whole && fields.bytes.empty();
}

}  // namespace isthmus::engine
