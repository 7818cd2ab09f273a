// SPDX-License-Identifier: Apache-2.0
// The two status macros of the project: return early on an error, or unwrap a value.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define ISTHMUS_CONCAT_INNER_(a, b) a##b
#define ISTHMUS_CONCAT_(a, b) ISTHMUS_CONCAT_INNER_(a, b)

// Returns the status of `expr` from the enclosing function unless it is OK.
#define ISTHMUS_RETURN_IF_ERROR(expr)                  \
  do {                                                 \
    absl::Status isthmus_status_ = (expr);             \
    if (!isthmus_status_.ok()) return isthmus_status_; \
  } while (false)

#define ISTHMUS_ASSIGN_OR_RETURN_(tmp, lhs, expr)                                         \
  auto tmp = (expr); /* NOLINT(bugprone-macro-parentheses): `tmp` is declared here. */    \
  if (!tmp.ok()) return std::move(tmp).status(); /* NOLINT(bugprone-macro-parentheses) */ \
  lhs = *std::move(tmp) /* NOLINT(bugprone-macro-parentheses): `lhs` may declare too. */

// Assigns the value of a StatusOr to `lhs` (which may declare a variable), or returns its status.
#define ISTHMUS_ASSIGN_OR_RETURN(lhs, expr) \
  ISTHMUS_ASSIGN_OR_RETURN_(ISTHMUS_CONCAT_(isthmus_status_or_, __LINE__), lhs, expr)
