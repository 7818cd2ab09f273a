// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/registration_client.h"

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/cluster.grpc.pb.h"
#include "services/base/log.h"
#include "services/base/mutex.h"
#include "services/base/thread.h"
#include "services/rpc/channel.h"
#include "services/rpc/identity.h"
#include "services/rpc/status.h"
#include "services/rpc/wire.h"

namespace isthmus::rpc {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(50);
constexpr absl::Duration kLongestPause = absl::Seconds(2);
// Somebody has to change a configuration first.
constexpr absl::Duration kRefusedPause = absl::Seconds(5);
// From opening a stream to the router's answer to the card.
constexpr absl::Duration kAnswerPatience = absl::Seconds(5);
constexpr absl::Duration kShortestInterval = absl::Milliseconds(1);
constexpr absl::Duration kLongestInterval = absl::Minutes(1);
// Distinct refusals that are remembered so that each is logged once.
constexpr size_t kMaxRefusals = 32;

// What a completion queue event is about.
enum Tag : uint8_t { kStart = 1, kWrite, kRead, kFinish };
void* TagOf(Tag tag) {
  return reinterpret_cast<void*>(uintptr_t{tag});  // NOLINT(performance-no-int-to-ptr)
}

// 0.75 to 1.25 times `pause`, so that workers do not come back all at once.
absl::Duration Jittered(absl::Duration pause) {
  return pause * (0.75 + 0.5 * static_cast<double>(NewIncarnation() >> 40) / double{1 << 24});
}

absl::Duration IntervalOf(const google::protobuf::Duration& wire, absl::Duration otherwise) {
  const absl::Duration told = FromWire(wire);
  if (told <= absl::ZeroDuration()) return otherwise;
  return std::clamp(told, kShortestInterval, kLongestInterval);
}

// What all streams of one worker share.
struct Worker {
  v1::WorkerCard card;
  RegistrationEvents events;
  Clock* clock = nullptr;

  Mutex mutex;
  CondVar changed;
  bool stops = false;                    // Guarded by mutex.
  bool is_draining = false;              // Guarded by mutex.
  std::string drain_reason;              // Guarded by mutex.
  std::set<std::string> logged_refusal;  // Guarded by mutex.

  bool has_stopped() {
    MutexLock lock(mutex);
    return stops;
  }
};

// The stream to one router, opened again and again by one thread.
class RouterStream {
 public:
  RouterStream(std::string address, Worker* worker)
      : address_(std::move(address)),
        worker_(worker),
        problem_(absl::StrCat(address_, ": has not answered yet")) {}

  void Run();
  void Cancel() {
    MutexLock lock(mutex_);
    if (context_ != nullptr) context_->TryCancel();
  }
  bool is_registered() const { return is_registered_; }
  std::string problem() const {
    MutexLock lock(mutex_);
    return is_registered_ ? "" : problem_;
  }

 private:
  using Stream = grpc::ClientAsyncReaderWriter<v1::WorkerReport, v1::RouterCommand>;

  // One stream from its start to its end; never OK.
  absl::Status Hold();
  // Handles events and writes reports until the stream is over or the worker stops.
  void Serve(grpc::CompletionQueue& queue, grpc::ClientContext& context, Stream& stream);
  void Obey(const v1::RouterCommand& command);
  // Writes what is due, if anything is and no write is under way.
  void WriteDue(Stream& stream);
  void Failed(const absl::Status& status);

  const std::string address_;
  Worker* const worker_;
  std::atomic<bool> is_registered_ = false;
  mutable Mutex mutex_;
  grpc::ClientContext* context_ = nullptr;  // Guarded by mutex_.
  std::string problem_;                     // Guarded by mutex_.

  // Of the present stream; the thread's own.
  absl::Duration load_interval_;
  absl::Duration heartbeat_interval_;
  bool is_open_ = false;
  bool is_writing_ = false;
  bool told_draining_ = false;
  bool was_registered_ = false;
  std::string last_load_;
  absl::Time last_write_;
  absl::Time opened_at_;
  v1::RouterCommand command_;
  v1::WorkerReport report_;
};

void RouterStream::Obey(const v1::RouterCommand& command) {
  if (command.has_registered()) {
    load_interval_ = IntervalOf(command.registered().load_interval(), load_interval_);
    heartbeat_interval_ =
        IntervalOf(command.registered().heartbeat_interval(), heartbeat_interval_);
    if (!is_registered_) LogInfo("registered with a router", {{"router", address_}});
    was_registered_ = true;
    is_registered_ = true;
  } else if (command.has_drain() && worker_->events.on_drain) {
    worker_->events.on_drain(command.drain().reason());
  }
}

void RouterStream::WriteDue(Stream& stream) {
  if (!is_open_ || is_writing_ || !is_registered_) return;
  const absl::Time now = worker_->clock->Now();
  report_.Clear();
  if (!told_draining_) {
    MutexLock lock(worker_->mutex);
    if (worker_->is_draining) {
      report_.mutable_draining()->set_reason(worker_->drain_reason);
      told_draining_ = true;
    }
  }
  if (!report_.has_draining()) {
    if (now - last_write_ < load_interval_) return;
    *report_.mutable_load() = worker_->events.load();
    std::string load = report_.load().SerializeAsString();
    if (load == last_load_ && now - last_write_ < heartbeat_interval_) return;
    last_load_ = std::move(load);
  }
  last_write_ = now;
  is_writing_ = true;
  stream.Write(report_, TagOf(kWrite));
}

void RouterStream::Serve(grpc::CompletionQueue& queue, grpc::ClientContext& context,
                         Stream& stream) {
  bool is_reading = false;
  bool goes_on = true;
  bool is_cancelled = false;
  // Once told to end, the events of what is under way still have to come; cancelling brings them.
  while (goes_on || is_writing_ || is_reading) {
    const absl::Duration wait = is_registered_ ? load_interval_ : absl::Milliseconds(50);
    void* tag = nullptr;
    bool ok = false;
    const auto outcome = queue.AsyncNext(
        &tag, &ok, std::chrono::system_clock::now() + absl::ToChronoMicroseconds(wait));
    if (outcome == grpc::CompletionQueue::SHUTDOWN) return;
    if (outcome == grpc::CompletionQueue::GOT_EVENT) {
      if (tag == TagOf(kStart)) is_open_ = ok;
      if (tag == TagOf(kWrite)) is_writing_ = false;
      if (tag == TagOf(kRead)) is_reading = false;
      if (tag == TagOf(kRead) && ok) Obey(command_);
      if (!ok) goes_on = false;
      if (tag == TagOf(kStart) && ok) {
        *report_.mutable_card() = worker_->card;
        is_writing_ = true;
        stream.Write(report_, TagOf(kWrite));
      }
      if (goes_on && is_open_ && !is_reading) {
        is_reading = true;
        stream.Read(&command_, TagOf(kRead));
      }
    }
    const bool is_late = !is_registered_ && worker_->clock->Now() - opened_at_ > kAnswerPatience;
    if (!is_cancelled && (is_late || worker_->has_stopped())) {
      context.TryCancel();
      is_cancelled = true;
    }
    if (goes_on && !is_cancelled) WriteDue(stream);
  }
}

absl::Status RouterStream::Hold() {
  // A channel of its own for every try: its pauses between attempts would come on top of ours.
  const auto stub = v1::Registration::NewStub(OpenChannel(address_));
  grpc::ClientContext context;  // No deadline: the stream lives as long as both processes.
  grpc::CompletionQueue queue;
  {
    MutexLock lock(mutex_);
    context_ = &context;
  }
  load_interval_ = absl::Milliseconds(20);
  heartbeat_interval_ = absl::Seconds(1);
  is_open_ = is_writing_ = told_draining_ = was_registered_ = false;
  last_load_.clear();
  last_write_ = absl::InfinitePast();
  opened_at_ = worker_->clock->Now();
  report_.Clear();
  grpc::Status status;
  {
    const auto stream = stub->AsyncRegister(&context, &queue, TagOf(kStart));
    Serve(queue, context, *stream);
    is_registered_ = false;
    stream->Finish(&status, TagOf(kFinish));
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);  // Soon: the stream is broken, ended by the router or cancelled.
  }
  {
    MutexLock lock(mutex_);
    context_ = nullptr;
  }
  queue.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue.Next(&tag, &ok)) {
  }
  if (!status.ok()) return FromGrpcStatus(status, context, address_);
  return absl::UnavailableError(absl::StrCat(address_, ": the router ended the stream"));
}

// Notes and logs a failure: refusals once for each text, the rest when the state changes.
void RouterStream::Failed(const absl::Status& status) {
  bool is_first = false;
  {
    MutexLock lock(mutex_);
    is_first = problem_ != status.message();
    problem_ = std::string(status.message());
  }
  if (absl::IsFailedPrecondition(status)) {
    MutexLock lock(worker_->mutex);
    std::set<std::string>& logged = worker_->logged_refusal;
    is_first = logged.size() < kMaxRefusals && logged.insert(status.ToString()).second;
  }
  if (is_first || was_registered_) {
    LogWarning(was_registered_ ? "a registration has ended" : "a router does not take us",
               {{"router", address_}, {"status", status.ToString()}});
  }
}

void RouterStream::Run() {
  absl::Duration pause = kFirstPause;
  while (!worker_->has_stopped()) {
    const absl::Status status = Hold();
    if (worker_->has_stopped()) return;
    Failed(status);
    if (was_registered_) pause = kFirstPause;
    const absl::Duration now = absl::IsFailedPrecondition(status) ? kRefusedPause : pause;
    pause = std::min(pause * 1.5, kLongestPause);
    MutexLock lock(worker_->mutex);
    worker_->clock->WaitFor(worker_->changed, lock, Jittered(now),
                            [this] { return worker_->stops; });
  }
}

}  // namespace

struct RegistrationClient::State {
  Worker worker;
  std::vector<std::unique_ptr<RouterStream>> streams;
  std::vector<Thread> threads;
};

RegistrationClient::RegistrationClient(std::vector<std::string> routers, v1::WorkerCard card,
                                       RegistrationEvents events, Clock& clock)
    : state_(new State) {
  state_->worker.card = std::move(card);
  state_->worker.events = std::move(events);
  state_->worker.clock = &clock;
  for (std::string& router : routers) {
    state_->streams.push_back(std::make_unique<RouterStream>(std::move(router), &state_->worker));
  }
}

RegistrationClient::~RegistrationClient() { Stop(); }

void RegistrationClient::Start() {
  for (const auto& stream : state_->streams) {
    state_->threads.emplace_back(*state_->worker.clock, [&stream = *stream] { stream.Run(); });
  }
}

void RegistrationClient::Stop() {
  {
    MutexLock lock(state_->worker.mutex);
    state_->worker.stops = true;
  }
  state_->worker.changed.notify_all();
  for (const auto& stream : state_->streams) stream->Cancel();
  state_->threads.clear();
}

void RegistrationClient::SetDraining(const std::string& reason) {
  MutexLock lock(state_->worker.mutex);
  if (state_->worker.is_draining) return;
  state_->worker.is_draining = true;
  state_->worker.drain_reason = reason;
}

int RegistrationClient::num_registered() const {
  return static_cast<int>(std::count_if(state_->streams.begin(), state_->streams.end(),
                                        [](const auto& s) { return s->is_registered(); }));
}

std::string RegistrationClient::problem() const {
  std::string text;
  for (const auto& stream : state_->streams) {
    const std::string problem = stream->problem();
    if (!problem.empty()) absl::StrAppend(&text, text.empty() ? "" : "; ", problem);
  }
  return text;
}

}  // namespace isthmus::rpc
