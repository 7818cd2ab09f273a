// SPDX-License-Identifier: Apache-2.0
#include "router/testing/scripted_worker.h"

#include <algorithm>
#include <utility>

#include "services/base/clock.h"
#include "services/base/fault.h"
#include "services/base/version.h"

namespace isthmus::router::testing {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(2);

// The next answer of a script.
absl::Status Next(std::deque<absl::Status>& answers) {
  if (answers.empty()) return absl::OkStatus();
  absl::Status answer = answers.front();
  if (answers.size() > 1) answers.pop_front();
  return answer;
}

class ScriptedClient : public rpc::WorkerClient {
 public:
  ScriptedClient(std::string address, std::shared_ptr<ScriptedWorker> worker)
      : address_(std::move(address)), worker_(std::move(worker)) {}

  const std::string& address() const override { return address_; }

  absl::StatusOr<v1::DescribeReply> Describe(const rpc::CallOptions&) override {
    return absl::UnimplementedError("not scripted");
  }
  absl::StatusOr<v1::KvReservation> Reserve(const v1::ReserveCall& call,
                                            const rpc::CallOptions&) override {
    MutexLock lock(worker_->mutex);
    worker_->calls.emplace_back("reserve");
    if (call.ask_id() != 0) worker_->calls.emplace_back("ask");
    worker_->seen.insert(call.transfer_id());
    if (absl::Status answer = Next(worker_->reserve_answers); !answer.ok()) return answer;
    if (worker_->transfers.size() >= worker_->num_slots) {
      absl::Status full = absl::ResourceExhaustedError("no state slot is free");
      if (call.ask_id() == 0 || worker_->num_give_way == 0) return full;
      if (--worker_->num_give_way == 0) ++worker_->num_slots;
      return WithRoomSoon(std::move(full));
    }
    worker_->transfers.insert(call.transfer_id());
    v1::KvReservation reservation;
    reservation.set_transfer_id(call.transfer_id());
    return reservation;
  }
  absl::StatusOr<v1::PrefillReply> Prefill(const v1::PrefillCall& call,
                                           const rpc::CallOptions& options) override {
    MutexLock lock(worker_->mutex);
    worker_->calls.emplace_back("prefill");
    worker_->transfers.insert(call.reservation().transfer_id());
    if (!Hold(lock, worker_->holds_prefill, options)) return absl::CancelledError("cancelled");
    if (absl::Status answer = Next(worker_->prefill_answers); !answer.ok()) return answer;
    worker_->transfers.erase(call.reservation().transfer_id());
    v1::PrefillReply reply;
    v1::KvHandoff& handoff = *reply.mutable_handoff();
    handoff.set_transfer_id(call.reservation().transfer_id());
    const uint32_t num_replies = std::max(1u, call.sampler().sampling().num_replies());
    for (uint32_t i = 0; i < num_replies; ++i) handoff.add_first_tokens()->set_token_id(20);
    handoff.set_kv_bytes(1000);
    return reply;
  }
  absl::StatusOr<v1::HandoffReply> Handoff(const v1::HandoffCall& call,
                                           const rpc::CallOptions&) override {
    bool streams = false;
    {
      MutexLock lock(worker_->mutex);
      worker_->calls.emplace_back("handoff");
      if (absl::Status answer = Next(worker_->handoff_answers); !answer.ok()) return answer;
      streams = worker_->streams;
    }
    if (streams) {
      worker_->Send(call.handoff().transfer_id(), 1, call.max_output_tokens() - 1,
                    v1::SEQUENCE_END_LENGTH);
    }
    v1::HandoffReply reply;
    reply.set_digests_verified(3);
    return reply;
  }
  absl::StatusOr<v1::CancelReply> CancelPrefill(const v1::CancelCall& call,
                                                const rpc::CallOptions& options) override {
    return Cancel(call, options);
  }
  absl::StatusOr<v1::CancelReply> CancelDecode(const v1::CancelCall& call,
                                               const rpc::CallOptions& options) override {
    return Cancel(call, options);
  }
  absl::StatusOr<v1::DrainReply> Drain(const v1::DrainCall&, const rpc::CallOptions&) override {
    MutexLock lock(worker_->mutex);
    worker_->calls.emplace_back("drain");
    v1::DrainReply reply;
    reply.set_transfers(worker_->transfers.size());
    return reply;
  }

  absl::Status ReadTokens(const v1::TokensHello&, const rpc::CallOptions& options,
                          absl::FunctionRef<void()> on_open,
                          absl::FunctionRef<void(const v1::StepTokens&)> on_step) override {
    on_open();
    while (!options.is_cancelled()) {
      v1::StepTokens step;
      {
        MutexLock lock(worker_->mutex);
        RealClock().WaitFor(worker_->changed, lock, kPoll,
                            [&] { return worker_->ends_stream || !worker_->steps.empty(); });
        if (worker_->ends_stream) return absl::UnavailableError("the worker is gone");
        if (worker_->steps.empty()) continue;
        step = std::move(worker_->steps.front());
        worker_->steps.pop_front();
      }
      on_step(step);
    }
    return absl::CancelledError("cancelled");
  }

 private:
  // Waits while `holds`; false when the call was cancelled meanwhile.
  bool Hold(MutexLock& lock, const bool& holds, const rpc::CallOptions& options) {
    while (holds) {
      if (options.is_cancelled && options.is_cancelled()) return false;
      RealClock().WaitFor(worker_->changed, lock, kPoll, [&] { return !holds; });
    }
    return true;
  }
  absl::StatusOr<v1::CancelReply> Cancel(const v1::CancelCall& call,
                                         const rpc::CallOptions& options) {
    MutexLock lock(worker_->mutex);
    if (!Hold(lock, worker_->holds_cancel, options)) return absl::CancelledError("cancelled");
    worker_->calls.emplace_back(call.writer_is_done() ? "cancel done" : "cancel not done");
    if (absl::Status answer = Next(worker_->cancel_answers); !answer.ok()) return answer;
    v1::CancelReply reply;
    reply.set_was_known(worker_->transfers.erase(call.transfer_id()) > 0);
    return reply;
  }

  const std::string address_;
  const std::shared_ptr<ScriptedWorker> worker_;
};

}  // namespace

ScriptedWorker::ScriptedWorker(v1::WorkerRole role, uint64_t incarnation,
                               const std::string& address) {
  card.set_role(role);
  card.set_incarnation(incarnation);
  card.set_address(address);
  card.set_protocol_version(kProtocolVersion);
  card.mutable_values()->set_index_topk(64);
  card.mutable_values()->set_max_sequence_tokens(1000);
  card.mutable_values()->set_vocab_size(1920);
  card.mutable_values()->set_end_token_id(1);
}

void ScriptedWorker::Set(const std::function<void(ScriptedWorker&)>& change) {
  {
    MutexLock lock(mutex);
    change(*this);
  }
  changed.notify_all();
}

size_t ScriptedWorker::Count(const std::string& call) {
  MutexLock lock(mutex);
  size_t count = 0;
  for (const std::string& one : calls) count += one == call ? 1 : 0;
  return count;
}

size_t ScriptedWorker::num_held() {
  MutexLock lock(mutex);
  return transfers.size();
}

void ScriptedWorker::Send(const std::string& transfer_id, uint64_t first_index, uint64_t count,
                          v1::SequenceEnd end) {
  Set([&](ScriptedWorker& worker) {
    for (uint64_t i = 0; i < count; ++i) {
      v1::StepTokens step;
      v1::SequenceTokens& tokens = *step.add_sequences();
      tokens.set_transfer_id(transfer_id);
      tokens.set_first_index(first_index + i);
      tokens.add_token_ids(static_cast<uint32_t>(20 + first_index + i));
      if (i + 1 == count) tokens.set_end(end);
      worker.steps.push_back(step);
    }
    if (end != v1::SEQUENCE_END_UNSPECIFIED) worker.transfers.erase(transfer_id);
  });
}

std::shared_ptr<ScriptedWorker> ScriptedNetwork::Add(v1::WorkerRole role, uint64_t incarnation,
                                                     const std::string& address) {
  auto worker = std::make_shared<ScriptedWorker>(role, incarnation, address);
  MutexLock lock(mutex_);
  workers_.push_back(worker);
  return worker;
}

ClusterView::Connect ScriptedNetwork::connect() {
  return [this](const std::string& address) -> std::unique_ptr<rpc::WorkerClient> {
    MutexLock lock(mutex_);
    for (size_t i = workers_.size(); i > 0; --i) {
      if (workers_[i - 1]->card.address() != address) continue;
      return std::make_unique<ScriptedClient>(address, workers_[i - 1]);
    }
    return nullptr;
  };
}

bool Eventually(const std::function<bool()>& holds) {
  for (int i = 0; i < 10000 && !holds(); ++i) RealClock().Sleep(absl::Milliseconds(1));
  return holds();
}

}  // namespace isthmus::router::testing
