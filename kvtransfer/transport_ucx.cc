// SPDX-License-Identifier: Apache-2.0
// Transport over UCX's one-sided writes, written against the API of UCX 1.13.
//
// The owner listens at a socket address, and writers connect to it. Every write that runs has a
// link (an endpoint) to itself; links that are idle are kept for the next one. A link first says
// hello by active message and waits for the owner's incarnation. Then it puts piece by piece, each
// flushed, which completes when the owner's memory holds it. The owner's Poll makes progress for
// what arrives, since over tcp the owner's processor copies it. A link that failed in any way is
// closed by force and never used again.
#include <ucp/api/ucp.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvtransfer/transport.h"
#include "kvtransfer/ucx_link.h"
#include "kvtransfer/ucx_listener.h"
#include "kvtransfer/ucx_log.h"
#include "kvtransfer/ucx_progress.h"
#include "kvtransfer/ucx_resources.h"
#include "services/base/clock.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"

namespace isthmus::transfer {
namespace {

constexpr size_t kMaxLinks = 256;  // Idle or in use; more writes at one time wait.
constexpr size_t kMaxIdleLinks = 64;
constexpr size_t kMaxAnswers = 256;  // Under way at one time.

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
  // An answer that UCX is still sending.
  struct Answer {
    UcxTransport* transport = nullptr;
    Greeting greeting;
  };

  static ucs_status_t OnHello(void* self, const void* header, size_t header_bytes, void*, size_t,
                              const ucp_am_recv_param_t* param);
  static ucs_status_t OnAnswer(void* self, const void* header, size_t header_bytes, void*, size_t,
                               const ucp_am_recv_param_t*);
  static void OnAnswered(void* request, ucs_status_t, void* answer);

  absl::Status Receive(unsigned id, ucp_am_recv_callback_t callback);
  void Answered(const Answer* answer);

  // All under the lock, which they let go while they wait.
  absl::StatusOr<std::unique_ptr<UcxLink>> Acquire(MutexLock& lock,
                                                   const v1::TransferEndpoint& target,
                                                   absl::Time deadline);
  absl::StatusOr<std::unique_ptr<UcxLink>> Connect(MutexLock& lock,
                                                   const v1::TransferEndpoint& target,
                                                   absl::Time deadline);
  void Discard(MutexLock& lock, std::unique_ptr<UcxLink> link);
  void DiscardIdle(MutexLock& lock, std::list<std::unique_ptr<UcxLink>>::iterator link);

  const UcxOptions options_;
  UcxContext context_;

  // Guarded by the lock of progress_, as UCX is; what UCX may have the address of outlives worker_.
  uint64_t incarnation_ = 0;
  uint32_t generation_ = 0;
  uint64_t next_greeting_ = 1;
  size_t num_links_ = 0;
  std::vector<ucp_mem_h> memory_;
  std::list<Answer> answers_;
  std::map<uint64_t, UcxLink*> greetings_;         // That wait for their answer, by number.
  std::list<std::unique_ptr<UcxLink>> idle_;       // The one used last at the end.
  std::list<std::unique_ptr<UcxLink>> abandoned_;  // Closed, but UCX may still touch them.
  UcxProgress progress_;
  UcxListener listener_{&progress_};
  UcxWorker worker_;
};

absl::Status UcxTransport::Open() {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return UcxSetUpError("reading its configuration", status);
  const std::string segment = absl::StrCat(kSegmentBytes);
  for (const auto& [key, value] :
       {std::pair("TLS", options_.lanes), std::pair("NET_DEVICES", options_.devices),
        std::pair("TX_SEG_SIZE", segment), std::pair("RX_SEG_SIZE", segment),
        // What it finds out, a write finds out too (ucx_link.cc).
        std::pair("KEEPALIVE_INTERVAL", std::string("inf"))}) {
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
  ISTHMUS_RETURN_IF_ERROR(progress_.Open(worker));
  ISTHMUS_RETURN_IF_ERROR(Receive(kHelloId, OnHello));
  return Receive(kAnswerId, OnAnswer);
}

absl::Status UcxTransport::Receive(unsigned id, ucp_am_recv_callback_t callback) {
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
  MutexLock lock = progress_.Lock();
  listener_.Close(lock);
  while (!idle_.empty()) DiscardIdle(lock, idle_.begin());
  for (ucp_mem_h memory : memory_) ucp_mem_unmap(context_.get(), memory);
  // Their keys belong to the worker; they themselves stay until it is gone.
  for (const auto& link : abandoned_) link->ReleaseKeys();
}

// Runs inside progress, so under the lock.
ucs_status_t UcxTransport::OnHello(void* self, const void* header, size_t header_bytes, void*,
                                   size_t, const ucp_am_recv_param_t* param) {
  auto* transport = static_cast<UcxTransport*>(self);
  const bool can_answer = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  // A stranger's message, or too many at once: no answer, and the writer gives up.
  if (header_bytes != sizeof(Greeting) || !can_answer) return UCS_OK;
  if (transport->answers_.size() >= kMaxAnswers) return UCS_OK;
  Answer& answer = transport->answers_.emplace_back();
  answer.transport = transport;
  std::memcpy(&answer.greeting, header, sizeof(Greeting));
  answer.greeting.incarnation = transport->incarnation_;
  ucp_request_param_t send = {};
  send.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  send.cb.send = OnAnswered;
  send.user_data = &answer;
  void* request = ucp_am_send_nbx(param->reply_ep, kAnswerId, &answer.greeting, sizeof(Greeting),
                                  nullptr, 0, &send);
  if (!UCS_PTR_IS_PTR(request)) transport->Answered(&answer);
  return UCS_OK;
}

void UcxTransport::OnAnswered(void* request, ucs_status_t, void* answer) {
  const auto* sent = static_cast<Answer*>(answer);
  sent->transport->Answered(sent);
  ucp_request_free(request);
}

void UcxTransport::Answered(const Answer* answer) {
  answers_.remove_if([answer](const Answer& one) { return &one == answer; });
}

ucs_status_t UcxTransport::OnAnswer(void* self, const void* header, size_t header_bytes, void*,
                                    size_t, const ucp_am_recv_param_t*) {
  if (header_bytes != sizeof(Greeting)) return UCS_OK;
  Greeting answer;
  std::memcpy(&answer, header, sizeof(answer));
  const auto& greetings = static_cast<UcxTransport*>(self)->greetings_;
  const auto asked = greetings.find(answer.number);
  if (asked != greetings.end()) asked->second->OnAnswer(answer.incarnation);
  return UCS_OK;
}

absl::StatusOr<v1::TransferEndpoint> UcxTransport::Publish(std::span<const LocalRegion> regions,
                                                           const Identity& identity) {
  const MutexLock lock = progress_.Lock();
  // Only an owner listens: garbage on this port makes UCX 1.13 end the process.
  if (listener_.address().empty()) {
    ISTHMUS_RETURN_IF_ERROR(listener_.Open(worker_.get(), options_.devices));
  }
  incarnation_ = identity.worker_incarnation;
  ++generation_;
  v1::TransferEndpoint endpoint;
  endpoint.set_transport("ucx");
  endpoint.set_worker_incarnation(identity.worker_incarnation);
  endpoint.set_layout_fingerprint(identity.layout_fingerprint);
  endpoint.set_address(listener_.address());
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
    ucs_status_t status = ucp_mem_map(context_.get(), &params, &memory);
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
  MutexLock lock = progress_.Lock();
  listener_.CloseFailed(lock);
  progress_.WaitUntil(lock, RealClock().Now() + timeout, [] { return false; });
  return absl::OkStatus();
}

absl::Status UcxTransport::Write(const v1::TransferEndpoint& target,
                                 std::span<const PageSpan> spans, absl::Time deadline) {
  if (RealClock().Now() >= deadline) return UcxDeadlineError("write");
  MutexLock lock = progress_.Lock();
  ISTHMUS_ASSIGN_OR_RETURN(std::unique_ptr<UcxLink> link, Acquire(lock, target, deadline));
  absl::Status status = link->Write(lock, target, spans, deadline);
  if (!status.ok()) {
    Discard(lock, std::move(link));
    return status;
  }
  idle_.push_back(std::move(link));
  if (idle_.size() > kMaxIdleLinks) DiscardIdle(lock, idle_.begin());
  progress_.Wake();  // A write may wait for a link.
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<UcxLink>> UcxTransport::Acquire(MutexLock& lock,
                                                               const v1::TransferEndpoint& target,
                                                               absl::Time deadline) {
  progress_.Advance();  // What is known about dead peers by now.
  const auto take = [this](auto position) {
    std::unique_ptr<UcxLink> link = std::move(*position);
    idle_.erase(position);
    return link;
  };
  while (true) {
    const auto failed = std::find_if(idle_.begin(), idle_.end(),
                                     [](const auto& link) { return link->has_failed(); });
    if (failed != idle_.end()) {
      DiscardIdle(lock, failed);
      continue;
    }
    for (auto link = idle_.rbegin(); link != idle_.rend(); ++link) {
      if ((*link)->Serves(target)) return take(std::prev(link.base()));
    }
    if (num_links_ < kMaxLinks) return Connect(lock, target, deadline);
    if (!idle_.empty()) {  // Of another process.
      DiscardIdle(lock, idle_.begin());
      continue;
    }
    const bool is_free = progress_.WaitUntil(
        lock, deadline, [this] { return num_links_ < kMaxLinks || !idle_.empty(); });
    if (!is_free) return UcxDeadlineError("waiting for one of the links that are in use");
  }
}

absl::StatusOr<std::unique_ptr<UcxLink>> UcxTransport::Connect(MutexLock& lock,
                                                               const v1::TransferEndpoint& target,
                                                               absl::Time deadline) {
  auto link = std::make_unique<UcxLink>(&progress_, target, next_greeting_++);
  ++num_links_;
  greetings_.emplace(link->greeting_number(), link.get());
  const absl::Time patience = std::min(deadline, RealClock().Now() + options_.connect_timeout);
  absl::Status status = link->Connect(lock, worker_.get(), target, patience);
  greetings_.erase(link->greeting_number());
  if (status.ok()) return link;
  Discard(lock, std::move(link));
  return status;
}

void UcxTransport::Discard(MutexLock& lock, std::unique_ptr<UcxLink> link) {
  if (!link->Close(lock)) {
    LogWarning("ucx does not let go of a closed endpoint", {{"abandoned", abandoned_.size() + 1}});
    abandoned_.push_back(std::move(link));
  }
  --num_links_;
  progress_.Wake();
}

void UcxTransport::DiscardIdle(MutexLock& lock,
                               std::list<std::unique_ptr<UcxLink>>::iterator link) {
  std::unique_ptr<UcxLink> taken = std::move(*link);
  idle_.erase(link);  // Before the wait, so that nobody else takes it.
  Discard(lock, std::move(taken));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const UcxOptions& options) {
  RouteUcxLog();
  auto transport = std::make_unique<UcxTransport>(options);
  ISTHMUS_RETURN_IF_ERROR(transport->Open());
  return transport;
}

}  // namespace isthmus::transfer
