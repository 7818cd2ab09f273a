// SPDX-License-Identifier: Apache-2.0
// A cluster of real processes on loopback: one router and workers of both roles that register with
// it. Every wait is bounded; what is asked about workers is asked of them, not of the router.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/cluster.pb.h"
#include "services/rpc/router_client.h"
#include "services/rpc/worker_client.h"
#include "tests/integration/program_under_test.h"

namespace isthmus::testing {

inline constexpr absl::Duration kStartPatience = absl::Seconds(30);
inline constexpr absl::Duration kReplyPatience = absl::Minutes(2);

// The bundled model, whose tokenizer every router loads.
std::string BundledCheckpoint();

// Settings of processes as NAME=VALUE.
using Assignments = std::vector<std::string>;

struct ClusterOptions {
  int num_prefill = 1;
  int num_decode = 1;
  Assignments workers;  // Of both roles.
  Assignments prefill;
  Assignments decode;
  Assignments router;
};

enum class Role : uint8_t { kRouter, kPrefill, kDecode };
const char* RoleName(Role role);

// One process of a cluster, and the ones that took its place.
class Member {
 public:
  Member(Role role, std::string name, std::string folder, Assignments assignments);

  Role role() const { return role_; }
  const std::string& address() const { return address_; }
  ServerProgram& program() { return *program_; }

  // SIGKILL, and waits until the process is gone.
  void Kill();

  // Another process at the same address.
  void Restart();

  // What a worker says of itself. Unavailable when it is dead or stopped.
  absl::StatusOr<v1::DescribeReply> Describe();
  // Its load, or one that equals nothing when it does not answer.
  v1::WorkerLoad Load();

 private:
  void Start();

  const Role role_;
  const std::string name_;
  const std::string folder_;
  const Assignments assignments_;
  int num_starts_ = 0;
  std::string address_;
  std::unique_ptr<ServerProgram> program_;
  std::unique_ptr<rpc::WorkerClient> client_;
};

class Cluster {
 public:
  // Starts everything; WaitUntilReady says whether it works.
  explicit Cluster(ClusterOptions options);

  Member& router() { return *router_; }
  Member& prefill(size_t index = 0) { return *prefill_[index]; }
  Member& decode(size_t index = 0) { return *decode_[index]; }
  Member& member(Role role);
  std::vector<Member*> workers();

  // One more worker.
  Member& Add(Role role, const Assignments& assignments);

  // Another router for the same workers, which do not know it: they keep the old one. The client
  // follows.
  rpc::RouterClient& client() { return *client_; }

  // Whether the router becomes ready with `num_workers` workers in use; all of them when 0.
  ::testing::AssertionResult WaitUntilReady(size_t num_workers = 0);

  // Whether every worker that lives gets all its pages and slots back, none of them in quarantine,
  // and neither they nor the router have anything left to do.
  ::testing::AssertionResult WaitUntilFree(absl::Duration patience);

  // Whether a worker that the router knows, or tried to register, has `text` as its problem.
  ::testing::AssertionResult WaitForProblem(const std::string& text);

  // All logs, for a failed assertion.
  std::string Logs();

 private:
  std::unique_ptr<Member> Make(Role role, const std::string& name, const Assignments& assignments);

  const ClusterOptions options_;
  const TemporaryFolder folder_;
  std::unique_ptr<Member> router_;
  std::vector<std::unique_ptr<Member>> prefill_;
  std::vector<std::unique_ptr<Member>> decode_;
  std::unique_ptr<rpc::RouterClient> client_;
};

// A suite whose tests share one cluster, of Suite::Options(); what a test took is free after it.
template <typename Suite>
class SharedClusterTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    cluster_ = new Cluster(Suite::Options());
    ASSERT_TRUE(cluster_->WaitUntilReady());
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }
  void TearDown() override { EXPECT_TRUE(cluster_->WaitUntilFree(absl::Seconds(5))); }

  static inline Cluster* cluster_ = nullptr;
};

// Polls until `is_true` or for `patience`; returns what it says then.
bool WaitUntil(absl::Duration patience, const std::function<bool()>& is_true);

}  // namespace isthmus::testing
