// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/running_request.h"

#include <gtest/gtest.h>

#include <chrono>

#include "services/rpc/channel.h"
#include "services/rpc/status.h"

namespace isthmus::testing {

v1::GenerateRequest RequestOf(size_t num_prompt_tokens, uint32_t max_output_tokens) {
  v1::GenerateRequest request;
  for (size_t i = 0; i < num_prompt_tokens; ++i) {
    request.mutable_token_ids()->add_ids(static_cast<uint32_t>(10 + (i * 37) % 1900));
  }
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_output_tokens(max_output_tokens);
  return request;
}

RunningRequest::RunningRequest(const std::string& router_address, v1::GenerateRequest request,
                               Options options)
    : request_(std::move(request)),
      stub_(v1::Generation::NewStub(rpc::OpenChannel(router_address))),
      reads_(options.reads) {
  context_.set_deadline(std::chrono::system_clock::now() +
                        absl::ToChronoMilliseconds(options.timeout));
  thread_ = Thread(RealClock(), [this] { Read(); });
}

RunningRequest::~RunningRequest() {
  Leave();
  ReadOn();
  thread_.Join();
}

void RunningRequest::Read() {
  const auto reader = stub_->Generate(&context_, request_);
  v1::GenerateReply event;
  while (true) {
    {
      MutexLock lock(mutex_);
      changed_.wait(lock, [this] { return reads_; });
    }
    if (!reader->Read(&event)) break;
    MutexLock lock(mutex_);
    if (event.has_finish()) {
      finish_ = event.finish();
      ++num_finishes_;
    } else if (event.has_delta()) {
      has_delta_after_finish_ |= num_finishes_ > 0;
      const v1::TokenDelta& delta = event.delta();
      tokens_.insert(tokens_.end(), delta.token_ids().begin(), delta.token_ids().end());
      digests_.insert(digests_.end(), delta.logits_crc32c().begin(), delta.logits_crc32c().end());
    }
    changed_.notify_all();
  }
  const absl::Status status = rpc::FromGrpcStatus(reader->Finish(), context_, "router");
  MutexLock lock(mutex_);
  status_ = status;
  is_over_ = true;
  changed_.notify_all();
}

void RunningRequest::ReadOn() {
  MutexLock lock(mutex_);
  reads_ = true;
  changed_.notify_all();
}

size_t RunningRequest::num_tokens() const {
  MutexLock lock(mutex_);
  return tokens_.size();
}

bool RunningRequest::is_over() const {
  MutexLock lock(mutex_);
  return is_over_;
}

bool RunningRequest::WaitForTokens(size_t count, absl::Duration patience) {
  MutexLock lock(mutex_);
  changed_.wait_for(lock, absl::ToChronoMilliseconds(patience),
                    [&] { return is_over_ || tokens_.size() >= count; });
  return tokens_.size() >= count;
}

absl::Status RunningRequest::Wait() {
  thread_.Join();  // The call has a deadline.
  MutexLock lock(mutex_);
  EXPECT_EQ(num_finishes_, status_.ok() ? 1 : 0) << status_;
  EXPECT_FALSE(has_delta_after_finish_);
  if (status_.ok()) {
    EXPECT_EQ(finish_.usage().output_tokens(), tokens_.size());
  }
  return status_;
}

std::vector<uint32_t> RunningRequest::tokens() const {
  MutexLock lock(mutex_);
  return tokens_;
}

std::vector<uint32_t> RunningRequest::logits_digests() const {
  MutexLock lock(mutex_);
  return digests_;
}

v1::Finish RunningRequest::finish() const {
  MutexLock lock(mutex_);
  return finish_;
}

}  // namespace isthmus::testing
