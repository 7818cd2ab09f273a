// SPDX-License-Identifier: Apache-2.0
// The two arithmetics: a property of the model configuration and of the layout fingerprint, fixed
// per process, never a patch (ARCHITECTURE.md, "Arithmetic").
#pragma once

#include <cstdint>

namespace isthmus::kernels {

enum class Arithmetic : uint8_t {
  kMath,       // f32 throughout; no quantisation of activations, KV entries or index keys.
  kReference,  // The author's rounding points: model specification 2.7, 2.8, 3.2, 3.7 and 3.8.
};

}  // namespace isthmus::kernels
