// SPDX-License-Identifier: Apache-2.0
// From a row of logits and what a request says about its tokens to the next token, what is told
// about it, and whether it is the last one. A step may yield several tokens, drafted ones first:
// whatever ends a reply ends it at the first token that fits, and nothing behind that is kept.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"
#include "services/engine/sequence.h"
#include "services/model/row_draw.h"

namespace isthmus::engine {

// What of the model the sampler knows.
struct SamplerModel {
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
  int32_t end_token_id = 1;
};

// InvalidArgument names the field with its value and what is allowed: numbers that are not finite
// or out of range, ids outside the vocabulary, lists that are too long or name an id twice, a least
// length above the longest, bans that leave no token.
absl::Status ValidateSamplingParams(const SamplingParams& sampling, const SamplerModel& model);

// Whether tokens that the forward pass drafts are what the sampler would draw. They are not where
// it draws from other logits than the model's, may not yet end the reply, or has to say something
// about every row: such sequences gain one token in a step.
bool TakesDrafts(const Sequence& sequence);

// The draw of the next token, where it depends on nothing but the model's logits and where nothing
// else is wanted of them, so that the forward pass may make it: no changes of the logits, nothing
// told about them, no further replies to draw for.
std::optional<model::RowDraw> DrawOf(const Sequence& sequence);

// How the reply ends with `token` as its output token number `index`, from 0 on: kNone when it goes
// on. Where a stop and a limit meet, it is the stop.
FinishReason FinishWith(const Sequence& sequence, int32_t token, int64_t index,
                        const SamplerModel& model);

// What a sequence gains in one step.
struct Gain {
  std::vector<DrawnToken> tokens;
  FinishReason finish = FinishReason::kNone;
  // With the first token: those of the replies that share the prompt, in the order of
  // SamplingParams::further_seeds.
  std::vector<DrawnToken> further;
};

// `drafted`: tokens that the forward pass has accepted already; `logits`: the row behind the last
// of them, [vocab], which is not changed. `drawn_id`: what the forward pass has drawn from that row
// by DrawOf, whose logits are not read then. Of the sequence nothing changes but its `counts`,
// which catch up with its tokens where they are asked for. InvalidArgument: the row has no finite
// logit.
absl::StatusOr<Gain> DrawTokens(Sequence& sequence, std::span<const int32_t> drafted,
                                const kernels::VectorView& logits, const SamplerModel& model,
                                const kernels::Exec& exec, int32_t drawn_id = model::kNotDrawn);

// Writes what was gained into the sequence.
void Append(Gain gain, Sequence& sequence);

// Calls look(row, exec) for `count` rows of logits, on the threads of `exec` where there is enough
// to do; each call has an `exec` with scratch of its own and no threads. The error is that of the
// first row that has one, whoever came to it when.
absl::Status ForEachRow(
    int64_t count, int64_t vocab, const kernels::Exec& exec,
    absl::FunctionRef<absl::Status(int64_t row, const kernels::Exec& exec)> look);

// Bytes of scratch that ForEachRow takes on the host with draws of tokens in it, at most.
int64_t DrawScratchBytes(int64_t vocab, int threads);

}  // namespace isthmus::engine
