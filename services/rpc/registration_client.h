// SPDX-License-Identifier: Apache-2.0
// A worker's standing with its routers: one registration stream to each, kept open for as long as
// the worker runs and opened again, with a growing and bounded pause, when it ends.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/cluster.pb.h"
#include "services/base/clock.h"

namespace isthmus::rpc {

// What the streams ask of the worker, from threads of theirs. Must not block for long.
struct RegistrationEvents {
  // How busy the worker is now.
  std::function<v1::WorkerLoad()> load;

  // A router's command to drain.
  std::function<void(const std::string& reason)> on_drain;
};

class RegistrationClient {
 public:
  // `routers` are host:port; none is allowed. `card` has the address that routers shall use.
  RegistrationClient(std::vector<std::string> routers, v1::WorkerCard card,
                     RegistrationEvents events, Clock& clock);
  ~RegistrationClient();

  void Start();

  // Ends the streams; the routers then take the worker off their lists at once.
  void Stop();

  // Tells every router, at once and whenever a stream is opened again.
  void SetDraining(const std::string& reason);

  // Streams that a router has accepted.
  int num_registered() const;

  // What the last failed attempt of each unregistered router said; empty when all are registered.
  std::string problem() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace isthmus::rpc
