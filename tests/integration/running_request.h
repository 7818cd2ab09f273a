// SPDX-License-Identifier: Apache-2.0
// A request to the router that runs in a thread of its own while a test breaks things.
#pragma once

#include <grpcpp/client_context.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/generate.grpc.pb.h"
#include "services/base/mutex.h"
#include "services/base/thread.h"

namespace isthmus::testing {

// Token ids that every model here knows.
v1::GenerateRequest RequestOf(size_t num_prompt_tokens, uint32_t max_output_tokens);

class RunningRequest {
 public:
  struct Options {
    absl::Duration timeout = absl::Minutes(1);
    bool reads = true;  // False: like a client that hangs, until ReadOn.
  };

  RunningRequest(const std::string& router_address, v1::GenerateRequest request)
      : RunningRequest(router_address, std::move(request), Options()) {}
  RunningRequest(const std::string& router_address, v1::GenerateRequest request, Options options);
  // Leaves, if the reply has not ended.
  ~RunningRequest();

  // The client goes away.
  void Leave() { context_.TryCancel(); }
  void ReadOn();

  size_t num_tokens() const;
  bool is_over() const;
  // False when the reply ended, or `patience` did, before.
  bool WaitForTokens(size_t count, absl::Duration patience);

  // The end of the reply, within the request's timeout. What follows is valid after it. Besides the
  // status it checks that there was one end: OK with a finish as the last event, or an error
  // without.
  absl::Status Wait();
  std::vector<uint32_t> tokens() const;
  std::vector<uint32_t> logits_digests() const;
  v1::Finish finish() const;

 private:
  void Read();

  const v1::GenerateRequest request_;
  grpc::ClientContext context_;
  std::unique_ptr<v1::Generation::Stub> stub_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool reads_;  // Guarded by mutex_, as everything below.
  bool is_over_ = false;
  absl::Status status_;
  std::vector<uint32_t> tokens_;
  std::vector<uint32_t> digests_;
  v1::Finish finish_;
  int num_finishes_ = 0;
  bool has_delta_after_finish_ = false;
  Thread thread_;
};

}  // namespace isthmus::testing
