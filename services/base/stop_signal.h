// SPDX-License-Identifier: Apache-2.0
// SIGINT and SIGTERM as something that main waits for, instead of code that runs at any moment.
#pragma once

#include "absl/time/time.h"

namespace isthmus {

// Blocks both signals in this thread and in all that it starts. Called first thing in main, before
// any library starts a thread.
void BlockStopSignals();

// Waits for one of them for at most `timeout`. Returns its number, or 0 when none came.
int WaitForStopSignal(absl::Duration timeout);

}  // namespace isthmus
