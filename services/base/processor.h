// SPDX-License-Identifier: Apache-2.0
// The processor that this build needs: one with AVX2, FMA and F16C. The refusal runs before any
// static constructor that could already contain such instructions.
#pragma once

namespace isthmus {

// Does nothing by itself. A program that calls it links the check, which runs before main: on a
// processor without AVX2, FMA or F16C it writes one sentence to stderr and exits with 1.
void LinkProcessorCheck();

}  // namespace isthmus
