// SPDX-License-Identifier: Apache-2.0
// All state of a sequence as bytes: its tokens, how it samples and everything that it has cached,
// so that another engine continues it bit by bit. For files, and to park what the pools have no
// room for.
//
// An image is a header, sections in a fixed order (the request, tokens, digests of logits, one per
// cache kind as in cache_image.h), each with its CRC32C, and a CRC32C of all before it. Integers
// are little-endian. Equal sequences have equal images, whatever pages they lie in.
//
// Errors     FailedPrecondition  Foreign or stale: another layout, checkpoint, salt or version.
//            DataLoss            Truncated, bytes behind its end, or a sum that differs.
//            InvalidArgument     Whole, but no sequence: counts that contradict each other.
//            All with both values. What was refused once is refused every time: drop it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/kv_layout.h"
#include "services/engine/engine.h"
#include "services/engine/sequence.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::engine {

// What an image and whoever reads it must have in common, and what bounds what is read.
struct ImageTerms {
  uint64_t weight_fingerprint = 0;  // Of checkpoint and model configuration.
  std::string salt;                 // The tenant's; its hash is in the image.
  int64_t max_tokens = std::numeric_limits<int32_t>::max();
};

// The image of a sequence with an open cache in `pool`. Between two steps; a GPU has done its work.
absl::StatusOr<std::vector<std::byte>> WriteSequenceImage(const Sequence& sequence,
                                                          kv::CachePool& pool,
                                                          const ImageTerms& terms);

// What an image says. The cache kinds are views of the bytes that were parsed.
struct SequenceImage {
  Sequence sequence;  // Without a cache.
  int64_t num_cached_tokens = 0;
  std::array<std::span<const std::byte>, kernels::kNumCacheKinds> kinds;
};

// Whether the first bytes of an image of `image_bytes` bytes are a header that ParseSequenceImage
// accepts: for whoever does not want to read the rest of one that it refuses.
inline constexpr size_t kImageHeaderBytes = 80;
absl::Status CheckImageHeader(std::span<const std::byte> leading, uint64_t image_bytes,
                              const kernels::KvLayout& layout, const ImageTerms& terms);

// Allocates no more than a small multiple of `bytes`, whatever they say.
absl::StatusOr<SequenceImage> ParseSequenceImage(std::span<const std::byte> bytes,
                                                 const kernels::KvLayout& layout,
                                                 const ImageTerms& terms);

// The sequence of an image, in pages and a slot that were free. InvalidArgument also for tokens or
// sampling values that the engine admits to nobody; ResourceExhausted: no room now.
absl::StatusOr<Sequence> RestoreSequence(std::span<const std::byte> bytes, Engine& engine,
                                         const ImageTerms& terms);

}  // namespace isthmus::engine
