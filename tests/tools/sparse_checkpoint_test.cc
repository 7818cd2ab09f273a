// SPDX-License-Identifier: Apache-2.0
#include "tests/tools/sparse_checkpoint.h"

#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "gtest/gtest.h"
#include "services/model/testing/checkpoint_files.h"
#include "services/model/weights.h"

namespace isthmus::tools {
namespace {

// Bytes on disk and nominal bytes of the files in `dir`.
struct FolderSize {
  int64_t on_disk = 0;
  int64_t nominal = 0;
};
FolderSize SizeOf(const std::string& dir) {
  FolderSize out;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    struct stat status = {};
    EXPECT_EQ(stat(entry.path().c_str(), &status), 0);
    out.on_disk += int64_t{512} * status.st_blocks;
    out.nominal += status.st_size;
  }
  return out;
}

TEST(SparseCheckpointTest, HasTheTrueSizeAndNearlyNoneOnDisk) {
  const model::TemporaryFolder folder;
  const absl::Status written = WriteSparseCheckpoint(folder.path());
  ASSERT_TRUE(written.ok()) << written;
  const FolderSize size = SizeOf(folder.path());
  EXPECT_NEAR(static_cast<double>(size.nominal), 168.27e9, 0.1e9);  // Specification 6.3.
  EXPECT_LT(size.on_disk, 100'000'000);

  // Larger than any limit for packing here: mapped in place, every tensor accounted for.
  const auto weights = model::Weights::Load(folder.path(), {});
  ASSERT_TRUE(weights.ok()) << weights.status();
  const model::WeightReport& report = (*weights)->report();
  EXPECT_EQ(report.num_shards, 46);
  EXPECT_EQ(report.nvfp4_expert_matrices, 33024);
  EXPECT_EQ(report.lossless_casts, 0);  // weight_scale_2 = 0 is no power of two.
  EXPECT_EQ(report.num_mtp_stages, 1);
  EXPECT_FALSE(report.is_packed);
  EXPECT_LT(report.allocated_bytes, 64 << 20);
  EXPECT_EQ((*weights)->layer(2).hash_ids[6 * 129279 + 5], (6 * 129279 + 5) % 256);
}

}  // namespace
}  // namespace isthmus::tools
