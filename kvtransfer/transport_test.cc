// SPDX-License-Identifier: Apache-2.0
// Both transports; UCX for real over tcp on the loopback device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/sender.h"
#include "kvtransfer/testing/page_owner.h"
#include "kvtransfer/transport_loopback.h"
#include "services/base/crc32c.h"
#include "services/base/fault.h"

namespace isthmus::transfer {
namespace {

using ::testing::HasSubstr;
using testing::kIncarnation;
using testing::kLayout;
using testing::kPageBytes;
using testing::kPages;
using testing::PageOwner;
using testing::Pattern;

uint32_t Digest(const ExpectedGroup& group) {
  return Crc32c(group.bytes.data(), group.bytes.size(), group.page_index);
}

class TransportTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Transport> Make(const std::string& name) {
    if (GetParam() == std::string("loopback")) return MakeLoopbackTransport(&network_, name);
    auto made = MakeUcxTransport({});
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }
  static absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

  LoopbackNetwork network_;
};

TEST_P(TransportTest, WritesPagesInAnyOrderAndTheyVerify) {
  PageOwner owner(Make("decode"));
  const std::unique_ptr<Transport> writer = Make("prefill");
  std::vector<std::vector<std::byte>> pages;
  std::vector<PageSpan> spans;
  v1::KvHandoff handoff;
  handoff.set_transfer_id("0123456789abcdef");
  for (uint32_t i = 0; i < kPages; ++i) pages.push_back(Pattern(kPageBytes, i));
  for (uint32_t i = 0; i < kPages; ++i) {
    const uint32_t unit = (i * 7 + 3) % kPages;
    spans.push_back({pages[unit], 0, owner.endpoint.regions(0).generation(), unit});
  }
  const auto written = Push(*writer, owner.Reserve(), owner.endpoint, kLayout, spans, Soon());
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(*written, kPageBytes * kPages);

  std::vector<ExpectedGroup> expected;
  for (uint32_t i = 0; i < kPages; ++i) {
    expected.push_back({0, i, 0, 1, i * 256, owner.page(i)});
    v1::PageGroupDigest* digest = handoff.add_digests();
    digest->set_page_index(i);
    digest->set_num_layers(1);
    digest->set_first_position(i * 256);
    digest->set_crc32c(Crc32c(pages[i].data(), pages[i].size(), i));
  }
  const auto verified = VerifyGroups(handoff, expected, Digest);
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(*verified, kPages);

  owner.bytes()[3 * kPageBytes + 69999] ^= std::byte{1};  // The last byte of page 3.
  const absl::Status corrupt = VerifyGroups(handoff, expected, Digest).status();
  EXPECT_EQ(corrupt.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(FaultScopeOf(corrupt), FaultScope::kPeer);
  EXPECT_THAT(std::string(corrupt.message()), HasSubstr("page 3"));
}

TEST_P(TransportTest, WritesAgainToAKnownPeerAndTwoWritersDoNotMix) {
  PageOwner owner(Make("decode"));
  const std::unique_ptr<Transport> first = Make("prefill-1");
  const std::unique_ptr<Transport> second = Make("prefill-2");
  for (uint32_t round = 0; round < 5; ++round) {
    const auto a = Pattern(kPageBytes, round);
    const auto b = Pattern(100, round + 1000);
    const PageSpan to_a = {a, 0, 1, round};
    const PageSpan to_b = {b, 0, 1, 30 + round};
    ASSERT_TRUE(first->Write(owner.endpoint, {&to_a, 1}, Soon()).ok());
    ASSERT_TRUE(second->Write(owner.endpoint, {&to_b, 1}, Soon()).ok());
    EXPECT_TRUE(std::equal(a.begin(), a.end(), owner.page(round).begin()));
    EXPECT_TRUE(std::equal(b.begin(), b.end(), owner.page(30 + round).begin()));
  }
}

TEST_P(TransportTest, RefusesAnotherIncarnationBeforeTheFirstByte) {
  PageOwner owner(Make("decode"));
  const std::unique_ptr<Transport> writer = Make("prefill");
  v1::TransferEndpoint stale = owner.endpoint;
  stale.set_worker_incarnation(99);
  const auto page = Pattern(kPageBytes, 1);
  const PageSpan span = {page, 0, 1, 0};
  const absl::Status status = writer->Write(stale, {&span, 1}, Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
  EXPECT_EQ(owner.page(0)[0], std::byte{0});
  EXPECT_EQ(owner.page(0)[1], std::byte{0});
}

INSTANTIATE_TEST_SUITE_P(Lanes, TransportTest, ::testing::Values("loopback", "ucx"),
                         [](const auto& param) { return std::string(param.param); });

TEST(UcxTransportTest, AnOwnerThatDoesNotPollCostsNoMoreThanTheDeadline) {
  auto owner_transport = MakeUcxTransport({});
  ASSERT_TRUE(owner_transport.ok()) << owner_transport.status();
  PageOwner owner(*std::move(owner_transport));
  owner.Stop();
  auto writer = MakeUcxTransport({});
  ASSERT_TRUE(writer.ok());
  const auto page = Pattern(kPageBytes, 1);
  const PageSpan span = {page, 0, 1, 0};
  const absl::Time start = absl::Now();
  const absl::Status status =
      (*writer)->Write(owner.endpoint, {&span, 1}, start + absl::Milliseconds(300));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
}

TEST(UcxTransportTest, ADeadOwnerIsUnavailableAndTheNextOneIsServed) {
  auto writer = MakeUcxTransport({});
  ASSERT_TRUE(writer.ok());
  const auto page = Pattern(kPageBytes, 1);
  const PageSpan span = {page, 0, 1, 5};
  auto first = MakeUcxTransport({});
  ASSERT_TRUE(first.ok());
  PageOwner owner(*std::move(first));
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  ASSERT_TRUE((*writer)->Write(owner.endpoint, {&span, 1}, deadline).ok());
  owner.Kill();
  EXPECT_FALSE((*writer)->Write(owner.endpoint, {&span, 1}, absl::Now() + absl::Seconds(2)).ok());

  auto second = MakeUcxTransport({});
  ASSERT_TRUE(second.ok());
  PageOwner next(*std::move(second), kIncarnation + 1);
  const absl::Status status = (*writer)->Write(next.endpoint, {&span, 1}, deadline);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(std::equal(page.begin(), page.end(), next.page(5).begin()));
}

TEST(UcxTransportTest, NamesALaneThatDoesNotExist) {
  UcxOptions options;
  options.devices = "nosuchdevice0";
  EXPECT_EQ(MakeUcxTransport(options).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace isthmus::transfer
