// SPDX-License-Identifier: Apache-2.0
// Index keys in every format of keys, channel by channel: the scalar codecs. The vectorised ones of
// kKeyFp4 are in quantise.h, with the same bits.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/core/formats.h"
#include "kernels/core/host_device.h"
#include "kernels/core/kv_layout.h"
#include "kernels/core/quantise.h"

namespace isthmus::kernels {

// Data bytes of a key; 0 when `format` is no format of keys.
ISTHMUS_HOST_DEVICE inline int64_t IndexKeyBytes(EntryFormat format, int64_t dim) {
  if (format == EntryFormat::kKeyFp4) return dim / 2;
  if (format == EntryFormat::kKeyFp8) return dim;
  if (format == EntryFormat::kKeyBf16) return 2 * dim;
  return format == EntryFormat::kKeyF32 ? 4 * dim : 0;
}

// Channel `d` of the key at `data`, whose scales lie at `scale`.
ISTHMUS_HOST_DEVICE inline float IndexKeyValue(EntryFormat format, const std::byte* data,
                                               const std::byte* scale, int64_t d) {
  if (format == EntryFormat::kKeyF32) return reinterpret_cast<const float*>(data)[d];
  if (format == EntryFormat::kKeyBf16) {
    return Bf16Value(reinterpret_cast<const uint16_t*>(data)[d]);
  }
  if (format == EntryFormat::kKeyFp8) {
    return Fp8E4m3Value(static_cast<uint8_t>(data[d])) * *reinterpret_cast<const float*>(scale);
  }
  const auto pair = static_cast<uint8_t>(data[d / 2]);
  const auto code = static_cast<uint8_t>(d % 2 == 0 ? pair & 15 : pair >> 4);
  return Fp4E2m1Value(code) * Ue8m0Value(static_cast<uint8_t>(scale[d / kIndexKeyBlock]));
}

// x[dim] -> the key. fp8 has the power-of-two scale of an fp8 group (formats.h) over all channels.
inline void EncodeIndexKeyAs(EntryFormat format, const float* x, int dim, std::byte* data,
                             std::byte* scale) {
  if (format == EntryFormat::kKeyFp4) {
    EncodeIndexKey(x, dim, data, scale);
    return;
  }
  float amax = 0.0f;
  for (int d = 0; d < dim; ++d) amax = std::fmax(amax, std::fabs(x[d]));
  const float factor = PowerOfTwo(Fp8ScaleExponent(amax));
  if (format == EntryFormat::kKeyFp8) std::memcpy(scale, &factor, sizeof(factor));
  for (int64_t d = 0; d < dim; ++d) {
    if (format == EntryFormat::kKeyFp8) {
      data[d] = static_cast<std::byte>(Fp8E4m3Code(x[d] / factor));
    } else if (format == EntryFormat::kKeyBf16) {
      const uint16_t bits = Bf16Bits(x[d]);
      std::memcpy(data + 2 * d, &bits, sizeof(bits));
    } else {
      std::memcpy(data + 4 * d, x + d, sizeof(float));
    }
  }
}

}  // namespace isthmus::kernels
