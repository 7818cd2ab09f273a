// SPDX-License-Identifier: Apache-2.0
// Pages for a step, and what to do when there are not enough: the least urgent sequences give
// theirs back and are recomputed later, by the ordinary step, since all that it takes are the
// tokens that they have. Their sampler state stays, so nothing of it shows in the output.
//
// No livelock: the order of urgency never changes, pages go to the more urgent first, and only
// from the less urgent are they taken. So the most urgent sequence always goes on, then the next.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "services/engine/engine.h"
#include "services/engine/sequence.h"

namespace isthmus::engine {

// Takes the pages that Engine::Step may need for `sequences`, the most urgent one's first, and
// tells their claims. ResourceExhausted: there are not enough; those that were taken are kept.
absl::Status ReserveStep(Engine& engine, std::span<Sequence* const> sequences);

// ResourceExhausted, with both numbers: the pool as a whole is too small for one more token of the
// sequence, whatever else gives way.
absl::Status CheckFitsAlone(Engine& engine, const Sequence& sequence);

// Gives back everything that the sequence caches.
void Preempt(Sequence& sequence);

// A state slot, and pages for all tokens that a preempted sequence has and one more.
// ResourceExhausted: not now, or not by what others are expected to need.
absl::Status Resume(Engine& engine, Sequence& sequence);

}  // namespace isthmus::engine
