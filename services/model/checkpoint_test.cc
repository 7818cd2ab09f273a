// SPDX-License-Identifier: Apache-2.0
#include "services/model/checkpoint.h"

#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/model/testing/checkpoint_files.h"

namespace isthmus::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string IndexError(const std::string& text) {
  const auto index = ParseCheckpointIndex(text);
  EXPECT_EQ(index.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(index.status().message());
}

TEST(CheckpointIndexTest, ListsTensorsAndShardsByName) {
  const auto index = ParseCheckpointIndex(
      R"({"metadata":{"total_size":9},"weight_map":{"b":"y.safetensors","a":"x.safetensors",)"
      R"("c":"x.safetensors"}})");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->shards, ElementsAre("x.safetensors", "y.safetensors"));
  ASSERT_EQ(index->tensors.size(), 3u);
  EXPECT_EQ(index->tensors[0].tensor, "a");
  EXPECT_EQ(index->tensors[0].shard, 0);
  EXPECT_EQ(index->tensors[1].tensor, "b");
  EXPECT_EQ(index->tensors[1].shard, 1);
}

TEST(CheckpointIndexTest, RefusesNamesThatLeaveTheFolder) {
  for (const char* name :
       {"../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", ".safetensors",
        "a\\\\b.safetensors", "x.bin", "a\\u0000.safetensors", "..safetensors"}) {
    EXPECT_THAT(IndexError(absl::StrCat(R"({"weight_map":{"a":")", name, "\"}}")),
                HasSubstr("must be a file name without folders"))
        << name;
  }
}

TEST(CheckpointIndexTest, RefusesMalformedText) {
  EXPECT_THAT(IndexError("{"), HasSubstr("not JSON"));
  EXPECT_THAT(IndexError("3"), HasSubstr("is not an object"));
  EXPECT_THAT(IndexError("{}"), HasSubstr("weight_map is not an object with tensors"));
  EXPECT_THAT(IndexError(R"({"weight_map":{}})"), HasSubstr("weight_map is not an object with"));
  EXPECT_THAT(IndexError(R"({"weight_map":[]})"), HasSubstr("weight_map is not an object with"));
  EXPECT_THAT(IndexError(R"({"weight_map":{"a":1}})"), HasSubstr("'a' is not a string"));
  EXPECT_THAT(IndexError(R"({"weight_map":{"a":"x.safetensors","a":"y.safetensors"}})"),
              HasSubstr("key 'a' appears twice"));
  EXPECT_THAT(IndexError("{\"weight_map\":{\"\xc3\x28\":\"x.safetensors\"}}"),
              HasSubstr("not JSON at byte"));
}

// Two shards with one byte tensors, written and indexed as told.
class CheckpointTest : public ::testing::Test {
 protected:
  void Shard(const std::string& file, const std::vector<std::string>& names) {
    static const std::vector<std::byte> kByte(1);
    std::vector<NamedTensor> tensors;
    for (const std::string& name : names) tensors.push_back({name, "U8", {1}, kByte});
    ASSERT_TRUE(WriteSafetensors(folder_.File(file), tensors, {}).ok());
  }
  void Index(const std::string& weight_map) {
    WriteFileBytes(folder_.File("model.safetensors.index.json"),
                   absl::StrCat("{\"weight_map\":", weight_map, "}"));
  }
  std::string OpenError(absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    const absl::Status status = Checkpoint::Open(folder_.path()).status();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  }

  TemporaryFolder folder_;
};

TEST_F(CheckpointTest, FindsTensorsInAllShards) {
  Shard("x.safetensors", {"c", "a"});
  Shard("y.safetensors", {"b"});
  Index(R"({"a":"x.safetensors","b":"y.safetensors","c":"x.safetensors"})");
  const auto checkpoint = Checkpoint::Open(folder_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->tensors().size(), 3u);
  EXPECT_EQ(checkpoint->tensors()[0].name, "a");
  ASSERT_NE(checkpoint->Find("b"), nullptr);
  EXPECT_EQ(checkpoint->Find("b")->size, 1);
  EXPECT_EQ(checkpoint->Find("d"), nullptr);
  EXPECT_EQ(checkpoint->num_shards(), 2);
}

TEST_F(CheckpointTest, FollowsSymbolicLinksToShards) {
  std::filesystem::create_directory(folder_.File("blobs"));
  Shard("blobs/1234", {"a"});
  ASSERT_EQ(symlink("blobs/1234", folder_.File("x.safetensors").c_str()), 0);
  Index(R"({"a":"x.safetensors"})");
  EXPECT_TRUE(Checkpoint::Open(folder_.path()).ok());
}

TEST_F(CheckpointTest, TakesASingleFileWithoutIndex) {
  Shard("model.safetensors", {"a", "b"});
  const auto checkpoint = Checkpoint::Open(folder_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->tensors().size(), 2u);
}

TEST_F(CheckpointTest, NamesWhatIsMissing) {
  EXPECT_THAT(OpenError(absl::StatusCode::kNotFound),
              HasSubstr("nor is there a model.safetensors.index.json"));
  Shard("x.safetensors", {"a"});
  Index(R"({"a":"x.safetensors","b":"y.safetensors"})");
  EXPECT_THAT(OpenError(absl::StatusCode::kNotFound), HasSubstr("/y.safetensors: cannot open"));
}

TEST_F(CheckpointTest, RefusesAnIndexThatDisagreesWithTheShards) {
  Shard("x.safetensors", {"a"});
  Shard("y.safetensors", {"b"});
  Index(R"({"a":"x.safetensors","b":"y.safetensors","c":"x.safetensors"})");
  EXPECT_THAT(OpenError(), HasSubstr("puts tensor 'c' in"));
  Index(R"({"a":"y.safetensors","b":"y.safetensors"})");
  EXPECT_THAT(OpenError(), HasSubstr("puts tensor 'a'"));
  Shard("y.safetensors", {"b", "d"});
  Index(R"({"a":"x.safetensors","b":"y.safetensors"})");
  EXPECT_THAT(OpenError(), HasSubstr("has no tensor 'd'"));
  Index(R"({"a":"y.safetensors","b":"x.safetensors","d":"y.safetensors"})");
  EXPECT_THAT(OpenError(), ::testing::AllOf(HasSubstr("puts tensor 'a'"), HasSubstr("it is in")));
}

TEST_F(CheckpointTest, RefusesATensorInTwoShards) {
  Shard("x.safetensors", {"a", "b"});
  Shard("y.safetensors", {"b"});
  Index(R"({"a":"x.safetensors","b":"y.safetensors"})");
  EXPECT_THAT(OpenError(),
              ::testing::AllOf(HasSubstr("tensor 'b' is in"), HasSubstr("x.safetensors and in"),
                               HasSubstr("y.safetensors")));
}

TEST_F(CheckpointTest, RefusesATruncatedShardByName) {
  Shard("x.safetensors", {"a", "b"});
  Index(R"({"a":"x.safetensors","b":"x.safetensors"})");
  const auto size = std::filesystem::file_size(folder_.File("x.safetensors"));
  std::filesystem::resize_file(folder_.File("x.safetensors"), size - 1);
  EXPECT_THAT(OpenError(),
              ::testing::AllOf(HasSubstr("/x.safetensors: tensor '"), HasSubstr("truncated")));
}

}  // namespace
}  // namespace isthmus::model
