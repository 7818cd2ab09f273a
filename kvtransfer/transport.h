// SPDX-License-Identifier: Apache-2.0
// How bytes get from one process into registered memory of another: one of the project's six
// interfaces. UCX here; for tests and simulation see transport_loopback.h.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvtransfer/region.h"
#include "proto/kv_reservation.pb.h"

namespace isthmus::transfer {

// Whose memory is published: what a writer is held to before its first byte.
struct Identity {
  uint64_t worker_incarnation = 0;
  uint64_t layout_fingerprint = 0;
};

// Thread-safe. One side publishes and polls, the other side writes; one object may do both.
class Transport {
 public:
  virtual ~Transport() = default;

  // "loopback" or "ucx"; stands in the endpoints that it makes, and only those can be written to.
  virtual absl::string_view name() const = 0;

  // The lane that was chosen, for logs, metrics and people: "ucx tcp lo".
  virtual std::string lane() const = 0;

  // Registers `regions` (index = region number), once for the life of the process. Every further
  // call counts the generation up, and older keys are dead.
  virtual absl::StatusOr<v1::TransferEndpoint> Publish(std::span<const LocalRegion> regions,
                                                       const Identity& identity) = 0;

  // Lets writes of others land, waiting for at most `timeout` when there are none. Must be called
  // again and again by a thread of the publisher.
  virtual absl::Status Poll(absl::Duration timeout) = 0;

  // Writes all of `spans` and returns when every byte is in the owner's memory. The spans have been
  // held against `target` (sender.h). The owner must have the incarnation of `target`.
  //
  // Aborted: the process there has another incarnation. Unavailable: it cannot be reached or died.
  // DeadlineExceeded: given up. Nothing more is written after an error, but what was under way may
  // still land, so the owner keeps the pages in quarantine.
  virtual absl::Status Write(const v1::TransferEndpoint& target, std::span<const PageSpan> spans,
                             absl::Time deadline) = 0;
};

struct UcxOptions {
  // UCX transports, as in UCX_TLS. Shared memory cannot learn of a peer's death
  // (decisions/0001-ucx-tcp-by-default.md).
  std::string lanes = "tcp";

  // Network devices, as in UCX_NET_DEVICES. Who publishes regions listens on the first of them.
  std::string devices = "lo";

  // Patience for the first contact with a peer.
  absl::Duration connect_timeout = absl::Seconds(5);
};

// Unavailable: UCX has no such lane or device.
absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const UcxOptions& options);

}  // namespace isthmus::transfer
