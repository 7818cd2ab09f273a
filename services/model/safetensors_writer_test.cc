// SPDX-License-Identifier: Apache-2.0
#include "services/model/safetensors_writer.h"

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/model/testing/checkpoint_files.h"

namespace isthmus::model {
namespace {

using ::testing::HasSubstr;

template <typename T>
std::span<const std::byte> BytesOf(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

TEST(SafetensorsWriterTest, WritesWhatTheReaderReads) {
  const TemporaryFolder folder;
  const std::vector<float> floats = {1.5f, -2.0f};
  const std::vector<uint8_t> odd = {1, 2, 3};
  const std::vector<int64_t> longs = {-7};
  const std::vector<int32_t> ints = {5, 6};
  const std::vector<uint16_t> halves = {0x3f80};
  const std::string path = folder.File("dump.safetensors");
  const absl::Status written =
      WriteSafetensors(path,
                       std::vector<NamedTensor>{{"odd", "U8", {3}, BytesOf(odd)},
                                                {"floats", "F32", {1, 2}, BytesOf(floats)},
                                                {"longs", "I64", {1}, BytesOf(longs)},
                                                {"ints", "I32", {2}, BytesOf(ints)},
                                                {"halves", "BF16", {}, BytesOf(halves)}},
                       {{"mode", "math"}});
  ASSERT_TRUE(written.ok()) << written;
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->header().metadata.at("mode"), "math");
  EXPECT_EQ(file->header().data_offset % 8, 0u);
  ASSERT_EQ(file->header().tensors.size(), 5u);
  for (const TensorEntry& entry : file->header().tensors) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(file->bytes_of(entry)) %
                  static_cast<uintptr_t>(TensorTypeBytes(entry.type)),
              0u)
        << entry.name;
    const std::byte* bytes = file->bytes_of(entry);
    if (entry.name == "floats") {
      EXPECT_EQ(entry.shape, (std::vector<int64_t>{1, 2}));
      EXPECT_EQ(std::memcmp(bytes, floats.data(), 8), 0);
    } else if (entry.name == "odd") {
      EXPECT_EQ(std::memcmp(bytes, odd.data(), 3), 0);
    } else if (entry.name == "longs") {
      EXPECT_EQ(std::memcmp(bytes, longs.data(), 8), 0);
    } else if (entry.name == "halves") {
      EXPECT_TRUE(entry.shape.empty());
      EXPECT_EQ(std::memcmp(bytes, halves.data(), 2), 0);
    }
  }
  EXPECT_FALSE(std::filesystem::exists(path + ".part"));
}

TEST(SafetensorsWriterTest, WritesAFileWithoutTensors) {
  const TemporaryFolder folder;
  ASSERT_TRUE(WriteSafetensors(folder.File("f"), {}, {}).ok());
  const auto file = SafetensorsFile::Open(folder.File("f"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->header().tensors.empty());
}

TEST(SafetensorsWriterTest, RefusesBadTensorsAndLeavesNoFile) {
  const TemporaryFolder folder;
  const std::vector<uint8_t> bytes = {1, 2, 3, 4};
  const auto error = [&](std::vector<NamedTensor> tensors) {
    const absl::Status status = WriteSafetensors(folder.File("f"), tensors, {});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_FALSE(std::filesystem::exists(folder.File("f")));
    EXPECT_FALSE(std::filesystem::exists(folder.File("f.part")));
    return std::string(status.message());
  };
  EXPECT_THAT(error({{"a", "F31", {1}, BytesOf(bytes)}}), HasSubstr("unknown dtype 'F31'"));
  EXPECT_THAT(error({{"a", "F32", {2}, BytesOf(bytes)}}),
              HasSubstr("'a' is F32 [2] = 8 bytes, given are 4"));
  EXPECT_THAT(error({{"a", "U8", {-4}, BytesOf(bytes)}}), HasSubstr("'a' has shape U8 [-4]"));
  EXPECT_THAT(error({{"a", "U8", {4}, BytesOf(bytes)}, {"a", "F32", {}, BytesOf(bytes)}}),
              HasSubstr("'a' is given twice"));
  EXPECT_THAT(error({{"__metadata__", "U8", {4}, BytesOf(bytes)}}), HasSubstr("__metadata__"));
  EXPECT_THAT(error({{"\xff", "U8", {4}, BytesOf(bytes)}}), HasSubstr("UTF-8"));
}

TEST(SafetensorsWriterTest, KeepsTheFileThatWasThereWhenItFails) {
  const TemporaryFolder folder;
  const absl::Status status = WriteSafetensors(folder.File("none/f"), {}, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("none/f.part: cannot create"));
  std::filesystem::create_directory(folder.File("f"));  // Cannot be replaced by a file.
  EXPECT_FALSE(WriteSafetensors(folder.File("f"), {}, {}).ok());
  EXPECT_TRUE(std::filesystem::is_directory(folder.File("f")));
  EXPECT_FALSE(std::filesystem::exists(folder.File("f.part")));
}

}  // namespace
}  // namespace isthmus::model
