// SPDX-License-Identifier: Apache-2.0
// Every patch of every operation, in one list: what a configuration may switch, and what the tools
// show.
#pragma once

#include <span>

#include "services/base/patch.h"

namespace isthmus::kernels {

// In the order of the operations' names.
std::span<const Patch* const> AllPatches();

}  // namespace isthmus::kernels
