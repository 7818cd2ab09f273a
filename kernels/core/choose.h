// SPDX-License-Identifier: Apache-2.0
// The whole of variant dispatch: a linear scan over a short table, fastest first.
#pragma once

#include <span>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/exec.h"

namespace isthmus::kernels {

inline bool IsActive(const Patch& patch, const Exec& exec) {
  if ((patch.phases & exec.phase) == 0) return false;
  return exec.patches != nullptr ? exec.patches->IsOn(patch) : patch.default_on;
}

// The first variant of `table` that is on, compiled in, built for this architecture and able to
// run `args`. Each architecture's rows end in its trusted path (patch == nullptr).
template <typename Variant, typename Args>
absl::StatusOr<const Variant*> Choose(std::span<const Variant> table, const Args& args,
                                      const Exec& exec) {
  for (const Variant& variant : table) {
    if (variant.launch == nullptr) continue;  // Not compiled in.
    if (exec.arch < variant.arches.begin || exec.arch >= variant.arches.end) continue;
    if (variant.patch != nullptr && !IsActive(*variant.patch, exec)) continue;
    if (variant.supports != nullptr && !variant.supports(args)) continue;
    return &variant;
  }
  return absl::UnimplementedError(absl::StrCat("no variant for architecture ", exec.arch));
}

}  // namespace isthmus::kernels
