// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/worker_client_in_process.h"

#include <algorithm>
#include <deque>
#include <list>

#include "absl/strings/str_cat.h"
#include "services/base/fault.h"

namespace isthmus::rpc {
namespace {

// Messages of a token stream that its reader may be behind.
constexpr size_t kMaxAhead = 64;

absl::Status Unreachable(const std::string& server) {
  return WithFaultScope(absl::UnavailableError(absl::StrCat(server, ": cannot be reached")),
                        FaultScope::kPeer);
}

// As it arrives at the caller: with the server's address in front, and what is attached.
absl::Status FromServer(const std::string& server, const absl::Status& status) {
  if (status.ok()) return status;
  absl::Status arrived(status.code(), absl::StrCat(server, ": ", status.message()));
  if (HasRoomSoon(status)) arrived = WithRoomSoon(std::move(arrived));
  return WithFaultScope(std::move(arrived), FaultScopeOf(status));
}

}  // namespace

struct InProcessNetwork::Server {
  std::string address;
  WorkerMethods methods;
  bool is_up = true;          // Guarded by the network's lock, as everything below.
  int num_running = 0;        // Calls.
  std::list<Thread> threads;  // Of calls; those that have ended go when the next one comes.
};

// One call, known to its caller and to the thread that serves it.
struct InProcessNetwork::Call {
  Ends ends;
  absl::string_view method;
  absl::Duration timeout;
  std::shared_ptr<Server> server;  // Null: nobody was there.

  // Guarded by the network's lock, as everything below.
  int64_t num_resets = 0;  // Of its link when it began: another number means that it broke.
  absl::Time deadline = absl::InfiniteFuture();  // The server's.
  bool has_ended = false;
  absl::Status status;
  bool has_left = false;
  absl::Time left_at;  // When the server learns of it.
  bool is_open = false;
  std::deque<v1::StepTokens> steps;
};

std::unique_ptr<InProcessServer> InProcessNetwork::Serve(const std::string& address,
                                                         WorkerMethods methods) {
  auto server = std::make_shared<Server>();
  server->address = address;
  server->methods = std::move(methods);
  MutexLock lock(mutex_);
  servers_[address] = server;
  return std::make_unique<InProcessServer>(this, std::move(server));
}

void InProcessServer::Stop(absl::Duration grace) {
  std::list<Thread> threads;
  {
    MutexLock lock(network_->mutex_);
    const auto found = network_->servers_.find(server_->address);
    if (found != network_->servers_.end() && found->second == server_) {
      network_->servers_.erase(found);
    }
    if (grace > absl::ZeroDuration()) {
      network_->clock_.WaitFor(network_->changed_, lock, grace,
                               [this] { return server_->num_running == 0; });
    }
    server_->is_up = false;
    threads.swap(server_->threads);
  }
  network_->changed_.notify_all();
  threads.clear();  // Joins.
}

void InProcessNetwork::SetLink(const std::string& client, const std::string& server,
                               LinkState state) {
  {
    MutexLock lock(mutex_);
    Link& link = links_[{client, server}];
    const bool was_silent = link.state == LinkState::kSilent;
    const bool breaks = state == LinkState::kReset ||
                        (was_silent && clock_.Now() - link.silent_since >= options_.keepalive);
    if (breaks) ++link.num_resets;
    if (state == LinkState::kSilent && !was_silent) link.silent_since = clock_.Now();
    link.state = state;
  }
  changed_.notify_all();
}

LinkState InProcessNetwork::link(const std::string& client, const std::string& server) const {
  MutexLock lock(mutex_);
  const auto found = links_.find({client, server});
  return found == links_.end() ? LinkState::kUp : found->second.state;
}

Passage InProcessNetwork::PassageOf(const Call& call, bool is_answer) const {
  if (!on_message) return {};
  return on_message({call.ends.first, call.ends.second, call.method, is_answer});
}

std::shared_ptr<InProcessNetwork::Call> InProcessNetwork::Begin(const Ends& ends,
                                                                absl::string_view method,
                                                                absl::Duration timeout) {
  auto call = std::make_shared<Call>();
  call->ends = ends;
  call->method = method;
  call->timeout = timeout;
  MutexLock lock(mutex_);
  const auto found = servers_.find(ends.second);
  if (found != servers_.end()) call->server = found->second;
  call->num_resets = links_[ends].num_resets;
  return call;
}

bool InProcessNetwork::IsBroken(const Call& call) {
  const Link& link = links_[call.ends];
  if (link.state == LinkState::kReset || link.num_resets != call.num_resets) return true;
  if (link.state == LinkState::kSilent) {
    return clock_.Now() - link.silent_since >= options_.keepalive;
  }
  return call.server == nullptr || !call.server->is_up;
}

bool InProcessNetwork::IsCancelled(const Call& call) {
  MutexLock lock(mutex_);
  const absl::Time now = clock_.Now();
  if (now >= call.deadline || !call.server->is_up || IsBroken(call)) return true;
  const bool is_silent = links_[call.ends].state == LinkState::kSilent;
  return call.has_left && now >= call.left_at && !is_silent;
}

ServedCall InProcessNetwork::ScopeOf(const std::shared_ptr<Call>& call) {
  MutexLock lock(mutex_);
  return {call->deadline, [this, call] { return IsCancelled(*call); }};
}

bool InProcessNetwork::Carry(const Call& call, const Passage& passage) {
  clock_.Sleep(passage.latency);
  bool arrives = false;
  {
    MutexLock lock(mutex_);
    Link& link = links_[call.ends];
    while (link.state == LinkState::kSilent && !IsBroken(call) && call.server->is_up) {
      clock_.WaitFor(changed_, lock, options_.poll_interval,
                     [&link] { return link.state != LinkState::kSilent; });
    }
    arrives = !passage.breaks && !IsBroken(call) && call.server->is_up;
    if (passage.breaks) ++link.num_resets;
  }
  if (passage.breaks) changed_.notify_all();
  return arrives;
}

void InProcessNetwork::End(Call& call, absl::Status status) {
  {
    MutexLock lock(mutex_);
    call.has_ended = true;
    call.status = std::move(status);
  }
  changed_.notify_all();
}

void InProcessNetwork::Leave(Call& call) {
  const absl::Duration latency = PassageOf(call, false).latency;
  {
    MutexLock lock(mutex_);
    call.has_left = true;
    call.left_at = clock_.Now() + latency;
  }
  changed_.notify_all();
}

void InProcessNetwork::Run(const std::shared_ptr<Call>& call, std::function<void(bool)> serve) {
  if (call->server == nullptr) return;
  const Passage passage = PassageOf(*call, false);
  std::list<Thread> ended;  // Joined without the lock.
  MutexLock lock(mutex_);
  std::list<Thread>& threads = call->server->threads;
  for (auto it = threads.begin(); it != threads.end();) {
    const auto thread = it++;
    if (!thread->is_running()) ended.splice(ended.end(), threads, thread);
  }
  if (call->server->is_up) {
    ++call->server->num_running;
    threads.emplace_back(clock_, [this, call, passage, serve = std::move(serve)] {
      RunHere(*call, passage, serve);
      {
        MutexLock ended_lock(mutex_);
        --call->server->num_running;
      }
      changed_.notify_all();
    });
  }
}

void InProcessNetwork::RunHere(Call& call, const Passage& passage,
                               const std::function<void(bool)>& serve) {
  if (!Carry(call, passage)) return End(call, Unreachable(call.ends.second));
  {
    MutexLock lock(mutex_);
    call.deadline = clock_.Now() + call.timeout;
  }
  serve(/*is_first=*/true);
  if (passage.again_after <= absl::ZeroDuration()) return;
  Passage again;
  again.latency = passage.again_after;
  if (Carry(call, again)) serve(/*is_first=*/false);
}

// Waits for the end of a call: OK when the server answered it.
absl::Status InProcessNetwork::Await(Call& call, const CallOptions& options) {
  const absl::Time deadline = clock_.Now() + options.timeout;
  while (true) {
    {
      MutexLock lock(mutex_);
      const absl::Duration wait = std::min(options_.poll_interval, deadline - clock_.Now());
      clock_.WaitFor(changed_, lock, wait, [&] { return call.has_ended || IsBroken(call); });
      if (call.has_ended) return call.status;
      if (IsBroken(call)) return Unreachable(call.ends.second);
    }
    const bool is_cancelled = options.is_cancelled && options.is_cancelled();
    if (!is_cancelled && clock_.Now() < deadline) continue;
    Leave(call);
    const std::string text = absl::StrCat(call.ends.second, ": ", call.method);
    return is_cancelled ? absl::CancelledError(absl::StrCat(text, " was cancelled"))
                        : absl::DeadlineExceededError(absl::StrCat(text, " was not answered"));
  }
}

class InProcessClient : public WorkerClient {
 public:
  InProcessClient(InProcessNetwork* network, std::string client, std::string server)
      : network_(network), ends_(std::move(client), std::move(server)) {}

  const std::string& address() const override { return ends_.second; }

  absl::StatusOr<v1::DescribeReply> Describe(const CallOptions& options) override {
    return Invoke("Describe", &WorkerMethods::describe, v1::DescribeRequest(), options);
  }
  absl::StatusOr<v1::KvReservation> Reserve(const v1::ReserveCall& call,
                                            const CallOptions& options) override {
    return Invoke("Reserve", &WorkerMethods::reserve, call, options);
  }
  absl::StatusOr<v1::PrefillReply> Prefill(const v1::PrefillCall& call,
                                           const CallOptions& options) override {
    return Invoke("Prefill", &WorkerMethods::prefill, call, options);
  }
  absl::StatusOr<v1::CancelReply> CancelPrefill(const v1::CancelCall& call,
                                                const CallOptions& options) override {
    return Invoke("CancelPrefill", &WorkerMethods::cancel_prefill, call, options);
  }
  absl::StatusOr<v1::HandoffReply> Handoff(const v1::HandoffCall& call,
                                           const CallOptions& options) override {
    return Invoke("Handoff", &WorkerMethods::handoff, call, options);
  }
  absl::StatusOr<v1::CancelReply> CancelDecode(const v1::CancelCall& call,
                                               const CallOptions& options) override {
    return Invoke("CancelDecode", &WorkerMethods::cancel_decode, call, options);
  }
  absl::StatusOr<v1::DrainReply> Drain(const v1::DrainCall& call,
                                       const CallOptions& options) override {
    return Invoke("Drain", &WorkerMethods::drain, call, options);
  }
  absl::Status ReadTokens(const v1::TokensHello& hello, const CallOptions& options,
                          absl::FunctionRef<void()> on_open,
                          absl::FunctionRef<void(const v1::StepTokens&)> on_step) override;

 private:
  using Network = InProcessNetwork;

  template <typename Reply, typename Message>
  absl::StatusOr<Reply> Invoke(absl::string_view name,
                               WorkerMethods::Method<Reply, Message> WorkerMethods::*method,
                               const Message& message, const CallOptions& options) {
    const std::shared_ptr<Network::Call> call = network_->Begin(ends_, name, options.timeout);
    auto reply = std::make_shared<Reply>();
    network_->Run(call, [network = network_, call, reply, method, message](bool is_first) {
      absl::StatusOr<Reply> result = absl::UnimplementedError("no such method here");
      const auto& serve = call->server->methods.*method;
      if (serve) result = serve(message, network->ScopeOf(call));
      if (!is_first) return;
      const std::string& server = call->ends.second;
      if (!network->Carry(*call, network->PassageOf(*call, true))) {
        return network->End(*call, Unreachable(server));
      }
      const absl::Status end = FromServer(server, result.status());
      if (result.ok()) *reply = *std::move(result);
      network->End(*call, end);
    });
    absl::Status status = network_->Await(*call, options);
    if (!status.ok()) return status;
    return *std::move(reply);
  }

  static absl::Status ServeTokens(Network* network, const std::shared_ptr<Network::Call>& call,
                                  const v1::TokensHello& hello);

  InProcessNetwork* const network_;
  const Network::Ends ends_;
};

absl::Status InProcessClient::ServeTokens(Network* network,
                                          const std::shared_ptr<Network::Call>& call,
                                          const v1::TokensHello& hello) {
  if (!call->server->methods.tokens) return absl::UnimplementedError("no such method here");
  TokenSink sink;
  sink.open = [network, call] {
    if (!network->Carry(*call, network->PassageOf(*call, true))) return;
    {
      MutexLock lock(network->mutex_);
      call->is_open = true;
    }
    network->changed_.notify_all();
  };
  sink.write = [network, call](const v1::StepTokens& step) {
    if (!network->Carry(*call, network->PassageOf(*call, true))) return false;
    while (true) {
      if (network->IsCancelled(*call)) return false;
      MutexLock lock(network->mutex_);
      const auto has_room = [&call] { return call->steps.size() < kMaxAhead; };
      if (!network->clock_.WaitFor(network->changed_, lock, network->options_.poll_interval,
                                   has_room)) {
        continue;
      }
      call->steps.push_back(step);
      lock.unlock();
      network->changed_.notify_all();
      return true;
    }
  };
  return call->server->methods.tokens(hello, network->ScopeOf(call), sink);
}

absl::Status InProcessClient::ReadTokens(const v1::TokensHello& hello, const CallOptions& options,
                                         absl::FunctionRef<void()> on_open,
                                         absl::FunctionRef<void(const v1::StepTokens&)> on_step) {
  const std::shared_ptr<Network::Call> call =
      network_->Begin(ends_, "Tokens", absl::InfiniteDuration());
  network_->Run(call, [network = network_, call, hello](bool is_first) {
    if (!is_first) return;
    absl::Status status = ServeTokens(network, call, hello);
    if (status.ok()) status = absl::UnavailableError("the token stream ends");
    const bool arrives = network->Carry(*call, network->PassageOf(*call, true));
    const std::string& server = call->ends.second;
    network->End(*call, arrives ? FromServer(server, status) : Unreachable(server));
  });
  const absl::Time deadline = network_->clock_.Now() + options.timeout;
  bool was_open = false;
  while (true) {
    std::deque<v1::StepTokens> steps;
    bool opens = false;
    absl::Status end;
    {
      MutexLock lock(network_->mutex_);
      network_->clock_.WaitFor(network_->changed_, lock, network_->options_.poll_interval, [&] {
        return call->has_ended || network_->IsBroken(*call) || !call->steps.empty() ||
               (call->is_open && !was_open);
      });
      steps.swap(call->steps);
      opens = call->is_open && !was_open;
      if (call->has_ended) {
        end = call->status;
      } else if (network_->IsBroken(*call)) {
        end = Unreachable(address());
      }
    }
    if (!steps.empty()) network_->changed_.notify_all();  // There is room again.
    if (opens) on_open();
    was_open = was_open || opens;
    for (const v1::StepTokens& step : steps) on_step(step);
    if (!end.ok()) return end;
    const bool is_cancelled = options.is_cancelled && options.is_cancelled();
    const bool is_late = !was_open && network_->clock_.Now() >= deadline;
    if (!is_cancelled && !is_late) continue;
    network_->Leave(*call);
    if (is_cancelled) return absl::CancelledError(absl::StrCat(address(), ": the reader leaves"));
    return absl::DeadlineExceededError(absl::StrCat(address(), ": the stream did not open"));
  }
}

std::unique_ptr<WorkerClient> InProcessNetwork::Connect(const std::string& client,
                                                        const std::string& server) {
  return std::make_unique<InProcessClient>(this, client, server);
}

}  // namespace isthmus::rpc
