// SPDX-License-Identifier: Apache-2.0
// One number that two workers compare before they exchange a byte: same model, same weights.
#pragma once

#include <cstdint>

#include "services/base/thread_pool.h"
#include "services/model/checkpoint.h"
#include "services/model/model_config.h"

namespace isthmus::model {

// Hash of CanonicalModelConfig(config) and, in name order, of every tensor's name, dtype, shape and
// a content sample: all bytes up to 16 KiB; the first, middle and last 64 bytes up to 256 KiB; the
// middle 64 bytes above. Not cryptographic: it finds mistakes, not forgeries. Does not depend on
// the cut into shards or on `threads` (null: the calling thread alone).
uint64_t WeightFingerprint(const ModelConfig& config, const Checkpoint& checkpoint,
                           ThreadPool* threads);

}  // namespace isthmus::model
