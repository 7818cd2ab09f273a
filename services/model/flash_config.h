// SPDX-License-Identifier: Apache-2.0
// The shape of DeepSeek-V4-Flash without its checkpoint, for measurements at full size.
#pragma once

#include "services/model/model_config.h"

namespace isthmus::model {

// Its first `num_layers` layers, 43 at most (checked): two of ratio 0, then 4 and 128 in turn; the
// first three choose experts by token id.
ModelConfig FlashConfig(int num_layers);

}  // namespace isthmus::model
