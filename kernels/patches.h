// SPDX-License-Identifier: Apache-2.0
// Every patch of every operation, in one list: what a configuration may switch, and what the tools
// show.
#pragma once

#include <map>
#include <span>
#include <string>

#include "services/base/patch.h"

namespace isthmus::kernels {

// In the order of the operations' names.
std::span<const Patch* const> AllPatches();

// A configuration that switches every one of them off: the trusted paths alone.
std::map<std::string, bool> NoPatches();

}  // namespace isthmus::kernels
