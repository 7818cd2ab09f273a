// SPDX-License-Identifier: Apache-2.0
// Random names: of processes, of transfers, of requests that came without one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/strings/string_view.h"

namespace isthmus::rpc {

// 64 random bits, never 0.
uint64_t NewIncarnation();

// 128 random bits.
std::string NewTransferId();

// "r-" and 16 hexadecimal digits.
std::string NewRequestId();

// Takes the bits of all of them from `next_bits` from now on; empty: from the machine's generator.
// For simulations, which want the same names again. Not while another thread may draw.
void SetIdentitySource(std::function<uint64_t()> next_bits);

// Writes `address` and a line end to `path` under a temporary name first, so that who waits for the
// file never reads half of it. Does nothing for an empty path. False when it cannot be written.
bool WriteAddressFile(const std::string& path, absl::string_view address);

}  // namespace isthmus::rpc
