// SPDX-License-Identifier: Apache-2.0
#include "services/base/check.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

namespace isthmus {

void CheckFailed(const char* file, int line, const char* text) {
  const std::string message =
      std::string(file) + ":" + std::to_string(line) + ": check failed: " + text + "\n";
  // write(2), since the heap or stdio may be what is broken.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, message.data(), message.size());
  std::abort();
}

}  // namespace isthmus
