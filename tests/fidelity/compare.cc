// SPDX-License-Identifier: Apache-2.0
#include "tests/fidelity/compare.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "kernels/core/formats.h"

namespace isthmus::fidelity {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// "layer3.topk" -> "topk".
std::string QuantityOf(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? name : name.substr(dot + 1);
}

bool IsOneOf(absl::string_view word, std::initializer_list<absl::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Inputs and places, which say what a file holds and are no results.
bool IsInput(absl::string_view quantity) {
  return IsOneOf(quantity, {"input_ids", "positions", "next_ids", "window_pos", "router_bias"});
}
bool IsSet(absl::string_view quantity) { return IsOneOf(quantity, {"topk", "router_ids"}); }
bool IsKvBytes(absl::string_view quantity) {
  return IsOneOf(quantity, {"kv_bytes", "compressed_bytes", "window_bytes"});
}

double LeastLimit(const TensorSet& golden, absl::string_view quantity, const Tensor& want) {
  if (golden.mode == "math") return 1e-5;
  if (IsOneOf(quantity, {"index_keys", "index_q", "index_key_bytes"})) return 2e-2;
  if (IsKvBytes(quantity) || IsOneOf(quantity, {"kv", "compressed_kv"})) return 1e-2;
  return want.dtype == "BF16" ? 0x1p-8 : 1e-5;
}

Tensor TakeRows(const Tensor& tensor, const std::vector<int64_t>& rows) {
  Tensor out = tensor;
  const int64_t width = tensor.row_size();
  out.shape[0] = static_cast<int64_t>(rows.size());
  out.values.clear();
  for (const int64_t row : rows) {
    const auto start = tensor.values.begin() + row * width;
    out.values.insert(out.values.end(), start, start + width);
  }
  return out;
}

// Both tensors padded to the wider one's columns, as sets and scores of other lengths may be.
void PadColumns(float fill, Tensor* tensor, int64_t columns) {
  const int64_t width = tensor->row_size();
  if (width >= columns) return;
  std::vector<float> padded(static_cast<size_t>(tensor->rows() * columns), fill);
  for (int64_t row = 0; row < tensor->rows(); ++row) {
    std::copy_n(tensor->values.begin() + row * width, width, padded.begin() + row * columns);
  }
  tensor->values = std::move(padded);
  tensor->shape[1] = columns;
}

// The rows of `got` that the golden tensor holds; nullopt when the shapes cannot be matched.
std::optional<Tensor> AlignRows(const TensorSet& golden, const std::string& name,
                                const Tensor& want, const Tensor& got) {
  if (got.rows() == want.rows()) return got;
  std::vector<int64_t> rows;
  const Tensor* positions = golden.Find("positions");
  if (positions != nullptr && positions->rows() == want.rows()) {
    for (const float position : positions->values) rows.push_back(static_cast<int64_t>(position));
  } else if (IsOneOf(QuantityOf(name), {"q", "index_q", "attn_core"})) {
    for (int64_t i = 0; i < want.rows(); ++i) rows.push_back(golden.first_late_row + i);
  }
  if (rows.empty() || rows.back() >= got.rows()) return std::nullopt;
  return TakeRows(got, rows);
}

struct Pair {
  Tensor want;
  Tensor got;
};

std::optional<Pair> Align(const TensorSet& golden, const std::string& name, const Tensor& want,
                          const Tensor& got) {
  std::optional<Tensor> rows = AlignRows(golden, name, want, got);
  if (!rows.has_value()) return std::nullopt;
  Pair pair = {want, *std::move(rows)};
  const std::string quantity = QuantityOf(name);
  if (want.shape.size() == 2 && pair.got.shape.size() == 2 &&
      IsOneOf(quantity, {"topk", "index_scores"})) {
    const float fill = quantity == "topk" ? -1.0f : -std::numeric_limits<float>::infinity();
    PadColumns(fill, &pair.want, pair.got.shape[1]);
    PadColumns(fill, &pair.got, pair.want.shape[1]);
  }
  if (pair.want.values.size() != pair.got.values.size()) return std::nullopt;
  return pair;
}

std::set<float> MembersOfRow(const Tensor& tensor, int64_t row) {
  std::set<float> members;
  for (int64_t i = 0; i < tensor.row_size(); ++i) {
    const float member = tensor.values[static_cast<size_t>(row * tensor.row_size() + i)];
    if (member >= 0.0f) members.insert(member);
  }
  return members;
}

void CompareSets(const TensorSet& golden, const Pair& pair, Verdict* verdict) {
  double overlap = 0.0;
  double same = 0.0;
  const int64_t rows = pair.want.rows();
  for (int64_t row = 0; row < rows; ++row) {
    const std::set<float> want = MembersOfRow(pair.want, row);
    const std::set<float> got = MembersOfRow(pair.got, row);
    double shared = 0.0;
    for (const float member : want) shared += got.contains(member) ? 1.0 : 0.0;
    const double all = static_cast<double>(want.size() + got.size()) - shared;
    overlap += all > 0.0 ? shared / all : 1.0;
    same += want == got ? 1.0 : 0.0;
  }
  overlap = rows > 0 ? overlap / static_cast<double>(rows) : 1.0;
  verdict->same_rows = rows > 0 ? same / static_cast<double>(rows) : 1.0;
  verdict->error = 1.0 - overlap;
  const auto floor = golden.floors.find(verdict->name);
  const double floor_overlap = floor == golden.floors.end() ? 1.0 : floor->second.overlap;
  verdict->limit = golden.mode == "math" ? 0.0 : golden.factor * (1.0 - floor_overlap) + 0.01;
  verdict->passed = verdict->error <= verdict->limit;
  verdict->explanation =
      absl::StrFormat("%-28s rows equal %.4f, overlap %.4f (at least %.4f)", verdict->name,
                      verdict->same_rows, overlap, std::max(0.0, 1.0 - verdict->limit));
}

// How often the likeliest token is the same, and the mean KL divergence of the distributions.
std::string LogitLine(const Tensor& want, const Tensor& got) {
  const int64_t width = want.row_size();
  double same = 0.0;
  double divergence = 0.0;
  for (int64_t row = 0; row < want.rows(); ++row) {
    const float* a = want.values.data() + row * width;
    const float* b = got.values.data() + row * width;
    const float* a_max = std::max_element(a, a + width);
    const float* b_max = std::max_element(b, b + width);
    same += a_max - a == b_max - b ? 1.0 : 0.0;
    double a_sum = 0.0;
    double b_sum = 0.0;
    for (int64_t i = 0; i < width; ++i) {
      a_sum += std::exp(double{a[i]} - *a_max);
      b_sum += std::exp(double{b[i]} - *b_max);
    }
    for (int64_t i = 0; i < width; ++i) {
      const double log_a = double{a[i]} - *a_max - std::log(a_sum);
      const double log_b = double{b[i]} - *b_max - std::log(b_sum);
      divergence += std::exp(log_a) * (log_a - log_b);
    }
  }
  const double rows = std::max(1.0, static_cast<double>(want.rows()));
  return absl::StrFormat(", arg max equal %.4f, mean KL %.2e", same / rows, divergence / rows);
}

void CompareValues(const TensorSet& golden, const Pair& pair, Verdict* verdict) {
  const std::string quantity = QuantityOf(verdict->name);
  const auto floor = golden.floors.find(verdict->name);
  const double noise = floor == golden.floors.end() ? 0.0 : golden.factor * floor->second.l2;
  verdict->limit = LeastLimit(golden, quantity, pair.want);
  if (golden.mode != "math") verdict->limit = std::max(verdict->limit, noise);
  std::string more;
  if (IsKvBytes(quantity) || quantity == "index_key_bytes") {
    const auto decode = IsKvBytes(quantity) ? DecodeKvEntries : DecodeIndexKeys;
    verdict->error = RelativeL2(decode(pair.want).values, decode(pair.got).values);
    double same = 0.0;
    for (size_t i = 0; i < pair.want.values.size(); ++i) {
      same += pair.want.values[i] == pair.got.values[i] ? 1.0 : 0.0;
    }
    verdict->same_rows = same / std::max(1.0, static_cast<double>(pair.want.values.size()));
    more = absl::StrFormat(", bytes equal %.5f", verdict->same_rows);
  } else {
    verdict->error = RelativeL2(pair.want.values, pair.got.values);
    if (quantity == "logits") more = LogitLine(pair.want, pair.got);
  }
  verdict->passed = verdict->error <= verdict->limit;
  verdict->explanation =
      absl::StrFormat("%-28s L2 %.2e, limit %.1e", verdict->name, verdict->error, verdict->limit) +
      more;
}

std::string ShapeText(const Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.shape, ", "), "]");
}

}  // namespace

bool Comparison::passed() const {
  return missing.empty() && !verdicts.empty() &&
         std::all_of(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.passed; });
}

std::string Comparison::Report(bool all) const {
  std::string report;
  for (const Verdict& verdict : verdicts) {
    if (verdict.passed && !all) continue;
    absl::StrAppend(&report, "\n", verdict.explanation, verdict.passed ? "" : "  <<<");
  }
  if (!missing.empty()) absl::StrAppend(&report, "\nmissing: ", absl::StrJoin(missing, ", "));
  if (verdicts.empty()) absl::StrAppend(&report, "\nnothing was compared");
  return report;
}

const Verdict* Comparison::Find(const std::string& name) const {
  for (const Verdict& verdict : verdicts) {
    if (verdict.name == name) return &verdict;
  }
  return nullptr;
}

Comparison Compare(const TensorSet& golden, const TensorSet& got) {
  Comparison comparison;
  for (const auto& [name, want] : golden.tensors) {
    const std::string quantity = QuantityOf(name);
    if (IsInput(quantity)) continue;
    const Tensor* tensor = got.Find(name);
    if (tensor == nullptr) {
      comparison.missing.push_back(name);
      continue;
    }
    Verdict verdict;
    verdict.name = name;
    const std::optional<Pair> pair = Align(golden, name, want, *tensor);
    if (!pair.has_value()) {
      verdict.error = kInfinity;
      verdict.explanation =
          absl::StrCat(name, ": golden ", ShapeText(want), ", dump ", ShapeText(*tensor));
    } else if (IsSet(quantity)) {
      CompareSets(golden, *pair, &verdict);
    } else {
      CompareValues(golden, *pair, &verdict);
    }
    comparison.verdicts.push_back(std::move(verdict));
  }
  return comparison;
}

Tensor DecodeKvEntries(const Tensor& bytes) {
  constexpr int64_t kNope = 448;
  constexpr int64_t kRope = 64;
  Tensor out;
  out.dtype = "F32";
  out.shape = {bytes.rows(), kNope + kRope};
  for (int64_t row = 0; row < bytes.rows(); ++row) {
    const float* entry = bytes.values.data() + row * bytes.row_size();
    const auto byte = [&](int64_t i) { return static_cast<uint8_t>(entry[i]); };
    for (int64_t d = 0; d < kNope; ++d) {
      const float scale = kernels::Ue8m0Value(byte(kNope + 2 * kRope + d / 64));
      out.values.push_back(kernels::Fp8E4m3Value(byte(d)) * scale);
    }
    for (int64_t d = 0; d < kRope; ++d) {
      const int low = byte(kNope + 2 * d);
      const int high = byte(kNope + 2 * d + 1);
      out.values.push_back(kernels::Bf16Value(static_cast<uint16_t>(low | high << 8)));
    }
  }
  return out;
}

Tensor DecodeIndexKeys(const Tensor& bytes) {
  constexpr int64_t kKey = 128;
  Tensor out;
  out.dtype = "F32";
  out.shape = {bytes.rows(), kKey};
  for (int64_t row = 0; row < bytes.rows(); ++row) {
    const float* entry = bytes.values.data() + row * bytes.row_size();
    for (int64_t d = 0; d < kKey; ++d) {
      const int pair = static_cast<int>(entry[d / 2]);  // The even index in the low nibble.
      const auto code = static_cast<uint8_t>(d % 2 == 0 ? pair & 15 : pair >> 4);
      const float scale = kernels::Ue8m0Value(static_cast<uint8_t>(entry[kKey / 2 + d / 32]));
      out.values.push_back(kernels::Fp4E2m1Value(code) * scale);
    }
  }
  return out;
}

double RelativeL2(const std::vector<float>& want, const std::vector<float>& got) {
  double difference = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(want[i])) continue;  // Masked scores are -infinity.
    if (!std::isfinite(got[i])) return kInfinity;
    const double d = double{got[i]} - want[i];
    difference += d * d;
    norm += double{want[i]} * want[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30);
}

}  // namespace isthmus::fidelity
