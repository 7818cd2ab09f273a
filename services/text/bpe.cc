// SPDX-License-Identifier: Apache-2.0
// BPE with a linked list of symbols and a heap of candidate merges.
#include "services/text/bpe.h"

#include <algorithm>
#include <limits>
#include <queue>

#include "absl/strings/str_cat.h"

namespace isthmus::text {
namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

struct Symbol {
  int32_t token = 0;
  uint32_t previous = kNone;
  uint32_t next = kNone;
  bool alive = true;
};

struct Candidate {
  int32_t rank = 0;
  uint32_t left = 0;  // Index of the left symbol.
  int32_t merged = 0;

  bool operator>(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : left > other.left;
  }
};

}  // namespace

const std::vector<int32_t>* PieceCache::Find(absl::string_view piece) const {
  const auto found = pieces_.find(piece);
  return found == pieces_.end() ? nullptr : &found->second;
}

void PieceCache::Insert(absl::string_view piece, const int32_t* ids, size_t count) {
  if (piece.size() > kMaxPieceBytes || pieces_.size() >= kMaxPieces) return;
  pieces_.try_emplace(std::string(piece), ids, ids + count);
}

absl::Status Bpe::AddMerge(int32_t left, int32_t right, int32_t rank, int32_t merged) {
  const auto [rule, inserted] = rules_.try_emplace(Pair(left, right), Rule{rank, merged});
  if (inserted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("merge ", rank, " of tokens ", left, " and ",
                                                 right, " repeats merge ", rule->second.rank));
}

void Bpe::Encode(absl::string_view piece, PieceCache* cache, std::vector<int32_t>* ids) const {
  if (piece.size() == 1) {
    ids->push_back(byte_tokens_[static_cast<uint8_t>(piece.front())]);
    return;
  }
  if (const std::vector<int32_t>* known = cache->Find(piece); known != nullptr) {
    ids->insert(ids->end(), known->begin(), known->end());
    return;
  }
  const size_t before = ids->size();
  Merge(piece, ids);
  cache->Insert(piece, ids->data() + before, ids->size() - before);
}

void Bpe::Merge(absl::string_view piece, std::vector<int32_t>* ids) const {
  std::vector<Symbol> symbols(piece.size());
  for (size_t i = 0; i < piece.size(); ++i) {
    symbols[i].token = byte_tokens_[static_cast<uint8_t>(piece[i])];
    if (i > 0) symbols[i].previous = static_cast<uint32_t>(i - 1);
    if (i + 1 < piece.size()) symbols[i].next = static_cast<uint32_t>(i + 1);
  }
  std::vector<Candidate> storage;
  storage.reserve(piece.size());
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap(std::greater<>(),
                                                                              std::move(storage));
  const auto push = [&](uint32_t left) {
    if (left == kNone || symbols[left].next == kNone) return;
    const auto rule = rules_.find(Pair(symbols[left].token, symbols[symbols[left].next].token));
    if (rule == rules_.end()) return;
    heap.push({rule->second.rank, left, rule->second.merged});
  };
  for (uint32_t i = 0; i + 1 < symbols.size(); ++i) push(i);
  while (!heap.empty()) {
    const Candidate top = heap.top();
    heap.pop();
    Symbol& left = symbols[top.left];
    if (!left.alive || left.next == kNone) continue;
    Symbol& right = symbols[left.next];
    // A neighbour may have been merged since: then the pair is another one, or has no rule.
    const auto rule = rules_.find(Pair(left.token, right.token));
    if (rule == rules_.end() || rule->second.merged != top.merged ||
        rule->second.rank != top.rank) {
      continue;
    }
    left.token = top.merged;
    left.next = right.next;
    right.alive = false;
    if (right.next != kNone) symbols[right.next].previous = top.left;
    push(left.previous);
    push(top.left);
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) ids->push_back(symbols[i].token);
}

}  // namespace isthmus::text
