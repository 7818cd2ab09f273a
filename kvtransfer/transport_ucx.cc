// SPDX-License-Identifier: Apache-2.0
// Transport over UCX's one-sided writes, written against the API of UCX 1.13.
//
// A writer first says hello by active message and waits for the owner's incarnation: an address
// that a dead process left to another one must not lead to a single write. Then it posts puts, at
// most kMaxPosted at a time, and flushes the endpoint, which completes when the owner's memory
// holds the bytes. The owner's Poll makes progress for what arrives, since over tcp the owner's
// processor copies it. An endpoint that failed in any way is closed by force and never used again.
#include <poll.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kvtransfer/transport.h"
#include "kvtransfer/ucx_log.h"
#include "kvtransfer/ucx_resources.h"
#include "services/base/mutex.h"
#include "services/base/status_macros.h"

namespace isthmus::transfer {
namespace {

constexpr size_t kMaxPosted = 32;
constexpr size_t kMaxPeers = 256;
constexpr unsigned kHelloId = 1;
constexpr unsigned kAnswerId = 2;
// Longer waits sleep on UCX's file descriptor; it wakes for every event, so this is only a net.
constexpr absl::Duration kLongestSleep = absl::Milliseconds(50);
constexpr absl::Duration kSpin = absl::Microseconds(20);
constexpr absl::Duration kCloseTimeout = absl::Milliseconds(200);

// The header of both messages. `number` pairs an answer with its hello.
struct Greeting {
  uint64_t incarnation = 0;
  uint64_t number = 0;
};

// One process that we write to.
struct Peer {
  uint64_t incarnation = 0;
  ucp_ep_h endpoint = nullptr;
  ucs_status_t failure = UCS_OK;  // Set by the error callback.
  std::vector<ucp_rkey_h> keys;   // Per region; null for an empty one.
};

class UcxTransport : public Transport {
 public:
  explicit UcxTransport(const UcxOptions& options) : options_(options) {}
  ~UcxTransport() override;

  absl::Status Open();

  absl::string_view name() const override { return "ucx"; }
  std::string lane() const override {
    return absl::StrCat("ucx ", options_.lanes, " ", options_.devices);
  }
  absl::StatusOr<v1::TransferEndpoint> Publish(std::span<const LocalRegion> regions,
                                               const Identity& identity) override;
  absl::Status Poll(absl::Duration timeout) override;
  absl::Status Write(const v1::TransferEndpoint& target, std::span<const PageSpan> spans,
                     absl::Time deadline) override;

 private:
  static ucs_status_t OnHello(void* self, const void* header, size_t header_bytes, void*, size_t,
                              const ucp_am_recv_param_t* param);
  static ucs_status_t OnAnswer(void* self, const void* header, size_t header_bytes, void*, size_t,
                               const ucp_am_recv_param_t*);
  static void OnPeerFailure(void* peer, ucp_ep_h, ucs_status_t status) {
    static_cast<Peer*>(peer)->failure = status;
  }

  absl::Status Listen(unsigned id, ucp_am_recv_callback_t callback);
  absl::StatusOr<Peer*> Connect(const v1::TransferEndpoint& target, absl::Time deadline);
  absl::Status Greet(Peer& peer, absl::Time deadline);
  absl::Status ImportKeys(const v1::TransferEndpoint& target, Peer& peer);
  absl::Status Post(Peer& peer, const v1::TransferEndpoint& target, std::span<const PageSpan> spans,
                    absl::Time deadline);
  absl::Status Finish(void* request, Peer& peer, absl::string_view what, absl::Time deadline);
  void CollectAnswers();
  void Discard(Peer& peer);
  bool Progress();
  void Sleep(absl::Duration timeout);

  const UcxOptions options_;
  UcxContext context_;
  UcxWorker worker_;
  int event_fd_ = -1;

  Mutex mutex_;  // Guards UCX, which is opened for one thread at a time, and everything below.
  uint64_t incarnation_ = 0;
  uint32_t generation_ = 0;
  uint64_t next_greeting_ = 1;
  Greeting last_answer_;
  std::vector<ucp_mem_h> memory_;
  std::vector<void*> answers_;         // Requests of answers that are still under way.
  std::deque<Greeting> answer_texts_;  // What they send; stays put until they are done.
  std::map<uint64_t, std::unique_ptr<Peer>> peers_;  // By incarnation.
};

absl::Status UcxTransport::Open() {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return UcxSetUpError("reading its configuration", status);
  for (const auto& [key, value] :
       {std::pair("TLS", options_.lanes), std::pair("NET_DEVICES", options_.devices)}) {
    status = ucp_config_modify(config, key, value.c_str());
    if (status != UCS_OK) break;
  }
  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  ucp_context_h context = nullptr;
  if (status == UCS_OK) status = ucp_init(&params, config, &context);
  ucp_config_release(config);
  if (status != UCS_OK) {
    return UcxSetUpError(absl::StrCat("no lane ", options_.lanes, " on device ", options_.devices),
                         status);
  }
  context_.reset(context);

  ucp_worker_params_t worker_params = {};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucp_worker_h worker = nullptr;
  status = ucp_worker_create(context, &worker_params, &worker);
  if (status != UCS_OK) {
    return UcxSetUpError(
        absl::StrCat("no worker for lane ", options_.lanes, " on device ", options_.devices),
        status);
  }
  worker_.reset(worker);
  status = ucp_worker_get_efd(worker, &event_fd_);
  if (status != UCS_OK) return UcxSetUpError("no event descriptor", status);
  ISTHMUS_RETURN_IF_ERROR(Listen(kHelloId, OnHello));
  return Listen(kAnswerId, OnAnswer);
}

absl::Status UcxTransport::Listen(unsigned id, ucp_am_recv_callback_t callback) {
  ucp_am_handler_param_t param = {};
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                     UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = id;
  param.cb = callback;
  param.arg = this;
  const ucs_status_t status = ucp_worker_set_am_recv_handler(worker_.get(), &param);
  return status == UCS_OK ? absl::OkStatus() : UcxSetUpError("active messages", status);
}

UcxTransport::~UcxTransport() {
  if (worker_ == nullptr) return;
  MutexLock lock(mutex_);
  for (auto& [incarnation, peer] : peers_) Discard(*peer);
  for (int i = 0; i < 100 && !answers_.empty(); ++i) Progress();
  for (void* request : answers_) ucp_request_free(request);
  for (ucp_mem_h memory : memory_) {
    if (memory != nullptr) ucp_mem_unmap(context_.get(), memory);
  }
}

// Runs inside Progress, so under the lock.
ucs_status_t UcxTransport::OnHello(void* self, const void* header, size_t header_bytes, void*,
                                   size_t, const ucp_am_recv_param_t* param) {
  auto* transport = static_cast<UcxTransport*>(self);
  const bool can_answer = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  // A stranger's message, or too many at once: no answer, and the writer gives up.
  if (header_bytes != sizeof(Greeting) || !can_answer) return UCS_OK;
  if (transport->answers_.size() >= kMaxPeers) return UCS_OK;
  Greeting hello;
  std::memcpy(&hello, header, sizeof(hello));
  transport->answer_texts_.push_back({transport->incarnation_, hello.number});
  ucp_request_param_t send = {};
  void* request = ucp_am_send_nbx(param->reply_ep, kAnswerId, &transport->answer_texts_.back(),
                                  sizeof(Greeting), nullptr, 0, &send);
  if (UCS_PTR_IS_PTR(request)) transport->answers_.push_back(request);
  return UCS_OK;
}

ucs_status_t UcxTransport::OnAnswer(void* self, const void* header, size_t header_bytes, void*,
                                    size_t, const ucp_am_recv_param_t*) {
  if (header_bytes == sizeof(Greeting)) {
    std::memcpy(&static_cast<UcxTransport*>(self)->last_answer_, header, sizeof(Greeting));
  }
  return UCS_OK;
}

void UcxTransport::CollectAnswers() {
  std::erase_if(answers_, [](void* request) {
    if (ucp_request_check_status(request) == UCS_INPROGRESS) return false;
    ucp_request_free(request);
    return true;
  });
  if (answers_.empty()) answer_texts_.clear();
}

bool UcxTransport::Progress() {
  const bool has_progressed = ucp_worker_progress(worker_.get()) != 0;
  if (has_progressed || !answers_.empty()) CollectAnswers();
  return has_progressed;
}

// Called without the lock held by nobody else's doing: the caller holds it, or has just let it go.
void UcxTransport::Sleep(absl::Duration timeout) {
  pollfd event = {event_fd_, POLLIN, 0};
  const auto milliseconds = std::max<int64_t>(absl::ToInt64Milliseconds(timeout), 1);
  // A signal or an error only ends the wait early.
  poll(&event, 1, static_cast<int>(milliseconds));
}

absl::StatusOr<v1::TransferEndpoint> UcxTransport::Publish(std::span<const LocalRegion> regions,
                                                           const Identity& identity) {
  MutexLock lock(mutex_);
  incarnation_ = identity.worker_incarnation;
  ++generation_;
  v1::TransferEndpoint endpoint;
  endpoint.set_transport("ucx");
  endpoint.set_worker_incarnation(identity.worker_incarnation);
  endpoint.set_layout_fingerprint(identity.layout_fingerprint);
  ucp_address_t* address = nullptr;
  size_t address_bytes = 0;
  ucs_status_t status = ucp_worker_get_address(worker_.get(), &address, &address_bytes);
  if (status != UCS_OK) return UcxSetUpError("no address", status);
  endpoint.set_address(address, address_bytes);
  ucp_worker_release_address(worker_.get(), address);

  for (const LocalRegion& region : regions) {
    v1::RegionCard* card = endpoint.add_regions();
    card->set_region(static_cast<uint32_t>(endpoint.regions_size() - 1));
    card->set_generation(generation_);
    card->set_unit_bytes(region.unit_bytes);
    card->set_num_units(region.num_units);
    card->set_base_address(reinterpret_cast<uint64_t>(region.base));
    if (region.unit_bytes * region.num_units == 0) continue;
    ucp_mem_map_params_t params = {};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    params.address = region.base;
    params.length = region.unit_bytes * region.num_units;
    ucp_mem_h memory = nullptr;
    status = ucp_mem_map(context_.get(), &params, &memory);
    if (status != UCS_OK) return UcxSetUpError("registering memory", status);
    memory_.push_back(memory);
    void* key = nullptr;
    size_t key_bytes = 0;
    status = ucp_rkey_pack(context_.get(), memory, &key, &key_bytes);
    if (status != UCS_OK) return UcxSetUpError("packing a remote key", status);
    card->set_key(key, key_bytes);
    ucp_rkey_buffer_release(key);
  }
  return endpoint;
}

absl::Status UcxTransport::Poll(absl::Duration timeout) {
  {
    MutexLock lock(mutex_);
    bool has_progressed = false;
    // Bounded, so that a writer that never pauses cannot keep the lock.
    for (int i = 0; i < 256 && Progress(); ++i) has_progressed = true;
    if (has_progressed || ucp_worker_arm(worker_.get()) != UCS_OK) return absl::OkStatus();
  }
  Sleep(timeout);
  return absl::OkStatus();
}

absl::Status UcxTransport::Finish(void* request, Peer& peer, absl::string_view what,
                                  absl::Time deadline) {
  if (request == nullptr) return absl::OkStatus();
  if (UCS_PTR_IS_ERR(request)) return UcxError(what, UCS_PTR_STATUS(request));
  absl::Time idle_since = absl::Now();
  while (true) {
    const bool has_progressed = Progress();
    const ucs_status_t status = ucp_request_check_status(request);
    if (status != UCS_INPROGRESS) {
      ucp_request_free(request);
      return status == UCS_OK ? absl::OkStatus() : UcxError(what, status);
    }
    const absl::Time now = absl::Now();
    if (now >= deadline || peer.failure != UCS_OK) {
      // UCX completes and frees it when the endpoint is closed by force.
      ucp_request_free(request);
      return UcxError(what, peer.failure != UCS_OK ? peer.failure : UCS_ERR_TIMED_OUT);
    }
    if (has_progressed) idle_since = now;
    if (now - idle_since > kSpin && ucp_worker_arm(worker_.get()) == UCS_OK) {
      Sleep(std::min(deadline - now, kLongestSleep));
    }
  }
}

void UcxTransport::Discard(Peer& peer) {
  for (ucp_rkey_h key : peer.keys) {
    if (key != nullptr) ucp_rkey_destroy(key);
  }
  peer.keys.clear();
  if (peer.endpoint == nullptr) return;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = ucp_ep_close_nbx(peer.endpoint, &param);
  peer.endpoint = nullptr;
  peer.failure = UCS_OK;
  // Nothing is left to be done when this fails: the endpoint is gone either way.
  Finish(request, peer, "closing an endpoint", absl::Now() + kCloseTimeout).IgnoreError();
}

absl::Status UcxTransport::Greet(Peer& peer, absl::Time deadline) {
  const Greeting hello = {peer.incarnation, next_greeting_++};
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_REPLY;
  void* request =
      ucp_am_send_nbx(peer.endpoint, kHelloId, &hello, sizeof(hello), nullptr, 0, &param);
  ISTHMUS_RETURN_IF_ERROR(Finish(request, peer, "hello to the decode worker", deadline));
  while (last_answer_.number != hello.number) {
    if (Progress()) continue;
    const absl::Time now = absl::Now();
    if (peer.failure != UCS_OK) return UcxError("hello to the decode worker", peer.failure);
    if (now >= deadline) return UcxError("hello to the decode worker", UCS_ERR_TIMED_OUT);
    if (ucp_worker_arm(worker_.get()) == UCS_OK) Sleep(std::min(deadline - now, kLongestSleep));
  }
  if (last_answer_.incarnation == peer.incarnation) return absl::OkStatus();
  return WithFaultScope(
      absl::AbortedError(absl::StrFormat("decode worker's incarnation is %016x, want %016x",
                                         last_answer_.incarnation, peer.incarnation)),
      FaultScope::kPeer);
}

absl::Status UcxTransport::ImportKeys(const v1::TransferEndpoint& target, Peer& peer) {
  for (const v1::RegionCard& region : target.regions()) {
    ucp_rkey_h key = nullptr;
    if (!region.key().empty()) {
      const ucs_status_t status = ucp_ep_rkey_unpack(peer.endpoint, region.key().data(), &key);
      if (status != UCS_OK) return UcxError("remote key", status);
    }
    peer.keys.push_back(key);
  }
  return absl::OkStatus();
}

absl::StatusOr<Peer*> UcxTransport::Connect(const v1::TransferEndpoint& target,
                                            absl::Time deadline) {
  const auto found = peers_.find(target.worker_incarnation());
  if (found != peers_.end()) {
    if (found->second->failure == UCS_OK) return found->second.get();
    Discard(*found->second);
    peers_.erase(found);
  }
  if (peers_.size() >= kMaxPeers) {  // Incarnations of long ago, most likely.
    Discard(*peers_.begin()->second);
    peers_.erase(peers_.begin());
  }
  auto peer = std::make_unique<Peer>();
  peer->incarnation = target.worker_incarnation();
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(target.address().data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {OnPeerFailure, peer.get()};
  const ucs_status_t status = ucp_ep_create(worker_.get(), &params, &peer->endpoint);
  if (status != UCS_OK) return UcxError("endpoint of the decode worker", status);
  absl::Status greeted = Greet(*peer, std::min(deadline, absl::Now() + options_.connect_timeout));
  if (greeted.ok()) greeted = ImportKeys(target, *peer);
  if (!greeted.ok()) {
    Discard(*peer);
    return greeted;
  }
  return peers_.emplace(peer->incarnation, std::move(peer)).first->second.get();
}

absl::Status UcxTransport::Post(Peer& peer, const v1::TransferEndpoint& target,
                                std::span<const PageSpan> spans, absl::Time deadline) {
  std::deque<void*> posted;
  absl::Status status;
  const ucp_request_param_t param = {};
  for (const PageSpan& span : spans) {
    if (posted.size() >= kMaxPosted) {
      status = Finish(posted.front(), peer, "write", deadline);
      posted.pop_front();
      if (!status.ok()) break;
    }
    const v1::RegionCard& region = target.regions(static_cast<int>(span.region));
    // The keys are those of the first endpoint of this incarnation that we were shown.
    ucp_rkey_h key = span.region < peer.keys.size() ? peer.keys[span.region] : nullptr;
    if (key == nullptr) {
      status = absl::InvalidArgumentError(
          absl::StrCat("region ", span.region, " has no key, the peer gave ", peer.keys.size()));
      break;
    }
    void* request =
        ucp_put_nbx(peer.endpoint, span.bytes.data(), span.bytes.size(),
                    region.base_address() + span.unit * region.unit_bytes(), key, &param);
    if (request != nullptr) posted.push_back(request);
  }
  // After an error the rest is waited for as well: their local bytes must not be touched before.
  for (void* request : posted) {
    const absl::Status finished = Finish(request, peer, "write", deadline);
    if (status.ok()) status = finished;
  }
  ISTHMUS_RETURN_IF_ERROR(status);
  return Finish(ucp_ep_flush_nbx(peer.endpoint, &param), peer, "flush", deadline);
}

absl::Status UcxTransport::Write(const v1::TransferEndpoint& target,
                                 std::span<const PageSpan> spans, absl::Time deadline) {
  MutexLock lock(mutex_);
  ISTHMUS_ASSIGN_OR_RETURN(Peer* const peer, Connect(target, deadline));
  const absl::Status status = Post(*peer, target, spans, deadline);
  if (!status.ok()) {
    Discard(*peer);
    peers_.erase(target.worker_incarnation());
  }
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const UcxOptions& options) {
  RouteUcxLog();
  auto transport = std::make_unique<UcxTransport>(options);
  ISTHMUS_RETURN_IF_ERROR(transport->Open());
  return transport;
}

}  // namespace isthmus::transfer
