// SPDX-License-Identifier: Apache-2.0
// A prefill and a decode worker on a GPU give the reply of two on the CPU, with pages that travel
// through host memory, and pages of one kind of worker serve the other.
#include <gtest/gtest.h>

#include <string>

#include "kernels/patches.h"
#include "kernels/testing/device.h"
#include "services/worker/testing/worker_pair.h"

namespace isthmus::worker {
namespace {

WorkerConfig ConfigOn(const std::string& device) {
  WorkerConfig config;
  config.checkpoint = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-random-3layer/nvfp4-cast";
  config.device = device;
  config.patches = kernels::NoPatches();  // The trusted paths have the bits of the CPU.
  config.page_tokens = 128;
  config.cache_tokens = 1024;
  config.chunk_tokens = 64;
  config.max_sequences = 2;
  config.threads = 1;
  return config;
}

// More than one page, so that the first is pushed while the rest is computed.
TestReply ReplyOf(const std::string& prefill, const std::string& decode) {
  WorkerPair pair(ConfigOn(prefill), ConfigOn(decode));
  const TestReply reply = pair.Run(RequestOf(kernels::IsRealDevice() ? 300 : 131, 4));
  EXPECT_EQ(reply.end, v1::SEQUENCE_END_LENGTH) << reply.error.DebugString();
  return reply;
}

TEST(DeviceWorkerTest, RepliesAreThoseOfTheCpu) {
  ISTHMUS_REQUIRE_DEVICE();
  const TestReply want = ReplyOf("cpu", "cpu");
  EXPECT_EQ(want.tokens.size(), 4u);
  const TestReply on_device = ReplyOf("cuda:0", "cuda:0");
  EXPECT_EQ(want.tokens, on_device.tokens);
  EXPECT_EQ(want.digests, on_device.digests);
  const TestReply mixed = ReplyOf("cpu", "cuda:0");
  EXPECT_EQ(want.tokens, mixed.tokens);
  EXPECT_EQ(want.digests, mixed.digests);
}

TEST(DeviceWorkerTest, RefusesADeviceThatIsNotThere) {
  ISTHMUS_REQUIRE_DEVICE();
  WorkerParts parts;
  const auto refused =
      Worker::Assemble(ConfigOn("cuda:63"), v1::WORKER_ROLE_DECODE, std::move(parts), RealClock());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kNotFound) << refused.status();
  WorkerParts others;
  const auto misspelt =
      Worker::Assemble(ConfigOn("gpu"), v1::WORKER_ROLE_DECODE, std::move(others), RealClock());
  EXPECT_EQ(misspelt.status().code(), absl::StatusCode::kInvalidArgument) << misspelt.status();
}

}  // namespace
}  // namespace isthmus::worker
