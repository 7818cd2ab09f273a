// SPDX-License-Identifier: Apache-2.0
// Which tensors a checkpoint must hold: name, dtype and shape of every one, from the configuration
// (model specification 6.1, 6.3, 8), and the comparison with what is there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/core/weight.h"
#include "services/model/checkpoint.h"
#include "services/model/model_config.h"
#include "services/model/safetensors.h"

namespace isthmus::model {

struct PlannedTensor {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
};

// The speculative stages `mtp.0` to `mtp.{num_stages - 1}`. April: each stage is one draft block
// with its own projections. DSpark: one drafter in several stages.
struct MtpPlan {
  int num_stages = 0;
  bool is_dspark = false;
};

// How the routed expert matrix `base` ("layers.3.ffn.experts.7.w1") is stored: kMxfp4, kNvfp4 or
// kFp8Block128.
using ExpertFormatOf = absl::FunctionRef<kernels::WeightFormat(const std::string& base)>;

// All tensors, in no particular order.
std::vector<PlannedTensor> PlanTensors(const ModelConfig& config, const MtpPlan& mtp,
                                       ExpertFormatOf expert_format);

// The format of an expert matrix by the dtype of its weight: I8 is MXFP4, U8 is NVFP4, F8_E4M3 is
// FP8 ("-Base" releases). With any other dtype, or none, the scales that are there decide, so that
// the error names what is wrong.
kernels::WeightFormat FindExpertFormat(const Checkpoint& checkpoint, const std::string& base);

// Stages by their names, and their kind by the presence of mtp.0.main_proj or main_norm.
MtpPlan FindMtpPlan(const Checkpoint& checkpoint);

// Holds every tensor of `checkpoint` against the plan. InvalidArgument lists up to 16 tensors that
// are missing, surplus, or of another dtype or shape (expected and found), and counts the rest.
// mtp.*.emb.weight and mtp.*.head.weight, copies of the main model's, are ignored. A configuration
// with num_nextn_predict_layers > 0 wants at least that many stages; more are allowed, since the
// field says 1 for three DSpark stages (specification 1.2).
absl::Status CheckTensors(const ModelConfig& config, const Checkpoint& checkpoint);

// True for names under mtp., whose tensors are validated and not executed.
bool IsMtpTensor(absl::string_view name);

}  // namespace isthmus::model
