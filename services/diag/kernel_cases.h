// SPDX-License-Identifier: Apache-2.0
// Calls of single operations on the weights and caches of a RandomModel, a layer each.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/exec.h"
#include "services/diag/random_model.h"

namespace isthmus::diag {

struct KernelCase {
  std::string name;
  bool has_trusted = true;  // The trusted path takes such arguments.
  // Patches of other operations do not touch it: what its patches' names begin with.
  std::vector<std::string> patch_prefixes;
  int64_t bytes = 0;       // That a call must read or write.
  int64_t operations = 0;  // Multiplications and additions of its products; 0: few.
  std::vector<std::function<absl::Status(const kernels::Exec&)>> calls;
};

// Memory for inputs and outputs of calls, random, given back with the object.
class CaseMemory {
 public:
  explicit CaseMemory(const kernels::Exec& exec) : exec_(exec) {}

  absl::StatusOr<kernels::MatrixView> Matrix(int64_t rows, int64_t cols);
  absl::StatusOr<kernels::MatrixView> Bf16Matrix(int64_t rows, int64_t cols);
  absl::StatusOr<int32_t*> Ids(const std::vector<int32_t>& ids);

 private:
  const kernels::Exec exec_;
  uint64_t seed_ = 1000;
  std::vector<kernels::DeviceBuffer> buffers_;
};

std::vector<std::string> CaseNames();

// InvalidArgument: an unknown name. A case without calls: no layer of the model has it.
absl::StatusOr<KernelCase> MakeCase(const std::string& name, const RandomModel& model,
                                    CaseMemory* memory);

}  // namespace isthmus::diag
