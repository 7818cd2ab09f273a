// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: chat requests and encoder files.
#include <cstddef>
#include <cstdint>

#include "services/text/fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  isthmus::text::FuzzChat({reinterpret_cast<const char*>(bytes), size});
  return 0;
}
