// SPDX-License-Identifier: Apache-2.0
// A writer process for writer_death_test: reads an endpoint from stdin and writes pages to it,
// three writes at one time, until it is killed or its patience ends.
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kvtransfer/transport.h"
#include "services/base/clock.h"
#include "services/base/thread.h"

namespace {

constexpr size_t kNumWriters = 3;

}  // namespace

int main() {
  using isthmus::RealClock;
  std::string text;
  char piece[4096];
  ssize_t size = 0;
  while ((size = read(STDIN_FILENO, piece, sizeof(piece))) > 0) {
    text.append(piece, static_cast<size_t>(size));
  }
  isthmus::v1::TransferEndpoint target;
  if (!target.ParseFromString(text) || target.regions_size() == 0) return 1;
  const auto writer = isthmus::transfer::MakeUcxTransport({});
  if (!writer.ok()) return 1;
  const isthmus::v1::RegionCard& region = target.regions(0);
  const std::vector<std::byte> page(region.unit_bytes(), std::byte{0x5a});
  std::vector<isthmus::transfer::PageSpan> spans;
  for (uint32_t i = 0; i < 800; ++i) {
    const auto unit = static_cast<uint32_t>(i % region.num_units());
    spans.push_back({page, 0, region.generation(), unit});
  }
  const absl::Time deadline = RealClock().Now() + absl::Seconds(30);
  std::vector<isthmus::Thread> threads;
  threads.reserve(kNumWriters);
  for (size_t i = 0; i < kNumWriters; ++i) {
    threads.emplace_back(RealClock(), [&] {
      while ((*writer)->Write(target, spans, deadline).ok()) continue;
    });
  }
  return 0;
}
