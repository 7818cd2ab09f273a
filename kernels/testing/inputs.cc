// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/inputs.h"

#include <cmath>
#include <cstring>

#include "kernels/core/formats.h"
#include "kernels/core/pack.h"
#include "services/base/check.h"

namespace isthmus::kernels::testing {
namespace {

uint8_t* Bytes(OwnedWeight& w) { return reinterpret_cast<uint8_t*>(w.elements.data()); }

void Reserve(OwnedWeight& w, int64_t element_bytes, int64_t scale_bytes) {
  w.elements.assign(static_cast<size_t>((element_bytes + 7) / 8), 0);
  w.scales.assign(static_cast<size_t>(scale_bytes), 0);
  w.view.elements = w.elements.data();
  w.view.scales = w.scales.empty() ? nullptr : w.scales.data();
}

int64_t Blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

void FillFp8(Random& random, OwnedWeight& w, int middle) {
  const int64_t n = w.view.rows * w.view.cols;
  for (int64_t i = 0; i < n; ++i) {
    Bytes(w)[i] = Fp8E4m3Code(random.Normal() * 16.0f);
  }
  for (uint8_t& s : w.scales) s = static_cast<uint8_t>(middle - 4 + random.Below(3));
}

}  // namespace

Random::Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u) {
  if (state_ == 0) state_ = 1;
  for (int i = 0; i < 4; ++i) Bits();
}

uint64_t Random::Bits() {
  state_ ^= state_ >> 12;
  state_ ^= state_ << 25;
  state_ ^= state_ >> 27;
  return state_ * 0x2545f4914f6cdd1du;
}

int64_t Random::Below(int64_t n) {
  return static_cast<int64_t>((Bits() >> 32) * static_cast<uint64_t>(n) >> 32);
}

float Random::Uniform(float low, float high) {
  return low + (high - low) * static_cast<float>(Bits() >> 40) * 0x1p-24f;
}

float Random::Normal() {
  // Twelve 16-bit uniforms from three draws.
  int64_t sum = 0;
  for (int i = 0; i < 3; ++i) {
    const uint64_t bits = Bits();
    for (int j = 0; j < 4; ++j) sum += static_cast<int64_t>((bits >> (16 * j)) & 0xffffu);
  }
  return static_cast<float>(sum - int64_t{12} * 32768) * 0x1p-16f;
}

std::vector<float> NormalValues(uint64_t seed, int64_t n, float scale) {
  Random random(seed);
  std::vector<float> out(static_cast<size_t>(n));
  for (float& x : out) x = random.Normal() * scale;
  return out;
}

std::vector<float> OutlierValues(uint64_t seed, int64_t n, float scale) {
  Random random(seed);
  std::vector<float> out(static_cast<size_t>(n));
  for (float& x : out) x = random.Normal() * (random.Below(64) == 0 ? 20.0f * scale : scale);
  return out;
}

OwnedWeight RandomWeight(uint64_t seed, WeightFormat format, int64_t rows, int64_t cols) {
  Random random(seed);
  OwnedWeight w;
  w.view.format = format;
  w.view.rows = rows;
  w.view.cols = cols;
  const int64_t n = rows * cols;
  const float size = 1.0f / std::sqrt(static_cast<float>(cols));
  // ue8m0 byte of the power of two near `size`.
  const int middle = 127 - static_cast<int>(std::lround(std::log2(1.0f / size)));
  switch (format) {
    case WeightFormat::kF32:
      Reserve(w, 4 * n, 0);
      for (int64_t i = 0; i < n; ++i) {
        const float x = random.Normal() * size;
        std::memcpy(Bytes(w) + 4 * i, &x, sizeof(x));
      }
      break;
    case WeightFormat::kBf16:
      Reserve(w, 2 * n, 0);
      for (int64_t i = 0; i < n; ++i) {
        const uint16_t bits = Bf16Bits(random.Normal() * size);
        std::memcpy(Bytes(w) + 2 * i, &bits, sizeof(bits));
      }
      break;
    case WeightFormat::kFp8Block128:
      Reserve(w, n, Blocks(rows, 128) * Blocks(cols, 128));
      FillFp8(random, w, middle);
      break;
    case WeightFormat::kMxfp4:
      ISTHMUS_CHECK(cols % 32 == 0);
      Reserve(w, n / 2, rows * (cols / 32));
      for (int64_t i = 0; i < n / 2; ++i) Bytes(w)[i] = static_cast<uint8_t>(random.Bits() >> 56);
      for (uint8_t& s : w.scales) s = static_cast<uint8_t>(middle - 2 + random.Below(3));
      break;
    case WeightFormat::kNvfp4:
      ISTHMUS_CHECK(cols % 16 == 0);
      Reserve(w, n / 2, rows * (cols / 16));
      for (int64_t i = 0; i < n / 2; ++i) Bytes(w)[i] = static_cast<uint8_t>(random.Bits() >> 56);
      for (uint8_t& s : w.scales) s = Fp8E4m3Code(random.Uniform(64.0f, 448.0f));
      // Not a power of two, so that the general formula is what is tested.
      w.view.global_scale = size / 512.0f * 1.1f;
      break;
  }
  return w;
}

OwnedWeight WeightFrom(WeightFormat format, int64_t rows, int64_t cols,
                       const std::vector<float>& values) {
  ISTHMUS_CHECK(static_cast<int64_t>(values.size()) == rows * cols);
  ISTHMUS_CHECK(format == WeightFormat::kF32 || format == WeightFormat::kBf16);
  OwnedWeight w = RandomWeight(0, format, rows, cols);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = Bf16Bits(values[i]);
    if (format == WeightFormat::kF32) std::memcpy(Bytes(w) + 4 * i, &values[i], 4);
    if (format == WeightFormat::kBf16) std::memcpy(Bytes(w) + 2 * i, &bits, 2);
  }
  return w;
}

OwnedWeight Packed(const WeightView& w) {
  OwnedWeight packed;
  Reserve(packed, PackedElementBytes(w), PackedScaleBytes(w));
  packed.view = PackWeight(w, reinterpret_cast<std::byte*>(packed.elements.data()),
                           packed.scales.empty() ? nullptr : packed.scales.data());
  return packed;
}

}  // namespace isthmus::kernels::testing
