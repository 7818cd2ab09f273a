// SPDX-License-Identifier: Apache-2.0
// Row quantisers of the reference arithmetic and the codecs of cache entries. Vectorised, bit-equal
// to the scalar codecs of formats.h on every SIMD target. Source: model specification 2.7, 3.2,
// 3.8, 4.2.
#pragma once

#include <cstddef>
#include <cstdint>

namespace isthmus::kernels {

// out = x rounded to the bf16 grid. out may be x.
void RoundBf16Row(const float* x, int64_t n, float* out);

// The fp8 round trip of 1 x `block` groups with power-of-two scales: out = e4m3(x / s) * s. Exact
// in f32. The last group may be short. out may be x.
void RoundTripFp8Row(const float* x, int64_t n, int64_t block, float* out);

// The fp4 round trip of 1 x 32 groups. out may be x.
void RoundTripFp4Row(const float* x, int64_t n, float* out);

// KV entry: x[head_dim] -> data (head_dim - rope_dim fp8 codes, then rope_dim bf16) and scale
// (8 bytes: one ue8m0 per 64, rest 0). The rope part must already be on the bf16 grid.
void EncodeKvEntry(const float* x, int head_dim, int rope_dim, std::byte* data, std::byte* scale);
// The inverse; exact. DecodeKvEntry(EncodeKvEntry(x)) is the value that the engine goes on with.
void DecodeKvEntry(const std::byte* data, const std::byte* scale, int head_dim, int rope_dim,
                   float* out);

// Index key: x[dim] (after the Hadamard transform) -> dim / 2 bytes of fp4 pairs and dim / 32
// ue8m0.
void EncodeIndexKey(const float* x, int dim, std::byte* data, std::byte* scale);
void DecodeIndexKey(const std::byte* data, const std::byte* scale, int dim, float* out);

}  // namespace isthmus::kernels
