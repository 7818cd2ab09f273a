// SPDX-License-Identifier: Apache-2.0
#include "services/model/scripted_forward.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/core/state_rows.h"
#include "services/base/status_macros.h"

namespace isthmus::model {
namespace {

using kernels::CacheKindIndex;
using kernels::SequenceKv;

constexpr CacheKindIndex kStateKinds[] = {kernels::kWindow, kernels::kCsaState,
                                          kernels::kIndexState, kernels::kHcaState};
constexpr int64_t kEntryTokens = 4;
constexpr int64_t kRunTokens = 128;
constexpr int kMaxTokensPerStep = 4;
constexpr int64_t kMaxPositions = 2'000'000;
constexpr uint64_t kMagic = 0x6973746868617368u;

// Which question a hash answers, so that answers do not depend on each other.
constexpr uint64_t kAsksToken = 1;
constexpr uint64_t kAsksEnd = 2;
constexpr uint64_t kAsksTokensPerStep = 3;
constexpr uint64_t kAsksRun = 4;

// splitmix64 of both numbers.
uint64_t Mix(uint64_t hash, uint64_t value) {
  uint64_t z = (hash ^ (value + 0x9e3779b97f4a7c15u)) + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint64_t EmptyHash(const ScriptedOptions& options) { return Mix(kMagic, options.seed); }

uint64_t Extend(uint64_t hash, int32_t token) { return Mix(hash, static_cast<uint32_t>(token)); }

// The token behind the prefix of `hash`.
int32_t NextToken(const ScriptedOptions& options, uint64_t hash) {
  const double chance = static_cast<double>(Mix(hash, kAsksEnd) >> 11) * 0x1p-53;
  if (chance < options.end_probability) return options.end_token_id;
  const auto others = static_cast<uint64_t>(options.vocab_size - 1);
  const auto token = static_cast<int32_t>(Mix(hash, kAsksToken) % others);
  return token < options.end_token_id ? token : token + 1;
}

// Tokens that the step behind the prefix of `hash` yields.
int64_t TokensOfStep(const ScriptedOptions& options, uint64_t hash) {
  return 1 + static_cast<int64_t>(Mix(hash, kAsksTokensPerStep) %
                                  static_cast<uint64_t>(options.max_tokens_per_step));
}

// What one layer's entry consists of: what it must carry first, then bytes from the hash.
class EntryBytes {
 public:
  EntryBytes(uint64_t hash, int kind, int64_t entry, int layer, std::span<const std::byte> carried,
             size_t data_bytes, size_t scale_bytes)
      : bytes_(data_bytes + scale_bytes), data_bytes_(data_bytes) {
    uint64_t state = Mix(Mix(Mix(hash, static_cast<uint64_t>(kind)), static_cast<uint64_t>(entry)),
                         static_cast<uint64_t>(layer));
    for (size_t at = 0; at < bytes_.size(); at += sizeof(state)) {
      state = Mix(state, at);
      std::memcpy(bytes_.data() + at, &state, std::min(sizeof(state), bytes_.size() - at));
    }
    if (!carried.empty()) std::memcpy(bytes_.data(), carried.data(), carried.size());
  }

  std::span<const std::byte> data() const { return {bytes_.data(), data_bytes_}; }
  std::span<const std::byte> scale() const {
    return {bytes_.data() + data_bytes_, bytes_.size() - data_bytes_};
  }

 private:
  std::vector<std::byte> bytes_;
  const size_t data_bytes_;
};

absl::Status Lost(absl::string_view what, int64_t position, uint64_t expected, uint64_t found) {
  return absl::DataLossError(
      absl::StrFormat("scripted: %s at position %d: expected %016x, found "
                      "%016x",
                      what, position, expected, found));
}

// The first eight bytes of both that differ, to be named in an error.
std::pair<uint64_t, uint64_t> FirstDifference(std::span<const std::byte> expected,
                                              std::span<const std::byte> found) {
  size_t at = 0;
  while (at + 1 < expected.size() && expected[at] == found[at]) ++at;
  std::pair<uint64_t, uint64_t> words;
  const size_t size = std::min(sizeof(words.first), expected.size() - at);
  std::memcpy(&words.first, expected.data() + at, size);
  std::memcpy(&words.second, found.data() + at, size);
  return words;
}

}  // namespace

// At the start of the row of each position, in every fixed-size kind's first layer. Plain bytes
// that travel, with the rows that a model would read and no others.
struct ScriptedForward::Record {
  uint64_t magic = 0;      // Mixed with the kind.
  uint64_t hash = 0;       // Of all tokens up to the position.
  int64_t num_tokens = 0;  // Up to the position, itself included.
  // Tokens behind the last whole entry, which are in no page yet.
  std::array<int32_t, kEntryTokens> tail{};
};

absl::Status ValidateScripted(const ScriptedOptions& options) {
  const auto refuse = [](absl::string_view name, auto value, absl::string_view want) {
    return absl::InvalidArgumentError(
        absl::StrCat("scripted.", name, ": is ", value, ", want ", want));
  };
  if (options.vocab_size < 4) return refuse("vocab_size", options.vocab_size, "at least 4");
  if (options.end_token_id < 0 || options.end_token_id >= options.vocab_size) {
    return refuse("end_token_id", options.end_token_id, "a token of the vocabulary");
  }
  if (options.max_positions < 2 || options.max_positions > kMaxPositions) {
    return refuse("max_positions", options.max_positions, absl::StrCat("2 to ", kMaxPositions));
  }
  if (options.layer_pairs < 1 || options.layer_pairs > 1024) {
    return refuse("layer_pairs", options.layer_pairs, "1 to 1024");
  }
  if (!(options.end_probability >= 0.0 && options.end_probability <= 1.0)) {
    return refuse("end_probability", options.end_probability, "0 to 1");
  }
  if (options.max_tokens_per_step < 1 || options.max_tokens_per_step > kMaxTokensPerStep) {
    return refuse("max_tokens_per_step", options.max_tokens_per_step,
                  absl::StrCat("1 to ", kMaxTokensPerStep));
  }
  return absl::OkStatus();
}

std::vector<int32_t> ScriptedReply(const ScriptedOptions& options, std::span<const int32_t> prompt,
                                   int64_t max_output_tokens) {
  uint64_t hash = EmptyHash(options);
  for (const int32_t token : prompt) hash = Extend(hash, token);
  const int64_t room = options.max_positions - static_cast<int64_t>(prompt.size());
  std::vector<int32_t> reply;
  while (static_cast<int64_t>(reply.size()) < std::min(max_output_tokens, room)) {
    reply.push_back(NextToken(options, hash));
    if (reply.back() == options.end_token_id) break;
    hash = Extend(hash, reply.back());
  }
  return reply;
}

uint64_t ScriptedFingerprint(const ScriptedOptions& options) {
  uint64_t hash = Mix(EmptyHash(options), static_cast<uint64_t>(options.vocab_size));
  hash = Mix(hash, static_cast<uint64_t>(options.end_token_id));
  uint64_t probability = 0;
  std::memcpy(&probability, &options.end_probability, sizeof(probability));
  return Mix(hash, probability);
}

absl::StatusOr<std::unique_ptr<ScriptedForward>> ScriptedForward::Create(
    const ScriptedOptions& options, Clock& clock) {
  ISTHMUS_RETURN_IF_ERROR(ValidateScripted(options));
  kernels::KvGeometry geometry;
  for (int pair = 0; pair < options.layer_pairs; ++pair) {
    geometry.compress_ratios.insert(geometry.compress_ratios.end(), {4, 128});
  }
  geometry.head_dim = 128;
  geometry.index_head_dim = 32;
  geometry.window = 8;
  geometry.page_tokens = options.page_tokens;
  ISTHMUS_ASSIGN_OR_RETURN(kernels::KvLayout layout, kernels::KvLayout::Create(geometry));
  return std::unique_ptr<ScriptedForward>(new ScriptedForward(options, std::move(layout), clock));
}

absl::Status ScriptedForward::Validate(const ForwardBatch& batch) const {
  if (batch.tokens.empty()) return absl::InvalidArgumentError("scripted: the batch has no tokens");
  const size_t num_logits = batch.logit_rows.size();
  if (!batch.accepted.empty() &&
      (batch.accepted.size() != num_logits || batch.accepted_limits.size() != num_logits)) {
    return absl::InvalidArgumentError(
        absl::StrCat("scripted: ", num_logits, " rows want logits, ", batch.accepted.size(),
                     " accepted tokens, ", batch.accepted_limits.size(), " have a limit for them"));
  }
  for (const int32_t token : batch.tokens) {
    if (token < 0 || token >= options_.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("scripted: a token has id ", token,
                                                     ", the vocabulary has ", options_.vocab_size));
    }
  }
  int64_t next_row = 0;
  for (const SequenceKv& sequence : batch.sequences) {
    if (sequence.first_row != next_row || sequence.num_rows < 1) {
      return absl::InvalidArgumentError(absl::StrCat("scripted: a sequence has ", sequence.num_rows,
                                                     " rows from ", sequence.first_row,
                                                     ", the next one is ", next_row));
    }
    next_row += sequence.num_rows;
    const int64_t end = sequence.start_position + sequence.num_rows;
    if (end > options_.max_positions) {
      return absl::InvalidArgumentError(absl::StrCat(
          "scripted: position ", end - 1, " is asked for, the limit is ", options_.max_positions));
    }
  }
  const auto rows = static_cast<int64_t>(batch.tokens.size());
  if (next_row == rows) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("scripted: the sequences have ", next_row, " rows, the batch has ", rows));
}

absl::Duration ScriptedForward::TimeOf(const ForwardBatch& batch) const {
  const auto further = static_cast<int64_t>(batch.tokens.size() - batch.sequences.size());
  return options_.step_time + further * options_.prefill_token_time;
}

absl::Status ScriptedForward::Run(const ForwardBatch& batch, const kernels::Exec&) {
  ISTHMUS_RETURN_IF_ERROR(Validate(batch));
  clock_.Sleep(TimeOf(batch));
  // All are verified before the first is written: after an error no sequence has advanced.
  for (const SequenceKv& sequence : batch.sequences) ISTHMUS_RETURN_IF_ERROR(Verify(sequence));
  size_t wanted = 0;
  for (const SequenceKv& sequence : batch.sequences) {
    Record record;
    record.hash = EmptyHash(options_);
    if (sequence.start_position > 0) {
      record = RecordAt(sequence, kernels::kWindow, sequence.start_position - 1);
    }
    for (int64_t row = 0; row < sequence.num_rows; ++row) {
      const int64_t batch_row = sequence.first_row + row;
      Append(sequence, sequence.start_position + row, batch.tokens[static_cast<size_t>(batch_row)],
             record);
      if (wanted >= batch.logit_rows.size() || batch.logit_rows[wanted] != batch_row) continue;
      if (!batch.accepted.empty()) {
        int64_t more = std::min<int64_t>(TokensOfStep(options_, record.hash) - 1,
                                         batch.accepted_limits[wanted]);
        for (; more > 0; --more) {
          const int32_t token = NextToken(options_, record.hash);
          Append(sequence, record.num_tokens, token, record);
          batch.accepted[wanted].push_back(token);
        }
      }
      float* logits = batch.logits.f32(static_cast<int64_t>(wanted++));
      std::fill_n(logits, options_.vocab_size, 0.0f);
      // Far enough above the rest that no temperature draws another one.
      logits[NextToken(options_, record.hash)] = 1000.0f;
    }
  }
  return absl::OkStatus();
}

std::byte* ScriptedForward::RowAt(const SequenceKv& sequence, CacheKindIndex kind,
                                  int64_t position) const {
  const kernels::EntryPlane plane = layout_.Plane(kind, layout_.kinds[kind].layers[0]);
  return plane.data(sequence.state, position % plane.entries);
}

ScriptedForward::Record ScriptedForward::RecordAt(const SequenceKv& sequence, CacheKindIndex kind,
                                                  int64_t position) const {
  Record record;
  std::memcpy(&record, RowAt(sequence, kind, position), sizeof(record));
  return record;
}

void ScriptedForward::StoreRecord(const SequenceKv& sequence, const Record& record) const {
  for (const CacheKindIndex kind : kStateKinds) {
    Record stored = record;
    stored.magic = Mix(kMagic, static_cast<uint64_t>(kind));
    std::memcpy(RowAt(sequence, kind, record.num_tokens - 1), &stored, sizeof(stored));
  }
}

// Hash of the prefix that ends where `run` starts: the entry before it carries that.
uint64_t ScriptedForward::HashBefore(const SequenceKv& sequence, int64_t run) const {
  if (run == 0) return EmptyHash(options_);
  const kernels::PagedEntries entries = {
      sequence.pages[kernels::kHcaKv],
      layout_.Plane(kernels::kHcaKv, layout_.kinds[kernels::kHcaKv].layers[0])};
  uint64_t hash = 0;
  std::memcpy(&hash, entries.data(run - 1), sizeof(hash));
  return hash;
}

void ScriptedForward::Append(const SequenceKv& sequence, int64_t position, int32_t token,
                             Record& record) const {
  record.hash = Extend(record.hash, token);
  record.num_tokens = position + 1;
  record.tail[static_cast<size_t>(position % kEntryTokens)] = token;
  if (record.num_tokens % kEntryTokens == 0) {
    const int64_t entry = position / kEntryTokens;
    FillEntry(sequence, kernels::kCsaKv, entry, record.hash, std::as_bytes(std::span(record.tail)));
    FillEntry(sequence, kernels::kIndexKey, entry, record.hash, {});
    record.tail.fill(-1);
  }
  if (record.num_tokens % kRunTokens == 0) {
    FillEntry(sequence, kernels::kHcaKv, position / kRunTokens, record.hash,
              std::as_bytes(std::span(&record.hash, 1)));
  }
  StoreRecord(sequence, record);
}

void ScriptedForward::FillEntry(const SequenceKv& sequence, CacheKindIndex kind, int64_t entry,
                                uint64_t hash, std::span<const std::byte> carried) const {
  for (const int layer : layout_.kinds[kind].layers) {
    const kernels::PagedEntries entries = {sequence.pages[kind], layout_.Plane(kind, layer)};
    const EntryBytes bytes(hash, kind, entry, layer, carried,
                           static_cast<size_t>(entries.plane.data_bytes),
                           static_cast<size_t>(entries.plane.scale_bytes));
    std::memcpy(entries.data(entry), bytes.data().data(), bytes.data().size());
    std::memcpy(entries.scale(entry), bytes.scale().data(), bytes.scale().size());
  }
}

absl::Status ScriptedForward::VerifyEntry(const SequenceKv& sequence, CacheKindIndex kind,
                                          int64_t entry, uint64_t hash,
                                          std::span<const std::byte> carried) const {
  for (const int layer : layout_.kinds[kind].layers) {
    const kernels::PagedEntries entries = {sequence.pages[kind], layout_.Plane(kind, layer)};
    const EntryBytes expected(hash, kind, entry, layer, carried,
                              static_cast<size_t>(entries.plane.data_bytes),
                              static_cast<size_t>(entries.plane.scale_bytes));
    const std::span<const std::byte> data = {entries.data(entry), expected.data().size()};
    const std::span<const std::byte> scale = {entries.scale(entry), expected.scale().size()};
    const bool data_is_equal = std::ranges::equal(expected.data(), data);
    if (data_is_equal && std::ranges::equal(expected.scale(), scale)) continue;
    const auto [want, found] = data_is_equal ? FirstDifference(expected.scale(), scale)
                                             : FirstDifference(expected.data(), data);
    return Lost(absl::StrCat(layout_.kinds[kind].name, " entry ", entry, " of layer ", layer),
                entry * layout_.kinds[kind].tokens_per_entry, want, found);
  }
  return absl::OkStatus();
}

absl::Status ScriptedForward::VerifyRecord(const SequenceKv& sequence, CacheKindIndex kind,
                                           int64_t position) const {
  const std::string& name = layout_.kinds[kind].name;
  const Record record = RecordAt(sequence, kind, position);
  const uint64_t magic = Mix(kMagic, static_cast<uint64_t>(kind));
  if (record.magic != magic) {
    return Lost(absl::StrCat("mark of state ", name), position, magic, record.magic);
  }
  if (record.num_tokens == position + 1) return absl::OkStatus();
  return Lost(absl::StrCat("number of tokens in state ", name), position,
              static_cast<uint64_t>(position + 1), static_cast<uint64_t>(record.num_tokens));
}

absl::Status ScriptedForward::VerifyState(const SequenceKv& sequence) const {
  const int64_t last = sequence.start_position - 1;
  const Record first = RecordAt(sequence, kernels::kWindow, last);
  for (const CacheKindIndex kind : kStateKinds) {
    const int64_t oldest = kernels::OldestStateRow(layout_, kind, sequence.start_position);
    if (oldest > last) continue;
    ISTHMUS_RETURN_IF_ERROR(VerifyRecord(sequence, kind, last));
    ISTHMUS_RETURN_IF_ERROR(VerifyRecord(sequence, kind, oldest));
    const Record record = RecordAt(sequence, kind, last);
    if (record.hash != first.hash || record.tail != first.tail) {
      return Lost(absl::StrCat("hash in state ", layout_.kinds[kind].name), last, first.hash,
                  record.hash);
    }
  }
  return absl::OkStatus();
}

// The rows that exist of `position` know the hash of the prefix that ends with it.
absl::Status ScriptedForward::VerifyRows(const SequenceKv& sequence, int64_t position,
                                         uint64_t hash) const {
  for (const CacheKindIndex kind : kStateKinds) {
    if (position < kernels::OldestStateRow(layout_, kind, sequence.start_position)) continue;
    const Record record = RecordAt(sequence, kind, position);
    if (record.hash == hash) continue;
    return Lost(absl::StrCat("hash in state ", layout_.kinds[kind].name), position, hash,
                record.hash);
  }
  return absl::OkStatus();
}

// Follows the tokens in the pages from the hash at the start of the run to the one at its end.
absl::Status ScriptedForward::VerifyRun(const SequenceKv& sequence, int64_t run) const {
  const int64_t end = std::min((run + 1) * kRunTokens, sequence.start_position);
  const Record record = RecordAt(sequence, kernels::kWindow, sequence.start_position - 1);
  uint64_t hash = HashBefore(sequence, run);
  const int layer = layout_.kinds[kernels::kCsaKv].layers[0];
  const kernels::PagedEntries entries = {sequence.pages[kernels::kCsaKv],
                                         layout_.Plane(kernels::kCsaKv, layer)};
  int64_t position = run * kRunTokens;
  for (; position + kEntryTokens <= end; position += kEntryTokens) {
    const int64_t entry = position / kEntryTokens;
    std::array<int32_t, kEntryTokens> tokens{};
    std::memcpy(tokens.data(), entries.data(entry), sizeof(tokens));
    for (size_t t = 0; t < tokens.size(); ++t) {
      hash = Extend(hash, tokens[t]);
      ISTHMUS_RETURN_IF_ERROR(VerifyRows(sequence, position + static_cast<int64_t>(t), hash));
    }
    ISTHMUS_RETURN_IF_ERROR(
        VerifyEntry(sequence, kernels::kCsaKv, entry, hash, std::as_bytes(std::span(tokens))));
    ISTHMUS_RETURN_IF_ERROR(VerifyEntry(sequence, kernels::kIndexKey, entry, hash, {}));
  }
  for (; position < end; ++position) {
    hash = Extend(hash, record.tail[static_cast<size_t>(position % kEntryTokens)]);
    ISTHMUS_RETURN_IF_ERROR(VerifyRows(sequence, position, hash));
  }
  if (end % kRunTokens == 0) {
    ISTHMUS_RETURN_IF_ERROR(
        VerifyEntry(sequence, kernels::kHcaKv, run, hash, std::as_bytes(std::span(&hash, 1))));
  }
  if (end == sequence.start_position && hash != record.hash) {
    return Lost("hash of the prefix", end, record.hash, hash);
  }
  return absl::OkStatus();
}

absl::Status ScriptedForward::Verify(const SequenceKv& sequence) const {
  if (sequence.start_position == 0) return absl::OkStatus();
  ISTHMUS_RETURN_IF_ERROR(VerifyState(sequence));
  const int64_t last = (sequence.start_position - 1) / kRunTokens;
  const uint64_t chance =
      Mix(RecordAt(sequence, kernels::kWindow, sequence.start_position - 1).hash, kAsksRun);
  const auto middle = static_cast<int64_t>(chance % static_cast<uint64_t>(last + 1));
  ISTHMUS_RETURN_IF_ERROR(VerifyRun(sequence, 0));
  // From the first run of its page on: the hash that it starts from lies in the page before, so a
  // page of another sequence does not agree with itself alone.
  const int64_t page_runs = layout_.geometry.page_tokens / kRunTokens;
  for (int64_t run = middle / page_runs * page_runs; run <= middle; ++run) {
    ISTHMUS_RETURN_IF_ERROR(VerifyRun(sequence, run));
  }
  return VerifyRun(sequence, last);
}

}  // namespace isthmus::model
