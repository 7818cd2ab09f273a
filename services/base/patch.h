// SPDX-License-Identifier: Apache-2.0
// A patch: a named optimisation, as metadata beside a switch (ARCHITECTURE.md, "Patches").
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus {

// Where in a request's life a patch executes. Bits, because one patch may serve two phases.
enum PhaseBits : uint32_t {  // NOLINT(performance-enum-size): as wide as its masks.
  kPhaseLoad = 1u << 0,      // Reading and repacking weights, once per process.
  kPhasePrefill = 1u << 1,   // Prompt tokens to KV pages.
  kPhaseTransfer = 1u << 2,  // KV pages from a prefill worker to a decode worker.
  kPhaseDecode = 1u << 3,    // KV pages to output tokens.
};

// How a patch's results may differ from the trusted path's.
enum class NumericClass : uint8_t {
  kBitExact,          // The same bits for the same input. Checked with memcmp.
  kReordered,         // The same operations in another order, in the same types.
  kReducedPrecision,  // Some intermediate is stored or multiplied in a narrower type.
};

// Error budget against the f64 definition. With e(x) the relative L2 error of x:
//
//   e(patched) <= factor * e(naive) + floor
//
// where naive is the definition's loops with f32 sums and values kept in the storage type. Its
// error scales with the shape, the type and the inputs, so nobody tunes tolerances by hand.
struct NumericBound {
  NumericClass numeric_class = NumericClass::kBitExact;
  double factor = 1.0;
  double floor = 0.0;
};

// What a trusted path is held to: it may add in another order, and nothing else.
inline constexpr NumericBound kTrustedBound = {NumericClass::kReordered, 1.5, 1e-7};

struct Patch {
  absl::string_view name;      // "<operation>.<idea>". Unique, and never reused for another idea.
  absl::string_view summary;   // One sentence: what changes, and why that is faster.
  uint32_t phases = 0;         // PhaseBits.
  bool default_on = false;     // A new patch starts off; its decision record turns it on.
  NumericBound bound;          // Error budget, as above.
  absl::string_view test;      // The test suite that runs the patch both on and off.
  absl::string_view decision;  // Decision record with the measurement, relative to the root.
};

// Which patches are on: a value, resolved once in main and carried by every batch.
class PatchSet {
 public:
  // `known` patches with their defaults, changed by `config` (name -> on). An unknown name is
  // InvalidArgument that lists the known ones.
  static absl::StatusOr<PatchSet> Resolve(std::span<const Patch* const> known,
                                          const std::map<std::string, bool>& config);

  bool IsOn(const Patch& patch) const;

  // The switches as bits, in the order of registration: what a captured graph was made with. At
  // most 64 patches (checked).
  uint64_t OnBits() const;

  // One line per patch, "name on|off (default|config)", in the order of registration.
  std::vector<std::string> Describe() const;

 private:
  struct Entry {
    const Patch* patch;
    bool on;
    bool from_config;
  };
  std::vector<Entry> entries_;
};

}  // namespace isthmus
