// SPDX-License-Identifier: Apache-2.0
// Both transports; UCX for real over tcp on the loopback device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "kvtransfer/receiver.h"
#include "kvtransfer/sender.h"
#include "kvtransfer/testing/page_owner.h"
#include "kvtransfer/transport_loopback.h"
#include "services/base/clock.h"
#include "services/base/fault.h"

namespace isthmus::transfer {
namespace {

using testing::Digest;
using ::testing::HasSubstr;
using testing::kIncarnation;
using testing::kLayout;
using testing::kPageBytes;
using testing::kPages;
using testing::PageOwner;
using testing::Pattern;

class TransportTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Transport> Make(const std::string& name) {
    if (GetParam() == std::string("loopback")) return MakeLoopbackTransport(&network_, name);
    auto made = MakeUcxTransport({});
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }
  static absl::Time Soon() { return RealClock().Now() + absl::Seconds(20); }

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
  auto pusher = Pusher::Open(*writer, owner.Reserve(), owner.endpoint, kLayout);
  ASSERT_TRUE(pusher.ok()) << pusher.status();
  const absl::Status pushed = pusher->Push(spans, Soon());
  ASSERT_TRUE(pushed.ok()) << pushed;
  EXPECT_EQ(pusher->bytes(), kPageBytes * kPages);

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

TEST_P(TransportTest, StartsNoWritePastItsDeadline) {
  PageOwner owner(Make("decode"));
  const std::unique_ptr<Transport> writer = Make("prefill");
  const auto page = Pattern(kPageBytes, 1);
  const PageSpan span = {page, 0, 1, 0};
  const absl::Status status = writer->Write(owner.endpoint, {&span, 1}, RealClock().Now());
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
  EXPECT_EQ(owner.page(0)[1], std::byte{0});
}

TEST_P(TransportTest, WritesAtOneTimeToOneOwnerAllArrive) {
  constexpr uint32_t kWriters = 8;
  PageOwner owner(Make("decode"));
  const std::unique_ptr<Transport> writer = Make("prefill");
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kWriters; ++i) {
    threads.emplace_back([&, i] {
      for (uint32_t round = 0; round < 5; ++round) {
        const auto page = Pattern(kPageBytes, i * 5 + round);
        const PageSpan span = {page, 0, 1, i * 5 + round};
        const absl::Status status = writer->Write(owner.endpoint, {&span, 1}, Soon());
        EXPECT_TRUE(status.ok()) << status;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t unit = 0; unit < kWriters * 5; ++unit) {
    const auto page = Pattern(kPageBytes, unit);
    EXPECT_TRUE(std::equal(page.begin(), page.end(), owner.page(unit).begin())) << unit;
  }
}

INSTANTIATE_TEST_SUITE_P(Lanes, TransportTest, ::testing::Values("loopback", "ucx"),
                         [](const auto& param) { return std::string(param.param); });

// Owners and one writer over UCX, and writes in threads of their own.
class UcxTransportTest : public ::testing::Test {
 protected:
  struct Outcome {
    absl::Status status;
    absl::Duration duration;
  };
  static std::unique_ptr<Transport> Make() {
    auto made = MakeUcxTransport({});
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }
  // Writes `num_spans` pages from `unit` on.
  Outcome Write(const PageOwner& owner, uint32_t unit, absl::Duration patience,
                uint32_t num_spans = 1) {
    std::vector<PageSpan> spans;
    for (uint32_t i = 0; i < num_spans; ++i)
      spans.push_back({page_, 0, 1, (unit + i) % uint32_t{kPages}});
    const absl::Time start = RealClock().Now();
    const absl::Status status = writer_->Write(owner.endpoint, spans, start + patience);
    return {status, RealClock().Now() - start};
  }
  std::future<Outcome> StartWrite(const PageOwner& owner, uint32_t unit, absl::Duration patience,
                                  uint32_t num_spans = 1) {
    return std::async(std::launch::async, [this, &owner, unit, patience, num_spans] {
      return Write(owner, unit, patience, num_spans);
    });
  }
  bool HasLanded(const PageOwner& owner, uint32_t unit) const {
    return std::equal(page_.begin(), page_.end(), owner.page(unit).begin());
  }

  const std::vector<std::byte> page_ = Pattern(kPageBytes, 1);
  std::unique_ptr<Transport> writer_ = Make();
};

TEST_F(UcxTransportTest, AnOwnerThatDoesNotPollCostsNoMoreThanTheDeadline) {
  PageOwner owner(Make());
  owner.Stop();
  const Outcome outcome = Write(owner, 0, absl::Milliseconds(300));
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kDeadlineExceeded) << outcome.status;
  EXPECT_LT(outcome.duration, absl::Seconds(2));
}

TEST_F(UcxTransportTest, WritesPagesThatAreLargerThanAPiece) {
  // Pages of 1.4 MB: the units of the one region, twenty at a time.
  PageOwner owner(Make());
  v1::TransferEndpoint large = owner.endpoint;
  large.mutable_regions(0)->set_unit_bytes(20 * kPageBytes);
  const std::vector<std::byte> page = Pattern(20 * kPageBytes, 7);
  const absl::Time start = RealClock().Now();
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const PageSpan span = {page, 0, 1, static_cast<uint32_t>(round % 2)};
    const absl::Status status = writer_->Write(large, {&span, 1}, start + absl::Seconds(20));
    ASSERT_TRUE(status.ok()) << status;
  }
  const double megabytes = 1e-6 * kRounds * static_cast<double>(page.size());
  RecordProperty("mb_per_s",
                 static_cast<int>(megabytes / absl::ToDoubleSeconds(RealClock().Now() - start)));
  for (uint32_t unit = 0; unit < kPages; ++unit) {
    EXPECT_TRUE(std::equal(owner.page(unit).begin(), owner.page(unit).end(),
                           page.begin() + (unit % 20) * kPageBytes))
        << unit;
  }
}

TEST_F(UcxTransportTest, AHungOwnerDelaysNoWriteToAnother) {
  PageOwner hung(Make());
  PageOwner lively(Make(), kIncarnation + 1);
  ASSERT_TRUE(Write(hung, 0, absl::Seconds(20)).status.ok());
  hung.Stop();
  // One that fills what is on the way, and one that needs a connection first.
  auto first = StartWrite(hung, 0, absl::Seconds(3), 400);
  auto second = StartWrite(hung, 0, absl::Seconds(3));
  absl::Duration longest;
  for (uint32_t round = 0; round < 50; ++round) {
    const Outcome outcome = Write(lively, round % uint32_t{kPages}, absl::Seconds(20));
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    longest = std::max(longest, outcome.duration);
  }
  RecordProperty("longest_us", static_cast<int>(absl::ToInt64Microseconds(longest)));
  EXPECT_EQ(first.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  EXPECT_LT(longest, absl::Seconds(1));
  EXPECT_EQ(first.get().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(second.get().status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(UcxTransportTest, AWriteThatGivesUpSpoilsNoOtherToTheSameOwner) {
  PageOwner owner(Make());
  ASSERT_TRUE(Write(owner, 0, absl::Seconds(20)).status.ok());
  owner.Stop();
  auto patient = StartWrite(owner, 1, absl::Seconds(20), 20);
  EXPECT_EQ(Write(owner, 21, absl::Milliseconds(200), 400).status.code(),
            absl::StatusCode::kDeadlineExceeded);
  owner.Start();
  const Outcome outcome = patient.get();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  for (uint32_t unit = 1; unit <= 20; ++unit) EXPECT_TRUE(HasLanded(owner, unit)) << unit;
}

TEST_F(UcxTransportTest, AnOwnerThatDiesInTheMiddleIsUnavailableAtOnce) {
  PageOwner owner(Make());
  ASSERT_TRUE(Write(owner, 0, absl::Seconds(20)).status.ok());
  owner.Stop();  // So that the writes are still under way when it dies.
  std::vector<std::future<Outcome>> writes;
  for (uint32_t i = 0; i < 4; ++i) {
    writes.push_back(StartWrite(owner, i, absl::Seconds(20), i == 0 ? 400 : 1));
  }
  EXPECT_EQ(writes[0].wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  owner.Kill();
  for (auto& write : writes) {
    const Outcome outcome = write.get();
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kUnavailable) << outcome.status;
    EXPECT_EQ(FaultScopeOf(outcome.status), FaultScope::kPeer);
    EXPECT_LT(outcome.duration, absl::Seconds(3));
  }
  PageOwner next(Make(), kIncarnation + 1);
  const Outcome outcome = Write(next, 5, absl::Seconds(20));
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_TRUE(HasLanded(next, 5));
}

TEST_F(UcxTransportTest, ADeadOwnerIsUnavailableAndTheNextOneIsServed) {
  PageOwner owner(Make());
  ASSERT_TRUE(Write(owner, 5, absl::Seconds(20)).status.ok());
  owner.Kill();
  for (int attempt = 0; attempt < 2; ++attempt) {  // On a known connection, then on a fresh one.
    const Outcome outcome = Write(owner, 5, absl::Seconds(20));
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kUnavailable) << outcome.status;
    EXPECT_LT(outcome.duration, absl::Seconds(3));
  }
  PageOwner next(Make(), kIncarnation + 1);
  const Outcome outcome = Write(next, 5, absl::Seconds(20));
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_TRUE(HasLanded(next, 5));
}

TEST_F(UcxTransportTest, OneTransportWritesWhileItsOwnPagesAreWritten) {
  PageOwner left(Make());
  PageOwner right(Make(), kIncarnation + 1);
  std::vector<PageSpan> spans;
  for (uint32_t unit = 0; unit < 20; ++unit) spans.push_back({page_, 0, 1, unit});
  auto there = std::async(std::launch::async, [&] {
    return left.transport().Write(right.endpoint, spans, RealClock().Now() + absl::Seconds(20));
  });
  const absl::Status back =
      right.transport().Write(left.endpoint, spans, RealClock().Now() + absl::Seconds(20));
  EXPECT_TRUE(back.ok()) << back;
  const absl::Status status = there.get();
  EXPECT_TRUE(status.ok()) << status;
  for (uint32_t unit = 0; unit < 20; ++unit) {
    EXPECT_TRUE(HasLanded(left, unit) && HasLanded(right, unit)) << unit;
  }
}

TEST(UcxOptionsTest, NamesALaneThatDoesNotExist) {
  UcxOptions options;
  options.devices = "nosuchdevice0";
  EXPECT_EQ(MakeUcxTransport(options).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace isthmus::transfer
