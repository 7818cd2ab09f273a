// SPDX-License-Identifier: Apache-2.0
// The router's status as people read it.
#pragma once

#include <string>

#include "proto/generate.pb.h"

namespace isthmus::ctl {

// A line about the router, then a table with a row per worker: role, address, state, incarnation,
// load with its age, this router's requests, free pages, lane. Below a row that is not ready, why.
std::string StatusTable(const v1::StatusReply& status);

}  // namespace isthmus::ctl
