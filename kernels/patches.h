// SPDX-License-Identifier: Apache-2.0
// Every patch of every operation, in one list: what a configuration may switch, and what the tools
// show.
#pragma once

#include <map>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/patch.h"

namespace isthmus::kernels {

// In the order of the operations' names.
std::span<const Patch* const> AllPatches();

// A configuration that switches every one of them off: the trusted paths alone.
std::map<std::string, bool> NoPatches();

// The patches that `config` switches, over their defaults. For Exec::batch_invariant those with
// which few rows and many have different bits are off unless `config` names them: with these a
// row's bits depend on which rows it is computed with, so on chunks, prefix hits and where a saved
// sequence stopped. InvalidArgument: as PatchSet::Resolve.
absl::StatusOr<PatchSet> ResolvePatches(std::map<std::string, bool> config, bool batch_invariant);

}  // namespace isthmus::kernels
