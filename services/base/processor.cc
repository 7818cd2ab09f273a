// SPDX-License-Identifier: Apache-2.0
// Compiled for the oldest x86-64, unlike everything else, and without abseil: an inline function
// shared with another file could be the copy that was compiled for AVX2.
#include "services/base/processor.h"

#include <unistd.h>

namespace isthmus {
namespace {

// 101 is the first priority open to programs: ahead of every ordinary static constructor.
__attribute__((constructor(101))) void RefuseOldProcessor() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return;
  }
  static constexpr char kText[] =
      "isthmus: this processor lacks AVX2, FMA or F16C, which every build of isthmus needs "
      "(x86-64-v3: Intel Haswell, AMD Excavator or later).\n";
  // Nothing can be done about a stderr that is closed.
  if (write(STDERR_FILENO, kText, sizeof(kText) - 1) < 0) _exit(1);
  _exit(1);
}

}  // namespace

void LinkProcessorCheck() {}

}  // namespace isthmus
