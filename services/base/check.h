// SPDX-License-Identifier: Apache-2.0
// Checks of invariants: a failure is a bug of ours, so the process ends with a clear last word and
// its supervisor restarts it. Untrusted input and environment faults are statuses instead.
#pragma once

namespace isthmus {

// Prints "file:line: check failed: text" to stderr and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* text);

}  // namespace isthmus

#define ISTHMUS_CHECK(condition)                                              \
  do {                                                                        \
    if (!(condition)) ::isthmus::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (false)

// A check that only debug, sanitizer, simulation and integration builds pay for.
#ifdef ISTHMUS_CHECK_INVARIANTS
#define ISTHMUS_DCHECK(condition) ISTHMUS_CHECK(condition)
#else
#define ISTHMUS_DCHECK(condition) static_cast<void>(0)
#endif
