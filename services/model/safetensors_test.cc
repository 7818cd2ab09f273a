// SPDX-License-Identifier: Apache-2.0
#include "services/model/safetensors.h"

#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/model/testing/checkpoint_files.h"

namespace isthmus::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A file by hand: length prefix, header, `data_bytes` zero bytes.
std::string FileOf(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + header + std::string(data_bytes, '\0');
}

std::string ErrorOf(const std::string& file) {
  const auto header = ParseSafetensorsHeader(file, file.size(), "f.safetensors");
  EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument) << file;
  EXPECT_THAT(std::string(header.status().message()), HasSubstr("f.safetensors: "));
  return std::string(header.status().message());
}

std::string ErrorOf(const std::string& header, size_t data_bytes) {
  return ErrorOf(FileOf(header, data_bytes));
}

TEST(SafetensorsTest, ReadsTensorsInFileOrder) {
  const std::string file = FileOf(R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
                                  R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                                  R"("e":{"dtype":"U8","shape":[0,7],"data_offsets":[16,16]},)"
                                  R"("__metadata__":{"format":"pt"}}   )",
                                  16);
  const auto header = ParseSafetensorsHeader(file, file.size(), "f");
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_EQ(header->tensors.size(), 3u);
  EXPECT_EQ(header->tensors[0].name, "a");
  EXPECT_EQ(header->tensors[0].type, TensorType::kF32);
  EXPECT_TRUE(header->tensors[0].shape.empty());
  EXPECT_EQ(header->tensors[1].name, "b");
  EXPECT_THAT(header->tensors[1].shape, ElementsAre(2, 3));
  EXPECT_EQ(header->tensors[1].begin, 4u);
  EXPECT_EQ(header->tensors[1].end, 16u);
  EXPECT_EQ(header->tensors[2].name, "e");
  EXPECT_EQ(header->metadata.at("format"), "pt");
  EXPECT_EQ(header->data_offset, file.size() - 16);
}

TEST(SafetensorsTest, KnowsEveryTypeByName) {
  for (const char* name : {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64",
                           "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}) {
    const auto type = TensorTypeFromName(name);
    ASSERT_TRUE(type.has_value()) << name;
    EXPECT_EQ(TensorTypeName(*type), name);
  }
  EXPECT_EQ(TensorTypeBytes(TensorType::kBf16), 2);
  EXPECT_EQ(TensorTypeBytes(TensorType::kF8E8m0), 1);
  EXPECT_FALSE(TensorTypeFromName("f32").has_value());
}

TEST(SafetensorsTest, RefusesAbsurdHeaderLengths) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("has 0 bytes"));
  EXPECT_THAT(ErrorOf("1234567"), HasSubstr("has 7 bytes"));
  EXPECT_THAT(ErrorOf(std::string(8, '\xff')),
              HasSubstr("header of 18446744073709551615 bytes, at most 100000000"));
  std::string truncated = FileOf(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 0);
  truncated.resize(30);
  EXPECT_THAT(ErrorOf(truncated), HasSubstr("bytes in a file of 30 bytes; is it truncated?"));
  // The limit itself is compared before anything is read.
  std::string length(8, '\0');
  const uint64_t above = kMaxHeaderBytes + 1;
  std::memcpy(length.data(), &above, 8);
  const auto header = ParseSafetensorsHeader(length, uint64_t{1} << 40, "f");
  EXPECT_THAT(std::string(header.status().message()), HasSubstr("header of 100000001 bytes"));
}

TEST(SafetensorsTest, RefusesMalformedHeaders) {
  EXPECT_THAT(ErrorOf("", 0), HasSubstr("not JSON"));
  EXPECT_THAT(ErrorOf("[]", 0), HasSubstr("header is not an object"));
  EXPECT_THAT(ErrorOf("{\"a\":3}", 0), HasSubstr("'a' is not an object"));
  EXPECT_THAT(ErrorOf("{\"a\":{}}", 0), HasSubstr("must have dtype, shape and data_offsets"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":1,"shape":[],"data_offsets":[0,4]}})", 4),
              HasSubstr("dtype that is not a string"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F4","shape":[],"data_offsets":[0,4]}})", 4),
              HasSubstr("unknown dtype 'F4'"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})", 4),
              HasSubstr("shape that is not a list"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4),
              HasSubstr("dimension that is not a size"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4),
              HasSubstr("dimension that is not a size"));
  EXPECT_THAT(
      ErrorOf(R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})", 0),
      HasSubstr("overflows 64 bits"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0]}})", 4),
              HasSubstr("needs two data_offsets"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,"4"]}})", 4),
              HasSubstr("offset that is not a size"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"x":1}})", 4),
              HasSubstr("nothing else"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":{"a":1}})", 0), HasSubstr("'a' is not a string"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":1})", 0), HasSubstr("__metadata__ is not an object"));
  EXPECT_THAT(ErrorOf("{\"a\xff\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1),
              HasSubstr("not JSON at byte"));
  EXPECT_THAT(ErrorOf("{\"a\":" + std::string(5000, '['), 0), HasSubstr("nested deeper than 32"));
}

TEST(SafetensorsTest, RefusesANameTwice) {
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},)"
                      R"("a":{"dtype":"U8","shape":[],"data_offsets":[1,2]}})",
                      2),
              HasSubstr("key 'a' appears twice"));
}

TEST(SafetensorsTest, RefusesOffsetsThatDoNotTileTheFile) {
  const auto two = [](int a, int b, int c, int d) {
    return absl::StrCat(R"({"a":{"dtype":"U8","shape":[)", b - a, R"(],"data_offsets":[)", a, ",",
                        b, R"(]},"b":{"dtype":"U8","shape":[)", d - c, R"(],"data_offsets":[)", c,
                        ",", d, "]}}");
  };
  EXPECT_TRUE(
      ParseSafetensorsHeader(FileOf(two(0, 4, 4, 8), 8), FileOf(two(0, 4, 4, 8), 8).size(), "f")
          .ok());
  EXPECT_THAT(ErrorOf(two(0, 4, 3, 7), 7),
              HasSubstr("'b' begins at byte 3, inside the tensor before it, which ends at 4"));
  EXPECT_THAT(ErrorOf(two(0, 4, 5, 9), 9),
              HasSubstr("'b' begins at byte 5, leaving a hole after byte 4"));
  EXPECT_THAT(ErrorOf(two(1, 4, 4, 9), 9),
              HasSubstr("'a' begins at byte 1, leaving a hole after byte 0"));
  EXPECT_THAT(ErrorOf(two(0, 4, 4, 8), 7),
              HasSubstr("'b' ends at byte 8, the file holds 7 bytes of tensors; is it truncated"));
  EXPECT_THAT(ErrorOf(two(0, 4, 4, 8), 9),
              HasSubstr("tensors end at byte 8, the file holds 9 bytes"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}})", 4),
              HasSubstr("'a' runs backwards, from byte 4 to 0"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4),
              HasSubstr("is F32 [2] = 8 bytes, but its offsets hold 4"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[9223372036854775804,)"
                      R"(18446744073709551612]}})",
                      4),
              HasSubstr("offset that is not a size"));
}

TEST(SafetensorsFileTest, OpensThroughASymbolicLink) {
  const TemporaryFolder folder;
  WriteFileBytes(folder.File("real"),
                 FileOf(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", 0) + "xyz");
  ASSERT_EQ(symlink("real", folder.File("link").c_str()), 0);
  auto file = SafetensorsFile::Open(folder.File("link"));
  ASSERT_TRUE(file.ok()) << file.status();
  SafetensorsFile moved = *std::move(file);
  ASSERT_EQ(moved.header().tensors.size(), 1u);
  EXPECT_EQ(std::memcmp(moved.bytes_of(moved.header().tensors[0]), "xyz", 3), 0);
}

TEST(SafetensorsFileTest, RefusesWhatIsNotAFile) {
  const TemporaryFolder folder;
  EXPECT_EQ(SafetensorsFile::Open(folder.File("none")).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open(folder.path()).status().code(),
            absl::StatusCode::kInvalidArgument);
  WriteFileBytes(folder.File("empty"), "");
  EXPECT_THAT(std::string(SafetensorsFile::Open(folder.File("empty")).status().message()),
              HasSubstr("has 0 bytes"));
}

}  // namespace
}  // namespace isthmus::model
