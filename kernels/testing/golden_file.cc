// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/golden_file.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/formats.h"
#include "services/base/check.h"

namespace isthmus::kernels::testing {
namespace {

template <typename T>
T Element(const std::vector<std::byte>& bytes, int64_t i) {
  T value;
  std::memcpy(&value, bytes.data() + static_cast<size_t>(i) * sizeof(T), sizeof(T));
  return value;
}

float F16Value(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00) {
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return sign != 0 ? -value : value;
}

int64_t Product(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  return n;
}

[[noreturn]] void Wrong(absl::string_view what, absl::string_view name) {
  std::cerr << "golden file: " << what << " " << name << "\n" << std::flush;
  CheckFailed(__FILE__, __LINE__, "golden file holds what the test expects");
}

}  // namespace

int64_t GoldenArray::size() const { return Product(shape); }

std::vector<float> GoldenArray::F32() const {
  std::vector<float> out(static_cast<size_t>(size()));
  for (int64_t i = 0; i < size(); ++i) {
    float& x = out[static_cast<size_t>(i)];
    if (dtype == "F32") {
      x = Element<float>(bytes, i);
    } else if (dtype == "BF16") {
      x = Bf16Value(Element<uint16_t>(bytes, i));
    } else if (dtype == "F16") {
      x = F16Value(Element<uint16_t>(bytes, i));
    } else if (dtype == "F8_E4M3") {
      x = Fp8E4m3Value(Element<uint8_t>(bytes, i));
    } else if (dtype == "F8_E8M0") {
      x = Ue8m0Value(Element<uint8_t>(bytes, i));
    } else {
      x = static_cast<float>(Ints()[static_cast<size_t>(i)]);
    }
  }
  return out;
}

std::vector<int64_t> GoldenArray::Ints() const {
  std::vector<int64_t> out(static_cast<size_t>(size()));
  for (int64_t i = 0; i < size(); ++i) {
    int64_t& x = out[static_cast<size_t>(i)];
    if (dtype == "I64") {
      x = Element<int64_t>(bytes, i);
    } else if (dtype == "I32") {
      x = Element<int32_t>(bytes, i);
    } else if (dtype == "U8" || dtype == "BOOL") {
      x = Element<uint8_t>(bytes, i);
    } else if (dtype == "I8") {
      // NOLINTNEXTLINE(bugprone-signed-char-misuse): a number, not a character.
      x = Element<int8_t>(bytes, i);
    } else {
      Wrong("no integers in an array of", dtype);
    }
  }
  return out;
}

absl::StatusOr<GoldenFile> GoldenFile::Read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::NotFoundError(absl::StrCat("cannot open ", path));
  uint64_t header_bytes = 0;
  in.read(reinterpret_cast<char*>(&header_bytes), sizeof(header_bytes));
  if (!in || header_bytes > (uint64_t{64} << 20)) {
    return absl::DataLossError(absl::StrCat(path, ": header of ", header_bytes, " bytes"));
  }
  std::string header(header_bytes, '\0');
  in.read(header.data(), static_cast<std::streamsize>(header_bytes));
  const auto json = nlohmann::json::parse(header, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::DataLossError(absl::StrCat(path, ": header is not JSON"));
  GoldenFile file;
  try {
    for (const auto& [name, entry] : json.items()) {
      if (name == "__metadata__") continue;
      GoldenArray array;
      array.dtype = entry.at("dtype").get<std::string>();
      array.shape = entry.at("shape").get<std::vector<int64_t>>();
      const auto offsets = entry.at("data_offsets").get<std::vector<uint64_t>>();
      array.bytes.resize(offsets.at(1) - offsets.at(0));
      in.seekg(static_cast<std::streamoff>(8 + header_bytes + offsets.at(0)));
      in.read(reinterpret_cast<char*>(array.bytes.data()),
              static_cast<std::streamsize>(array.bytes.size()));
      if (!in) return absl::DataLossError(absl::StrCat(path, ": ", name, " is cut short"));
      file.arrays_.emplace(name, std::move(array));
    }
  } catch (const std::exception& e) {  // The JSON library reports wrong types by exceptions.
    return absl::DataLossError(absl::StrCat(path, ": ", e.what()));
  }
  return file;
}

bool GoldenFile::Has(absl::string_view name) const {
  return arrays_.find(std::string(name)) != arrays_.end();
}

const GoldenArray& GoldenFile::at(absl::string_view name) const {
  const auto it = arrays_.find(std::string(name));
  if (it == arrays_.end()) Wrong("no array", name);
  return it->second;
}

std::vector<std::string> GoldenFile::names() const {
  std::vector<std::string> out;
  out.reserve(arrays_.size());
  for (const auto& [name, array] : arrays_) out.push_back(name);
  return out;
}

std::string GoldenDir() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing in a test writes the environment.
  const char* dir = std::getenv("ISTHMUS_GOLDEN_DIR");
  return dir != nullptr ? dir : "";
}

bool GoldenRequired() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): as above.
  const char* ci = std::getenv("CI");
  return ci != nullptr && absl::string_view(ci) == "true";
}

}  // namespace isthmus::kernels::testing
