// SPDX-License-Identifier: Apache-2.0
// Whether one more sequence may have pages: what all others hold, and what they are expected to
// grow by, must leave room for it in every pool. Sequences take their output's pages as they grow,
// so an expectation that was too small ends in a preemption, never in a failure.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/base/urgency.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::engine {

struct AdmissionOptions {
  // Which quantile of the lengths of recent replies a reply is expected to have. 0 to 1.
  double expected_output_quantile = 0.8;
  // Before the first reply has ended: this share of the longest length that it may have. 0 to 1.
  double first_output_share = 0.5;
};

// The lengths of the last replies that ended, at most kMaxLengths. Not thread-safe.
class OutputLengths {
 public:
  static constexpr size_t kMaxLengths = 256;

  void Add(int64_t num_output_tokens);

  // How many output tokens a reply that has `num_output_tokens` will have in the end, by those
  // replies that were longer; one that is longer than all of them may get as long again. More than
  // it has, and at most `max_output_tokens`.
  int64_t Expect(int64_t num_output_tokens, int64_t max_output_tokens,
                 const AdmissionOptions& options) const;

 private:
  std::vector<int64_t> lengths_;  // In order of time from next_ on, cyclically.
  std::vector<int64_t> sorted_;
  size_t next_ = 0;
};

// What a sequence asks for.
struct Demand {
  int64_t num_prompt_tokens = 0;
  int64_t max_output_tokens = 0;
  Urgency urgency = {};
  int64_t num_replies = 1;  // Sequences in the end, which share the full pages of the prompt.
  // Of the prompt: the pages of so many tokens are held for it already, and need no room.
  int64_t num_shared_tokens = 0;
  // Under which it asks running sequences of lower classes to give way where there is no room: the
  // request's own, whatever becomes of its tries. 0: it does not ask.
  uint64_t ask_id = 0;
  std::string request_id = {};  // For the log.
};

// How long room is kept for whom sequences gave way: a router comes again every 100 ms. Then, when
// they did in vain, how long nobody else of that class may ask. How long an ask waits for the next
// step.
inline constexpr absl::Duration kAskTime = absl::Seconds(1);
inline constexpr absl::Duration kAskPause = absl::Seconds(2);
inline constexpr absl::Duration kAskPatience = absl::Seconds(30);

// The book of all sequences that hold pages of a pool, or wait to have theirs back. Thread-safe.
class Admission {
 private:
  struct Line;

 public:
  // `pool` and `clock` must outlive the admission, and the admission its claims.
  Admission(kv::CachePool* pool, const AdmissionOptions& options, Clock& clock);
  ~Admission();

  // One sequence's line in the book, while it lives. Move-only; one thread at a time.
  class Claim {
   public:
    Claim() = default;
    Claim(Claim&& other) noexcept;
    Claim& operator=(Claim&& other) noexcept;
    ~Claim();

    bool is_open() const { return admission_ != nullptr; }

    // The sequence runs, and has pages for so many tokens, so many of which are output.
    void SetTokens(int64_t num_held_tokens, int64_t num_output_tokens);

    // A claim for another reply to the same prompt, which was counted from the start. Not more
    // often than the demand has replies beside the first.
    Claim Fork();

    // It has given its pages back and waits until it may have them again.
    void SetPreempted();

    // Whether its sequence should do that for a newcomer: one of a higher class that is more
    // urgent, and not before it has gained a token since the last time, so that it comes to its end
    // whoever comes and goes.
    bool GivesWayTo(const Urgency& newcomer) const;

    // Whether a preempted sequence may have pages for the tokens that it has again, and for those
    // that are expected. ResourceExhausted names pool, numbers and the reason.
    absl::Status CheckResume() const;

    // The sequence has come to its end by itself: others are expected to be as long.
    void NoteEnd(int64_t num_output_tokens) const;

   private:
    friend class Admission;
    Admission* admission_ = nullptr;
    std::shared_ptr<Line> line_;
  };

  // A claim for a sequence that now takes pages for its prompt and one token. ResourceExhausted,
  // with the pool's name and numbers: no room now, one that was preempted or for which others gave
  // way goes before it, or too many are preempted. HasRoomSoon: its ask stands, since running
  // sequences that should give way to it hold all that it lacks.
  absl::StatusOr<Claim> Admit(const Demand& demand);

  // One ask stands at a time. Who runs the sequences reads it while it is open, has them give way,
  // and closes it; the room is then kept until the asker comes or its time is over: who goes behind
  // it is neither admitted nor resumed.
  std::optional<Demand> OpenAsk() const;
  // Whether there is room for it, or will be once the sequences of `given_up` hold nothing. True
  // when it stands no more: nobody need give way.
  bool HasRoomForAsk(uint64_t ask_id, std::span<const Claim* const> given_up) const;
  // `num_preempted` gave way, and nobody else does. False: in vain.
  bool CloseAsk(uint64_t ask_id, int64_t num_preempted);

 private:
  enum class AskState : uint8_t { kOpen, kKept, kInVain };
  struct Ask {
    std::shared_ptr<Line> line;
    AskState state = AskState::kOpen;
    absl::Time until;       // When it is over by itself.
    absl::Time kept_until;  // How long who goes behind it is kept out.
    int64_t num_preempted = 0;
  };
  static std::shared_ptr<Line> LineOf(const Demand& demand);
  Claim OpenLocked(std::shared_ptr<Line> line);
  absl::Status CheckTurnLocked(const Line& newcomer) const;
  absl::Status CheckRoomLocked(const Line& newcomer, std::span<const Line* const> given_up) const;
  bool MayAskLocked(const Demand& demand) const;
  bool AskLocked(std::shared_ptr<Line> line);
  int64_t FinalPagesLocked(const Line& line, kernels::CacheKindIndex kind) const;

  kv::CachePool* const pool_;
  const AdmissionOptions options_;
  Clock& clock_;
  mutable Mutex mutex_;
  std::vector<Line*> lines_;  // Guarded by mutex_, as all below.
  OutputLengths lengths_;
  std::optional<Ask> ask_;  // The last one, until it is admitted or nobody can give way; it may be
                            // over.
};

}  // namespace isthmus::engine
