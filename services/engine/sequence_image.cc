// SPDX-License-Identifier: Apache-2.0
#include "services/engine/sequence_image.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/crc32c.h"
#include "services/base/prefix_hash.h"
#include "services/base/status_macros.h"
#include "services/engine/cache_image.h"
#include "services/engine/image_request.h"

namespace isthmus::engine {
namespace {

static_assert(std::endian::native == std::endian::little, "images are little-endian");

// Raised whenever a byte changes its meaning or a field comes or goes.
constexpr uint32_t kVersion = 1;
constexpr uint64_t kMagic = 0x5145534d48545349u;  // "ISTHMSEQ"

struct Header {
  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  uint32_t num_sections = 0;
  uint64_t layout_fingerprint = 0;
  uint64_t weight_fingerprint = 0;
  PrefixHash salt_hash;
  uint64_t image_bytes = 0;
  uint64_t num_tokens = 0;
  uint64_t num_cached_tokens = 0;
  uint32_t num_request_fields = 0;
  uint32_t crc32c = 0;  // Of all before it.
};
static_assert(sizeof(Header) == kImageHeaderBytes &&
              std::has_unique_object_representations_v<Header>);

struct SectionHeader {
  uint32_t section = 0;
  uint32_t crc32c = 0;  // Of the bytes.
  uint64_t bytes = 0;
};
static_assert(sizeof(SectionHeader) == 16);

// Sections, in this order; the cache kinds follow.
constexpr uint32_t kRequest = 0;
constexpr uint32_t kTokens = 1;
constexpr uint32_t kDigests = 2;
constexpr uint32_t kFirstKind = 3;
constexpr uint32_t kNumSections = kFirstKind + kernels::kNumCacheKinds;

std::string SectionName(uint32_t section, const kernels::KvLayout& layout) {
  if (section == kRequest) return "request";
  if (section == kTokens) return "tokens";
  if (section == kDigests) return "digests";
  return layout.kinds[section - kFirstKind].name;
}

// Appends sections with their sums, and patches what is known only in the end.
class ImageWriter {
 public:
  ImageWriter() : bytes_(sizeof(Header)) {}

  // The section is what `append` appends to the bytes.
  template <typename Append>
  absl::Status AddSection(Append append) {
    const size_t start = bytes_.size();
    bytes_.resize(start + sizeof(SectionHeader));
    ISTHMUS_RETURN_IF_ERROR(append(bytes_));
    const std::span<const std::byte> payload =
        std::span(bytes_).subspan(start + sizeof(SectionHeader));
    const SectionHeader section = {num_sections_++, Crc32c(payload.data(), payload.size()),
                                   payload.size()};
    std::memcpy(bytes_.data() + start, &section, sizeof(section));
    return absl::OkStatus();
  }

  std::vector<std::byte> Finish(Header header) {
    header.num_sections = num_sections_;
    header.image_bytes = bytes_.size() + sizeof(uint32_t);
    header.crc32c = Crc32c(&header, offsetof(Header, crc32c));
    std::memcpy(bytes_.data(), &header, sizeof(header));
    const uint32_t total = Crc32c(bytes_.data(), bytes_.size());
    const auto sum = std::as_bytes(std::span(&total, 1));
    bytes_.insert(bytes_.end(), sum.begin(), sum.end());
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
  uint32_t num_sections_ = 0;
};

template <typename T>
absl::Status AppendList(std::span<const T> values, std::vector<std::byte>& out) {
  const auto bytes = std::as_bytes(values);
  out.insert(out.end(), bytes.begin(), bytes.end());
  return absl::OkStatus();
}

template <typename T>
std::vector<T> ReadList(std::span<const std::byte> bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

absl::Status Foreign(absl::string_view what, uint64_t found, uint64_t expected) {
  return absl::FailedPreconditionError(
      absl::StrFormat("sequence image: %s is %016x, ours %016x", what, found, expected));
}

PrefixHash SaltHash(const kernels::KvLayout& layout, const ImageTerms& terms) {
  return PrefixRoot(terms.salt, layout.fingerprint, terms.weight_fingerprint);
}

std::string Hex(const PrefixHash& hash) {
  return absl::StrFormat("%016x%016x", hash.high, hash.low);
}

absl::Status Damaged(absl::string_view what, uint64_t found, uint64_t expected) {
  return absl::DataLossError(
      absl::StrCat("sequence image: ", what, " is ", found, ", must be ", expected));
}

absl::Status Contradiction(absl::string_view what, uint64_t found, uint64_t limit) {
  return absl::InvalidArgumentError(
      absl::StrCat("sequence image: ", what, " is ", found, ", limit ", limit));
}

uint64_t MostRequestBytes(uint64_t num_tokens) {
  return kMaxRequestBytes + kMaxRequestBytesPerToken * num_tokens;
}

// The most bytes that an image with these counts can have.
uint64_t MostBytes(const Header& header, const kernels::KvLayout& layout) {
  uint64_t bytes = sizeof(Header) + kNumSections * sizeof(SectionHeader) +
                   MostRequestBytes(header.num_tokens) + 2 * sizeof(int32_t) * header.num_tokens +
                   sizeof(uint32_t);
  for (int k = 0; k < kernels::kNumCacheKinds; ++k) {
    bytes += static_cast<uint64_t>(ImageBytes(layout, static_cast<kernels::CacheKindIndex>(k),
                                              static_cast<int64_t>(header.num_cached_tokens)));
  }
  return bytes;
}

// What does not depend on the numbers in it: whose image it is.
absl::Status CheckOrigin(const Header& header, const kernels::KvLayout& layout,
                         const ImageTerms& terms) {
  if (header.magic != kMagic) return Foreign("the first word", header.magic, kMagic);
  if (header.version != kVersion) return Foreign("the version", header.version, kVersion);
  if (const uint32_t sum = Crc32c(&header, offsetof(Header, crc32c)); sum != header.crc32c) {
    return Damaged("the sum of the header", sum, header.crc32c);
  }
  if (header.layout_fingerprint != layout.fingerprint) {
    return Foreign("the cache layout", header.layout_fingerprint, layout.fingerprint);
  }
  if (header.weight_fingerprint != terms.weight_fingerprint) {
    return Foreign("the checkpoint", header.weight_fingerprint, terms.weight_fingerprint);
  }
  if (const PrefixHash ours = SaltHash(layout, terms); header.salt_hash != ours) {
    return absl::FailedPreconditionError(absl::StrCat("sequence image: the hash of the salt is ",
                                                      Hex(header.salt_hash), ", ours ", Hex(ours)));
  }
  if (header.num_request_fields != NumRequestFields()) {
    return Foreign("the number of request fields", header.num_request_fields, NumRequestFields());
  }
  if (header.num_sections != kNumSections) {
    return Foreign("the number of sections", header.num_sections, kNumSections);
  }
  return absl::OkStatus();
}

// The header of an image of `size` bytes, when it is one of ours.
absl::StatusOr<Header> ReadHeader(std::span<const std::byte> bytes, uint64_t size,
                                  const kernels::KvLayout& layout, const ImageTerms& terms) {
  Header header;
  if (bytes.size() < sizeof(header)) {
    return Damaged("the number of its bytes", bytes.size(), sizeof(header));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  ISTHMUS_RETURN_IF_ERROR(CheckOrigin(header, layout, terms));
  const auto max_tokens = static_cast<uint64_t>(terms.max_tokens);
  if (header.num_tokens > max_tokens) {
    return Contradiction("the number of tokens", header.num_tokens, max_tokens);
  }
  if (header.num_cached_tokens > header.num_tokens) {
    return Contradiction("the number of cached tokens", header.num_cached_tokens,
                         header.num_tokens);
  }
  if (const uint64_t most = MostBytes(header, layout); header.image_bytes > most) {
    return Contradiction("the number of bytes in the header", header.image_bytes, most);
  }
  if (header.image_bytes != size) {
    return Damaged("the number of its bytes", size, header.image_bytes);
  }
  return header;
}

// Cuts the sections out of `bytes`, whose size is that of the header, and compares all sums.
absl::StatusOr<std::array<std::span<const std::byte>, kNumSections>> ReadSections(
    std::span<const std::byte> bytes, const kernels::KvLayout& layout) {
  std::array<std::span<const std::byte>, kNumSections> sections;
  std::span<const std::byte> rest = bytes.subspan(sizeof(Header));
  for (uint32_t s = 0; s < kNumSections; ++s) {
    const std::string name = absl::StrCat("section ", SectionName(s, layout), ": ");
    SectionHeader section;
    if (rest.size() < sizeof(section)) {
      return Damaged(name + "what is left of the image", rest.size(), sizeof(section));
    }
    std::memcpy(&section, rest.data(), sizeof(section));
    rest = rest.subspan(sizeof(section));
    if (section.section != s) return Damaged(name + "its number", section.section, s);
    if (section.bytes > rest.size()) {
      return Damaged(name + "what is left of the image", rest.size(), section.bytes);
    }
    sections[s] = rest.first(section.bytes);
    rest = rest.subspan(section.bytes);
    if (const uint32_t sum = Crc32c(sections[s].data(), section.bytes); sum != section.crc32c) {
      return Damaged(name + "its sum", sum, section.crc32c);
    }
  }
  uint32_t total = 0;
  if (rest.size() != sizeof(total)) {
    return Damaged("the number of bytes behind the sections", rest.size(), sizeof(total));
  }
  std::memcpy(&total, rest.data(), sizeof(total));
  const uint32_t sum = Crc32c(bytes.data(), bytes.size() - sizeof(total));
  if (sum != total) return Damaged("the sum of the whole", sum, total);
  return sections;
}

// What the numbers of a sequence must obey among each other, whoever computed the sums.
absl::Status CheckSequence(const Sequence& sequence, int64_t num_cached_tokens) {
  const auto size = static_cast<int64_t>(sequence.tokens.size());
  if (sequence.num_prompt_tokens < 1 || sequence.num_prompt_tokens > size) {
    return Contradiction("the number of prompt tokens",
                         static_cast<uint64_t>(sequence.num_prompt_tokens),
                         static_cast<uint64_t>(size));
  }
  if (!sequence.is_finished() && num_cached_tokens >= size) {
    return Contradiction("of a running sequence the number of cached tokens",
                         static_cast<uint64_t>(num_cached_tokens), static_cast<uint64_t>(size - 1));
  }
  const auto output = static_cast<size_t>(sequence.num_output_tokens());
  if (sequence.logits_crc32c.size() > output) {
    return Contradiction("the number of digests", sequence.logits_crc32c.size(), output);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::byte>> WriteSequenceImage(const Sequence& sequence,
                                                          kv::CachePool& pool,
                                                          const ImageTerms& terms) {
  ImageWriter writer;
  ISTHMUS_RETURN_IF_ERROR(writer.AddSection([&](std::vector<std::byte>& out) {
    const size_t start = out.size();
    AppendRequest(sequence, out);
    const uint64_t most = MostRequestBytes(sequence.tokens.size());
    if (out.size() - start <= most) return absl::OkStatus();
    return Contradiction("the size of the request", out.size() - start, most);
  }));
  ISTHMUS_RETURN_IF_ERROR(writer.AddSection([&](std::vector<std::byte>& out) {
    return AppendList(std::span<const int32_t>(sequence.tokens), out);
  }));
  ISTHMUS_RETURN_IF_ERROR(writer.AddSection([&](std::vector<std::byte>& out) {
    return AppendList(std::span<const uint32_t>(sequence.logits_crc32c), out);
  }));
  for (int k = 0; k < kernels::kNumCacheKinds; ++k) {
    ISTHMUS_RETURN_IF_ERROR(writer.AddSection([&](std::vector<std::byte>& out) {
      return AppendCacheKind(pool, sequence.cache, static_cast<kernels::CacheKindIndex>(k), out);
    }));
  }
  return writer.Finish({.layout_fingerprint = pool.layout().fingerprint,
                        .weight_fingerprint = terms.weight_fingerprint,
                        .salt_hash = SaltHash(pool.layout(), terms),
                        .num_tokens = sequence.tokens.size(),
                        .num_cached_tokens = static_cast<uint64_t>(sequence.cache.num_tokens()),
                        .num_request_fields = NumRequestFields()});
}

absl::Status CheckImageHeader(std::span<const std::byte> leading, uint64_t image_bytes,
                              const kernels::KvLayout& layout, const ImageTerms& terms) {
  return ReadHeader(leading, image_bytes, layout, terms).status();
}

absl::StatusOr<SequenceImage> ParseSequenceImage(std::span<const std::byte> bytes,
                                                 const kernels::KvLayout& layout,
                                                 const ImageTerms& terms) {
  ISTHMUS_ASSIGN_OR_RETURN(const Header header, ReadHeader(bytes, bytes.size(), layout, terms));
  ISTHMUS_ASSIGN_OR_RETURN(const auto sections, ReadSections(bytes, layout));
  if (sections[kTokens].size() != sizeof(int32_t) * header.num_tokens) {
    return Contradiction("the size of the tokens", sections[kTokens].size(),
                         sizeof(int32_t) * header.num_tokens);
  }
  if (sections[kDigests].size() % sizeof(uint32_t) != 0) {
    return Contradiction("the size of the digests", sections[kDigests].size(),
                         sections[kDigests].size() / sizeof(uint32_t) * sizeof(uint32_t));
  }
  SequenceImage image;
  image.num_cached_tokens = static_cast<int64_t>(header.num_cached_tokens);
  for (int k = 0; k < kernels::kNumCacheKinds; ++k) {
    const auto kind = static_cast<kernels::CacheKindIndex>(k);
    const std::span<const std::byte> section = sections[kFirstKind + static_cast<uint32_t>(k)];
    const auto expected = static_cast<uint64_t>(ImageBytes(layout, kind, image.num_cached_tokens));
    if (section.size() != expected) {
      return Contradiction(absl::StrCat("the size of ", layout.kinds[static_cast<size_t>(k)].name),
                           section.size(), expected);
    }
    image.kinds[static_cast<size_t>(k)] = section;
  }
  Sequence& sequence = image.sequence;
  if (!ReadRequest(sections[kRequest], sequence)) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequence image: the request has ", sections[kRequest].size(),
                     " bytes, which are not its ", NumRequestFields(), " fields"));
  }
  sequence.tokens = ReadList<int32_t>(sections[kTokens]);
  sequence.logits_crc32c = ReadList<uint32_t>(sections[kDigests]);
  ISTHMUS_RETURN_IF_ERROR(CheckSequence(sequence, image.num_cached_tokens));
  return image;
}

absl::StatusOr<Sequence> RestoreSequence(std::span<const std::byte> bytes, Engine& engine,
                                         const ImageTerms& terms) {
  ImageTerms bounded = terms;
  bounded.max_tokens = std::min(terms.max_tokens, engine.forward().max_positions());
  ISTHMUS_ASSIGN_OR_RETURN(SequenceImage image,
                           ParseSequenceImage(bytes, engine.pool().layout(), bounded));
  Sequence sequence = std::move(image.sequence);
  sequence.cache_salt = terms.salt;
  ISTHMUS_RETURN_IF_ERROR(engine.Validate(
      std::span(sequence.tokens).first(static_cast<size_t>(sequence.num_prompt_tokens)),
      sequence.sampling));
  for (size_t t = 0; t < sequence.tokens.size(); ++t) {
    const int32_t token = sequence.tokens[t];
    if (token >= 0 && token < engine.forward().vocab_size()) continue;
    return absl::InvalidArgumentError(absl::StrCat("sequence image: token ", t, " has id ", token,
                                                   ", the vocabulary has ",
                                                   engine.forward().vocab_size()));
  }
  ISTHMUS_ASSIGN_OR_RETURN(sequence.cache, engine.pool().Open());
  ISTHMUS_RETURN_IF_ERROR(sequence.cache.Reserve(static_cast<int64_t>(sequence.tokens.size())));
  ISTHMUS_RETURN_IF_ERROR(
      FillCache(engine.pool(), image.num_cached_tokens, image.kinds, sequence.cache));
  return sequence;
}

}  // namespace isthmus::engine
