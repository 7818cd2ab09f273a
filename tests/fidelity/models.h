// SPDX-License-Identifier: Apache-2.0
// The checkpoints and golden files that the fidelity tests run, opened once per test binary.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/arithmetic.h"
#include "kernels/testing/device.h"
#include "services/diag/dump.h"
#include "services/diag/local_engine.h"
#include "tests/fidelity/tensor_set.h"

namespace isthmus::fidelity {

// A folder of tests/golden, which every clone has.
std::string BundledPath(const std::string& relative);

struct EngineChoice {
  std::string checkpoint = {};
  kernels::Arithmetic arithmetic = kernels::Arithmetic::kMath;
  int threads = 1;
  int64_t index_topk = 0;  // 0: as the checkpoint says.
  std::string index_key_format = "default";
  std::string device = "cpu";
  bool batch_invariant = false;
  std::map<std::string, bool> patches = {};
};

// A fresh engine; the caller owns it.
absl::StatusOr<std::unique_ptr<diag::LocalEngine>> OpenEngine(const EngineChoice& choice);

// The tokens of `ids` that one dump needs: how it is cut into steps is the caller's.
struct DumpChoice {
  diag::DumpSet set = diag::DumpSet::kGolden;
  int64_t chunk_tokens = 0;
  int64_t decode_tokens = 0;
  std::string input_streams = {};
};

absl::StatusOr<diag::Dump> DumpOf(const EngineChoice& engine, const std::vector<int32_t>& ids,
                                  const DumpChoice& choice);

// `size` ids in [0, vocabulary), the same everywhere.
std::vector<int32_t> SeededIds(uint64_t seed, int64_t size, int64_t vocabulary);

}  // namespace isthmus::fidelity

// Of a test that runs on the CPU and on a GPU: a skip that is counted where the GPU is not there,
// or is the emulator, which would take an hour.
#define ISTHMUS_REQUIRE_PLACE(device)                                                \
  if ((device) != std::string("cpu")) {                                              \
    ISTHMUS_REQUIRE_DEVICE();                                                        \
    if (!::isthmus::kernels::IsRealDevice()) GTEST_SKIP() << "the emulator is slow"; \
  }                                                                                  \
  static_assert(true, "a semicolon follows")

// The full golden set, or a skip that is counted, or a failure where it is required.
#define ISTHMUS_REQUIRE_GOLDEN()                                                                  \
  if (::isthmus::kernels::testing::GoldenDir().empty()) {                                         \
    if (::isthmus::kernels::testing::GoldenRequired()) FAIL() << "ISTHMUS_GOLDEN_DIR is not set"; \
    GTEST_SKIP() << "ISTHMUS_GOLDEN_DIR is not set";                                              \
  }                                                                                               \
  static_assert(true, "a semicolon follows")
