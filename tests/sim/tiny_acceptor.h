// SPDX-License-Identifier: Apache-2.0
// The first step of every request, with the bundled model's tokenizer. Loaded once: it is the same
// for all seeds and no part of what is played.
#pragma once

#include "router/accept.h"

namespace isthmus::sim {

// Must be called first while no simulated thread runs.
const router::Acceptor& TinyAcceptor();

}  // namespace isthmus::sim
