// SPDX-License-Identifier: Apache-2.0
// A transport inside one process, for tests and simulation: the bytes of a write lie in the network
// until they are due, so that a write can land after its writer has given up or died, get lost, be
// corrupted, or be kept from an address that is cut off. All time is the transports' clock's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvtransfer/transport.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"

namespace isthmus::transfer {

// One span on its way. The addresses are those of the two transports.
struct LoopbackWrite {
  std::string writer;
  std::string target;
  uint64_t target_incarnation = 0;
  PageSpan span;  // The writer's bytes when it is posted, later the network's copy of them.
  absl::Time posted;
  absl::Time deadline;
  uint64_t call_number = 0;  // The same for all spans of one Write, and of no other in the network.

  // Whether the writer has given up, or was cut off, before the span landed.
  bool is_abandoned = false;
};

// What becomes of one span.
struct LoopbackFate {
  // From posting to landing. The spans of one write are all posted at once.
  absl::Duration latency;

  // Neither lands nor is acknowledged: the writer waits for its deadline.
  bool is_lost = false;

  // When not OK, the write ends with it before this span is posted. Earlier ones stay on their way.
  absl::Status error;
};

// How an address is cut off. Either way nothing lands there any more; what it has posted before
// still lands elsewhere.
enum class LoopbackCut : uint8_t {
  kReset,   // As after a death: writes from and to it end at once, Unavailable.
  kSilent,  // As behind a broken switch: they wait for their deadline.
};

// What loopback transports share; must outlive them. Thread-safe.
class LoopbackNetwork {
 public:
  // Decides what becomes of every span, before it is posted, in the writer's thread. Empty: lands
  // at once. Both functions are set before the first write.
  std::function<LoopbackFate(const LoopbackWrite& write)> before_post;

  // Sees every span right after it has landed, and may change what lies there. Called under the
  // network's lock by whichever thread moves the network on: must not call the network.
  std::function<void(const LoopbackWrite& write, std::span<std::byte> landed)> after_landing;

  void Cut(const std::string& address, LoopbackCut how);
  void Mend(const std::string& address);

  // Lands what is due by `now`. Every Write and Poll does so too.
  void Land(absl::Time now);

  // Spans that will still land, those of writers that gave up included.
  size_t num_under_way() const;

 private:
  friend class LoopbackTransport;

  struct Owner {
    Identity identity;
    uint32_t generation = 0;
    std::vector<LocalRegion> regions;
    const void* transport = nullptr;
  };
  // One Write.
  struct Call {
    std::string writer;
    std::string target;
    size_t num_left = 0;  // Spans that have not landed; lost ones never do.
    absl::Status failure;
    bool has_ended = false;  // The writer does not wait any more.
  };
  struct Flight {
    LoopbackWrite write;
    std::vector<std::byte> bytes;
    std::shared_ptr<Call> call;
  };

  // All under mutex_.
  absl::Status CheckWrite(const std::string& writer, const v1::TransferEndpoint& target,
                          std::span<const PageSpan> spans) const;
  static absl::Status CheckSpan(const Owner& owner, const PageSpan& span);
  void LandDue(absl::Time now);
  void LandOne(Flight& flight);
  const LocalRegion* Destination(const Flight& flight) const;
  void FailCalls(const std::string& address, const absl::Status& failure);
  absl::Time NextDue() const;  // InfiniteFuture when nothing is under way.

  mutable Mutex mutex_;
  CondVar changed_;
  uint64_t next_call_number_ = 1;        // Guarded by mutex_.
  std::map<std::string, Owner> owners_;  // Guarded by mutex_, as everything below.
  std::map<std::string, LoopbackCut> cuts_;
  std::vector<std::shared_ptr<Call>> calls_;   // That wait.
  std::multimap<absl::Time, Flight> flights_;  // By the time at which they land.
};

// `address` names this transport in the network; another one may take it over, as a restarted
// process does. `clock` must outlive the transport.
std::unique_ptr<Transport> MakeLoopbackTransport(LoopbackNetwork* network, std::string address,
                                                 Clock& clock = RealClock());

}  // namespace isthmus::transfer
