// SPDX-License-Identifier: Apache-2.0
// Ends calls of a server whose time is over, whatever their thread waits for: a client that stopped
// reading, or one that opened a stream and says nothing, would otherwise hold a thread for as long
// as its connection lives.
#pragma once

#include <grpcpp/server_context.h>

#include <map>

#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/base/thread.h"

namespace isthmus::rpc {

// One thread for all calls of a process; it sleeps until the next call's time is over.
class Timekeeper {
 public:
  Timekeeper();
  ~Timekeeper();
  Timekeeper(const Timekeeper&) = delete;
  Timekeeper& operator=(const Timekeeper&) = delete;

  // Watches one call while it lives. `context` must outlive it.
  class Watch {
   public:
    Watch(Timekeeper* keeper, grpc::ServerContext* context, absl::Duration patience)
        : keeper_(keeper), ticket_(keeper->Add(context, patience)) {}
    ~Watch() { keeper_->Remove(ticket_); }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    Timekeeper* const keeper_;
    const uint64_t ticket_;
  };

 private:
  struct Call {
    grpc::ServerContext* context;
    absl::Time end;
  };

  uint64_t Add(grpc::ServerContext* context, absl::Duration patience);
  void Remove(uint64_t ticket);
  void Run();

  Clock& clock_ = RealClock();
  Mutex mutex_;
  CondVar changed_;
  bool stops_ = false;              // Guarded by mutex_.
  uint64_t next_ticket_ = 0;        // Guarded by mutex_.
  absl::Time wakes_at_;             // When Run shall look again. Guarded by mutex_.
  std::map<uint64_t, Call> calls_;  // Guarded by mutex_.
  Thread thread_;
};

// The patience with a client that has opened a stream and says nothing.
inline constexpr absl::Duration kOpeningPatience = absl::Seconds(10);

// Reads the next message of a stream. False: the client is gone, or has said nothing for as long as
// `patience`; the call is cancelled then.
template <typename Stream, typename Message>
bool ReadWithin(absl::Duration patience, Timekeeper* keeper, grpc::ServerContext* context,
                Stream* stream, Message* message) {
  const Timekeeper::Watch watch(keeper, context, patience);
  return stream->Read(message);
}

}  // namespace isthmus::rpc
