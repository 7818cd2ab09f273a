// SPDX-License-Identifier: Apache-2.0
#include "services/base/patch.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "services/base/check.h"

namespace isthmus {

absl::StatusOr<PatchSet> PatchSet::Resolve(std::span<const Patch* const> known,
                                           const std::map<std::string, bool>& config) {
  PatchSet set;
  set.entries_.reserve(known.size());
  for (const Patch* patch : known) {
    for (const Entry& earlier : set.entries_) {
      if (earlier.patch->name == patch->name) {
        return absl::InternalError(absl::StrCat("patch ", patch->name, " is registered twice"));
      }
    }
    const auto found = config.find(std::string(patch->name));
    const bool from_config = found != config.end();
    set.entries_.push_back({patch, from_config ? found->second : patch->default_on, from_config});
  }
  for (const auto& [name, on] : config) {
    bool is_known = false;
    for (const Entry& entry : set.entries_) is_known |= entry.patch->name == name;
    if (is_known) continue;
    std::vector<absl::string_view> names;
    names.reserve(set.entries_.size());
    for (const Entry& entry : set.entries_) names.push_back(entry.patch->name);
    return absl::InvalidArgumentError(absl::StrCat(
        "patches: unknown patch \"", name, "\"; known: [", absl::StrJoin(names, ", "), "]"));
  }
  return set;
}

bool PatchSet::IsOn(const Patch& patch) const {
  for (const Entry& entry : entries_) {
    if (entry.patch == &patch) return entry.on;
  }
  return patch.default_on;
}

uint64_t PatchSet::OnBits() const {
  ISTHMUS_CHECK(entries_.size() <= 64);
  uint64_t bits = 0;
  for (size_t i = 0; i < entries_.size(); ++i) bits |= uint64_t{entries_[i].on} << i;
  return bits;
}

std::vector<std::string> PatchSet::Describe() const {
  std::vector<std::string> lines;
  lines.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    lines.push_back(absl::StrCat(entry.patch->name, entry.on ? " on" : " off",
                                 entry.from_config ? " (config)" : " (default)"));
  }
  return lines;
}

}  // namespace isthmus
