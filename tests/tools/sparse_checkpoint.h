// SPDX-License-Identifier: Apache-2.0
// A checkpoint with the true shape of DeepSeek-V4-Flash and holes for weights: what a loader and a
// layer walk meet at full size, for some 50 MB of disk.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "services/model/model_config.h"

namespace isthmus::tools {

// config.json of DeepSeek-V4-Flash in the NVFP4 layout (model specification 1.1, 6.3).
std::string FlashConfigJson();

// Writes config.json, model.safetensors.index.json and 46 shards into `dir`, which must exist:
// the true names, types and shapes of the 43-layer model (specification 6.1, 6.3), routed experts
// as NVFP4, mtp.0 with MXFP4 experts. Shard 1 holds the embedding, 2 to 44 a layer each, 45 the
// head, 46 mtp.0.
//
// All tensor bytes are a hole of the file and read as zero, which is a valid value of every type
// (a ue8m0 scale of 2^-127, an NVFP4 scale of 0), but for the tables of the hash layers: their
// rows must hold distinct expert ids, so token t gets (6 t + i) mod 256 for i in 0..5, 19 MB in
// all.
absl::Status WriteSparseCheckpoint(const std::string& dir);

}  // namespace isthmus::tools
