// SPDX-License-Identifier: Apache-2.0
// Fuzzes images of sequences: the first byte says whether the sums that follow are taken as they
// are (0) or made right first, so that what lies behind them is reached. What is accepted must be
// what the restored sequence is written as.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "services/base/check.h"
#include "services/base/clock.h"
#include "services/base/crc32c.h"
#include "services/engine/sequence_image.h"
#include "services/model/scripted_forward.h"

namespace isthmus::engine {
namespace {

constexpr size_t kSectionBytes = 16;

ImageTerms Terms() {
  ImageTerms terms;
  terms.weight_fingerprint = 1;
  return terms;
}

void MendSums(std::vector<std::byte>& image) {
  if (image.size() < kImageHeaderBytes + sizeof(uint32_t)) return;
  const auto store = [&image](size_t at, uint32_t sum) {
    std::memcpy(image.data() + at, &sum, sizeof(sum));
  };
  store(kImageHeaderBytes - 4, Crc32c(image.data(), kImageHeaderBytes - 4));
  const size_t end = image.size() - sizeof(uint32_t);
  for (size_t at = kImageHeaderBytes; at + kSectionBytes <= end;) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, image.data() + at + 8, sizeof(bytes));
    if (bytes > end - at - kSectionBytes) break;
    store(at + 4, Crc32c(image.data() + at + kSectionBytes, bytes));
    at += kSectionBytes + bytes;
  }
  store(end, Crc32c(image.data(), end));
}

struct Script {
  Script() {
    model::ScriptedOptions options;
    options.max_positions = 1000;
    options.page_tokens = 128;
    forward = *model::ScriptedForward::Create(options, clock);
    pool = *kv::CachePool::Create(forward->layout(), 1024, 1);
    engine = std::make_unique<Engine>(forward.get(), pool.get(), EngineOptions(), kernels::Exec());
  }
  SimulatedClock clock;
  std::unique_ptr<model::ScriptedForward> forward;
  std::unique_ptr<kv::CachePool> pool;
  std::unique_ptr<Engine> engine;
};

void FuzzImage(const std::vector<std::byte>& image) {
  static Script script;
  const auto restored = RestoreSequence(image, *script.engine, Terms());
  if (!restored.ok()) return;
  const auto written = WriteSequenceImage(*restored, *script.pool, Terms());
  ISTHMUS_CHECK(written.ok() && *written == image);
}

}  // namespace
}  // namespace isthmus::engine

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace isthmus::engine;  // NOLINT(google-build-using-namespace): a C entry point.
  if (size == 0) return 0;
  std::vector<std::byte> image(size - 1);
  if (size > 1) std::memcpy(image.data(), bytes + 1, size - 1);
  if (bytes[0] != 0) MendSums(image);
  FuzzImage(image);
  return 0;
}
