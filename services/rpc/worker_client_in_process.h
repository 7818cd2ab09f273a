// SPDX-License-Identifier: Apache-2.0
// Calls to workers inside one process, for simulations and thread tests: a network whose messages
// take time, whose connections break and fall silent, and whose servers die while they work.
//
// Every call runs in a thread of its own, as a server would run it, so that its caller can time
// out, leave or lose the connection while it goes on. Nothing of gRPC is in here.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/base/thread.h"
#include "services/rpc/worker_client.h"

namespace isthmus::rpc {

// What a served call knows of its caller.
struct ServedCall {
  absl::Time deadline;

  // The caller left or cannot be reached, the deadline has passed, or the server stops.
  std::function<bool()> is_cancelled;
};

// Where a served token stream goes.
struct TokenSink {
  // Once, before the first write.
  std::function<void()> open;

  // Blocks while the reader is far behind; false once nobody reads any more.
  std::function<bool(const v1::StepTokens&)> write;
};

// What a server does. A method that is empty is answered UNIMPLEMENTED.
struct WorkerMethods {
  template <typename Reply, typename Call>
  using Method = std::function<absl::StatusOr<Reply>(const Call&, const ServedCall&)>;

  Method<v1::DescribeReply, v1::DescribeRequest> describe;
  Method<v1::KvReservation, v1::ReserveCall> reserve;
  Method<v1::PrefillReply, v1::PrefillCall> prefill;
  Method<v1::CancelReply, v1::CancelCall> cancel_prefill;
  Method<v1::HandoffReply, v1::HandoffCall> handoff;
  Method<v1::CancelReply, v1::CancelCall> cancel_decode;
  Method<v1::DrainReply, v1::DrainCall> drain;
  std::function<absl::Status(const v1::TokensHello&, const ServedCall&, const TokenSink&)> tokens;
};

// What the way between two addresses does to one message. The default: nothing.
struct Passage {
  absl::Duration latency;

  // It does not arrive: the connection breaks instead, as both ends learn.
  bool breaks = false;

  // A call that arrives is served a second time, so much later; zero: it is not. The second answer
  // is thrown away.
  absl::Duration again_after;
};

struct InProcessMessage {
  std::string client;
  std::string server;
  absl::string_view method;  // "Reserve".
  bool is_answer = false;
};

enum class LinkState : uint8_t {
  kUp,
  // What is under way ends at once, UNAVAILABLE, and so does what is tried.
  kReset,
  // Messages wait until the link is up again; a connection breaks when that takes longer than the
  // network's keepalive.
  kSilent,
};

class InProcessServer;

// Must outlive its servers and clients. Thread-safe.
class InProcessNetwork {
 public:
  struct Options {
    // How often a waiting caller asks whether it is cancelled.
    absl::Duration poll_interval = absl::Milliseconds(5);
    absl::Duration keepalive = absl::Seconds(5);
  };

  InProcessNetwork(const Options& options, Clock& clock) : options_(options), clock_(clock) {}

  // Decides about every message, in the thread that sends it. Set before the first call; empty: all
  // arrive at once.
  std::function<Passage(const InProcessMessage& message)> on_message;

  // Serves calls to `address` until the server is stopped. A later server at the same address
  // takes its place, as a restarted process does.
  std::unique_ptr<InProcessServer> Serve(const std::string& address, WorkerMethods methods);

  std::unique_ptr<WorkerClient> Connect(const std::string& client, const std::string& server);

  void SetLink(const std::string& client, const std::string& server, LinkState state);
  LinkState link(const std::string& client, const std::string& server) const;

 private:
  friend class InProcessServer;
  friend class InProcessClient;
  struct Server;
  struct Call;
  struct Link {
    LinkState state = LinkState::kUp;
    absl::Time silent_since;
    int64_t num_resets = 0;
  };
  using Ends = std::pair<std::string, std::string>;  // Client, server.

  Passage PassageOf(const Call& call, bool is_answer) const;
  std::shared_ptr<Call> Begin(const Ends& ends, absl::string_view method, absl::Duration timeout);
  // Takes a message to the other end: true when it has arrived.
  bool Carry(const Call& call, const Passage& passage);
  bool IsBroken(const Call& call);  // Under mutex_.
  ServedCall ScopeOf(const std::shared_ptr<Call>& call);
  bool IsCancelled(const Call& call);
  void End(Call& call, absl::Status status);
  void Leave(Call& call);
  absl::Status Await(Call& call, const CallOptions& options);
  void Run(const std::shared_ptr<Call>& call, std::function<void(bool is_first)> serve);
  void RunHere(Call& call, const Passage& passage, const std::function<void(bool)>& serve);

  const Options options_;
  Clock& clock_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::map<Ends, Link> links_;                              // Guarded by mutex_.
  std::map<std::string, std::shared_ptr<Server>> servers_;  // Guarded by mutex_.
};

// Stops in its destructor.
class InProcessServer {
 public:
  InProcessServer(InProcessNetwork* network, std::shared_ptr<InProcessNetwork::Server> server)
      : network_(network), server_(std::move(server)) {}
  ~InProcessServer() { Stop(); }
  InProcessServer(const InProcessServer&) = delete;
  InProcessServer& operator=(const InProcessServer&) = delete;

  // Takes no more calls and lets those that run end within `grace`; then breaks all connections,
  // cancels what still runs here and waits for its end. Callers learn of it at once.
  void Stop(absl::Duration grace = absl::ZeroDuration());

 private:
  InProcessNetwork* const network_;
  const std::shared_ptr<InProcessNetwork::Server> server_;
};

}  // namespace isthmus::rpc
