// SPDX-License-Identifier: Apache-2.0
// A prefill and a decode worker on a GPU give the reply of two on the CPU, with pages that travel
// through host memory, and pages of one kind of worker serve the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernels/patches.h"
#include "kernels/testing/device.h"
#include "services/worker/testing/worker_pair.h"

namespace isthmus::worker {
namespace {

const char* TwoRanks() { return kernels::NumDevices() > 1 ? "cuda:0,cuda:1" : "cuda:0,cuda:0"; }

WorkerConfig ConfigOn(const std::string& device, int32_t page_tokens = 128) {
  WorkerConfig config;
  config.checkpoint = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-random-3layer/nvfp4-cast";
  config.device = device;
  config.tp = 1 + static_cast<int32_t>(std::ranges::count(device, ','));
  config.liveness_timeout = absl::Minutes(10);  // The emulator is slow.
  config.patches = kernels::NoPatches();        // The trusted paths have the bits of the CPU.
  config.page_tokens = page_tokens;
  config.cache_tokens = 1024;
  config.chunk_tokens = 64;
  config.max_sequences = 2;
  config.threads = 1;
  return config;
}

// More than one page of 128 tokens, so that the first is pushed while the rest is computed. The
// second time both workers have it, and the prefill worker a snapshot of the state behind it.
//
// A device with a comma in it stands for two ranks.
TestReply ReplyOf(const std::string& prefill, const std::string& decode,
                  int32_t page_tokens = 128) {
  WorkerPair pair(ConfigOn(prefill, page_tokens), ConfigOn(decode, page_tokens));
  const size_t size = kernels::IsRealDevice() ? 300 : 131;
  const TestReply reply = pair.Run(RequestOf(size, 4));
  EXPECT_EQ(reply.end, v1::SEQUENCE_END_LENGTH) << reply.error.DebugString();
  const TestReply again = pair.Run(RequestOf(size, 4));
  EXPECT_EQ(again.tokens, reply.tokens);
  EXPECT_EQ(again.digests, reply.digests);
  const auto whole = [](size_t tokens, int32_t unit) {
    return tokens / static_cast<size_t>(unit) * static_cast<size_t>(unit);
  };
  EXPECT_EQ(pair.prefill->pool().prefixes()->counts().hit_tokens, whole(size, 128));
  EXPECT_EQ(pair.decode->pool().prefixes()->counts().hit_tokens, whole(size, page_tokens));
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
  // A hit ends inside a page, whose entries are copied on the device.
  const TestReply other_pages = ReplyOf("cuda:0", "cpu", 256);
  EXPECT_EQ(want.tokens, other_pages.tokens);
  EXPECT_EQ(want.digests, other_pages.digests);
}

// Pages of a worker without a GPU serve every rank of another, and pages of ranks one without.
TEST(DeviceWorkerTest, RanksTakeAndGivePages) {
  ISTHMUS_REQUIRE_DEVICE();
  if (kernels::IsRealDevice() && kernels::NumDevices() < 2) GTEST_SKIP() << "needs two GPUs";
  EXPECT_EQ(ReplyOf("cpu", TwoRanks()).tokens.size(), 4u);
  WorkerPair pair(ConfigOn(TwoRanks()), ConfigOn("cpu"));
  const TestReply reply = pair.Run(RequestOf(kernels::IsRealDevice() ? 300 : 12, 4));
  EXPECT_EQ(reply.end, v1::SEQUENCE_END_LENGTH) << reply.error.DebugString();
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
