// SPDX-License-Identifier: Apache-2.0
// Goal: the 43-layer model at its full size walks through a machine that could never hold it.
// Method: a checkpoint with the true headers whose weights are holes of its files; one token goes
// through all layers, and after each of them the anonymous memory of this process is read. What
// the page cache holds may be dropped by the kernel at any time and does not count.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "services/diag/local_engine.h"
#include "services/model/tap.h"
#include "tests/tools/sparse_checkpoint.h"

namespace isthmus::fidelity {
namespace {

constexpr int64_t kLimitBytes = int64_t{4} << 30;

// Resident memory of this process that no file backs.
int64_t AnonymousBytes() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("RssAnon:", 0) == 0) return std::stoll(line.substr(8)) * 1024;
  }
  return -1;
}

class Folder {
 public:
  Folder() {
    std::string path = testing::TempDir() + "isthmus-layer-walk-XXXXXX";
    path_ = mkdtemp(path.data()) != nullptr ? path : "";
  }
  ~Folder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(LayerWalkTest, OneTokenGoesThroughAllLayersInFourGigabytes) {
  const Folder folder;
  ASSERT_FALSE(folder.path().empty());
  ASSERT_TRUE(tools::WriteSparseCheckpoint(folder.path()).ok());
  diag::LocalEngineOptions options;
  options.checkpoint = folder.path();
  options.max_tokens = 256;
  options.max_sequences = 1;
  auto opened = diag::LocalEngine::Create(options);
  ASSERT_TRUE(opened.ok()) << opened.status();
  diag::LocalEngine& local = **opened;
  EXPECT_FALSE(local.weights().report().is_packed);
  EXPECT_EQ(local.weights().config().num_hidden_layers, 43);

  int64_t peak = AnonymousBytes();
  ASSERT_GT(peak, 0);
  std::vector<int> layers;
  model::Tap tap;
  tap.on_tensor = [&](const model::TapTensor& tensor) {
    peak = std::max(peak, AnonymousBytes());
    if (tensor.name == "streams") layers.push_back(tensor.layer);
  };
  kv::SequenceCache cache = *local.pool().Open();
  ASSERT_TRUE(cache.Reserve(1).ok());
  const kernels::SequenceKv view = cache.View(0, 1);
  const int32_t token = 5;
  const int64_t row = 0;
  std::vector<float> logits(129280);
  const absl::Status status =
      local.forward().Run({.tokens = {&token, 1},
                           .sequences = {&view, 1},
                           .logit_rows = {&row, 1},
                           .logits = kernels::F32Matrix(logits.data(), 1, 129280),
                           .tap = &tap},
                          local.exec());
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(layers.size(), 43u);
  EXPECT_EQ(layers.back(), 42);
  EXPECT_LE(peak, kLimitBytes);
  RecordProperty("peak_anonymous_mib", static_cast<int>(peak >> 20));
  std::fprintf(stderr, "peak anonymous memory: %lld MiB\n", static_cast<long long>(peak >> 20));
  // Weights of zero give logits of zero; anything else was read from the wrong place.
  EXPECT_TRUE(std::all_of(logits.begin(), logits.end(), [](float x) { return x == 0.0f; }));
}

}  // namespace
}  // namespace isthmus::fidelity
