// SPDX-License-Identifier: Apache-2.0
#include "tests/fidelity/tensor_set.h"

#include <cstddef>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/formats.h"
#include "services/base/status_macros.h"
#include "services/model/safetensors.h"

namespace isthmus::fidelity {
namespace {

template <typename T>
std::vector<float> ValuesOf(const std::byte* bytes, int64_t size) {
  std::vector<float> values(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    T value;
    std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    values[static_cast<size_t>(i)] = static_cast<float>(value);
  }
  return values;
}

absl::StatusOr<Tensor> TensorOf(const std::string& dtype, std::vector<int64_t> shape,
                                const std::byte* bytes) {
  Tensor tensor;
  tensor.dtype = dtype;
  if (shape.empty()) shape.push_back(1);
  int64_t size = 1;
  for (const int64_t axis : shape) size *= axis;
  tensor.shape = std::move(shape);
  if (dtype == "F32") {
    tensor.values = ValuesOf<float>(bytes, size);
  } else if (dtype == "I32") {
    tensor.values = ValuesOf<int32_t>(bytes, size);
  } else if (dtype == "U8") {
    tensor.values = ValuesOf<uint8_t>(bytes, size);
  } else if (dtype == "BF16") {
    tensor.values = ValuesOf<uint16_t>(bytes, size);
    for (float& value : tensor.values) {
      value = kernels::Bf16Value(static_cast<uint16_t>(value));
    }
  } else {
    return absl::InvalidArgumentError(absl::StrCat("no golden file has dtype ", dtype));
  }
  return tensor;
}

// {"layer0.streams": 1e-7, "layer1.topk": {"same": 1.0, "overlap": 1.0}, ...}
absl::Status ReadFloors(const std::string& text, std::map<std::string, Floor>* floors) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("metadata 'floor' is no JSON object");
  for (const auto& [name, value] : json.items()) {
    Floor floor;
    if (value.is_number()) floor.l2 = value.get<double>();
    if (value.is_object() && value.contains("overlap") && value["overlap"].is_number()) {
      floor.overlap = value["overlap"].get<double>();
    }
    (*floors)[name] = floor;
  }
  return absl::OkStatus();
}

}  // namespace

int64_t Tensor::row_size() const {
  return rows() == 0 ? 0 : static_cast<int64_t>(values.size()) / rows();
}

const Tensor* TensorSet::Find(const std::string& name) const {
  const auto it = tensors.find(name);
  return it == tensors.end() ? nullptr : &it->second;
}

absl::StatusOr<TensorSet> ReadTensorSet(const std::string& path) {
  ISTHMUS_ASSIGN_OR_RETURN(const model::SafetensorsFile file, model::SafetensorsFile::Open(path));
  TensorSet set;
  for (const model::TensorEntry& entry : file.header().tensors) {
    ISTHMUS_ASSIGN_OR_RETURN(set.tensors[entry.name],
                             TensorOf(std::string(model::TensorTypeName(entry.type)), entry.shape,
                                      file.bytes_of(entry)));
  }
  for (const auto& [key, value] : file.header().metadata) {
    if (key == "mode") set.mode = value;
    if (key == "floor") ISTHMUS_RETURN_IF_ERROR(ReadFloors(value, &set.floors));
    if (key == "factor" && !absl::SimpleAtod(value, &set.factor)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": factor is ", value));
    }
    if (key == "first_row_of_q_index_q_attn_core" &&
        !absl::SimpleAtoi(value, &set.first_late_row)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": first row is ", value));
    }
  }
  return set;
}

TensorSet FromDump(const diag::Dump& dump) {
  TensorSet set;
  for (const auto& [name, tensor] : dump) {
    auto converted = TensorOf(tensor.dtype, tensor.shape, tensor.bytes.data());
    if (converted.ok()) set.tensors[name] = *std::move(converted);
  }
  return set;
}

std::vector<int32_t> InputIds(const TensorSet& set) {
  std::vector<int32_t> ids;
  if (const Tensor* tensor = set.Find("input_ids"); tensor != nullptr) {
    for (const float value : tensor->values) ids.push_back(static_cast<int32_t>(value));
  }
  return ids;
}

}  // namespace isthmus::fidelity
