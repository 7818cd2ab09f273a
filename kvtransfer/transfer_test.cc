// SPDX-License-Identifier: Apache-2.0
// Sender and receiver over both transports; UCX for real over tcp on the loopback device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/sender.h"
#include "services/base/crc32c.h"
#include "services/base/fault.h"

namespace isthmus::transfer {
namespace {

using testing::HasSubstr;

constexpr uint64_t kIncarnation = 0x1234;
constexpr uint64_t kLayout = 0xabcd;
constexpr uint64_t kPageBytes = 70000;  // Not a power of two, and larger than a UCX segment.
constexpr uint64_t kPages = 40;

std::vector<std::byte> Pattern(uint64_t size, uint32_t seed) {
  std::vector<std::byte> bytes(size);
  for (std::byte& b : bytes) {
    seed = seed * 1664525u + 1013904223u;
    b = static_cast<std::byte>(seed >> 24);
  }
  return bytes;
}

uint32_t Digest(const ExpectedGroup& group) {
  return Crc32c(group.bytes.data(), group.bytes.size(), group.page_index);
}

// The owner of memory: two regions, the second one empty, and a thread that polls.
class Owner {
 public:
  explicit Owner(std::unique_ptr<Transport> transport, uint64_t incarnation = kIncarnation)
      : transport_(std::move(transport)), memory_(kPageBytes * kPages) {
    const LocalRegion regions[] = {{memory_.data(), kPageBytes, kPages}, {nullptr, 0, 0}};
    auto published = transport_->Publish(regions, {incarnation, kLayout});
    EXPECT_TRUE(published.ok()) << published.status();
    if (published.ok()) endpoint = *std::move(published);
    thread_ = std::thread([this] {
      while (!stop_) transport_->Poll(absl::Milliseconds(20)).IgnoreError();
    });
  }
  ~Owner() { Stop(); }
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  void Kill() {
    Stop();
    transport_.reset();
  }

  std::span<const std::byte> page(uint64_t index) const {
    return std::span(memory_).subspan(index * kPageBytes, kPageBytes);
  }
  std::byte* bytes() { return memory_.data(); }
  v1::KvReservation Reserve(uint32_t num_pages = kPages) const {
    v1::KvReservation reservation;
    reservation.set_transfer_id("0123456789abcdef");
    reservation.set_worker_incarnation(endpoint.worker_incarnation());
    reservation.set_layout_fingerprint(endpoint.layout_fingerprint());
    v1::CachePages* pages = reservation.add_pages();
    for (uint32_t i = 0; i < num_pages; ++i) {
      v1::PageRef* page = pages->add_pages();
      page->set_region_generation(endpoint.regions(0).generation());
      page->set_page(i);
    }
    return reservation;
  }

  v1::TransferEndpoint endpoint;

 private:
  std::unique_ptr<Transport> transport_;
  std::vector<std::byte> memory_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

class TransportTest : public testing::TestWithParam<const char*> {
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
  Owner owner(Make("decode"));
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
  Owner owner(Make("decode"));
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
  Owner owner(Make("decode"));
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

INSTANTIATE_TEST_SUITE_P(Lanes, TransportTest, testing::Values("loopback", "ucx"),
                         [](const auto& param) { return std::string(param.param); });

TEST(UcxTransportTest, AnOwnerThatDoesNotPollCostsNoMoreThanTheDeadline) {
  auto owner_transport = MakeUcxTransport({});
  ASSERT_TRUE(owner_transport.ok()) << owner_transport.status();
  Owner owner(*std::move(owner_transport));
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
  Owner owner(*std::move(first));
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  ASSERT_TRUE((*writer)->Write(owner.endpoint, {&span, 1}, deadline).ok());
  owner.Kill();
  EXPECT_FALSE((*writer)->Write(owner.endpoint, {&span, 1}, absl::Now() + absl::Seconds(2)).ok());

  auto second = MakeUcxTransport({});
  ASSERT_TRUE(second.ok());
  Owner next(*std::move(second), kIncarnation + 1);
  const absl::Status status = (*writer)->Write(next.endpoint, {&span, 1}, deadline);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(std::equal(page.begin(), page.end(), next.page(5).begin()));
}

TEST(UcxTransportTest, NamesALaneThatDoesNotExist) {
  UcxOptions options;
  options.devices = "nosuchdevice0";
  EXPECT_EQ(MakeUcxTransport(options).status().code(), absl::StatusCode::kUnavailable);
}

struct Refusal {
  LoopbackNetwork network;
  Owner owner{MakeLoopbackTransport(&network, "decode")};
  std::unique_ptr<Transport> writer = MakeLoopbackTransport(&network, "prefill");
  std::vector<std::byte> page = Pattern(kPageBytes, 1);
  PageSpan span = {page, 0, 1, 0};
  v1::KvReservation reservation = owner.Reserve();
  v1::TransferEndpoint target = owner.endpoint;
  uint64_t own_layout = kLayout;

  absl::Status Run() {
    const auto written =
        Push(*writer, reservation, target, own_layout, {&span, 1}, absl::Now() + absl::Seconds(5));
    EXPECT_EQ(owner.page(0)[1], std::byte{0});  // Not one byte came.
    return written.status();
  }
};

TEST(SenderTest, RefusesAnotherLayoutWithBothValues) {
  Refusal refusal;
  refusal.own_layout = 0x77;
  const absl::Status status = refusal.Run();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
  EXPECT_THAT(std::string(status.message()), HasSubstr("0000000000000077"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("000000000000abcd"));
}

TEST(SenderTest, RefusesAReservationOfAnotherRun) {
  Refusal refusal;
  refusal.reservation.set_worker_incarnation(5);
  EXPECT_EQ(refusal.Run().code(), absl::StatusCode::kAborted);
}

TEST(PusherTest, WritesPiecesAndCountsWhatWasAcknowledged) {
  Refusal piece;
  auto pusher = Pusher::Open(*piece.writer, piece.reservation, piece.target, kLayout);
  ASSERT_TRUE(pusher.ok()) << pusher.status();
  EXPECT_EQ(pusher->bytes(), 0);
  const absl::Time deadline = absl::Now() + absl::Seconds(5);
  for (uint32_t unit : {4u, 2u}) {
    piece.span.unit = unit;
    ASSERT_TRUE(pusher->Push({&piece.span, 1}, deadline).ok());
    EXPECT_TRUE(std::equal(piece.page.begin(), piece.page.end(), piece.owner.page(unit).begin()));
  }
  EXPECT_TRUE(pusher->Push({}, deadline).ok());
  EXPECT_EQ(pusher->bytes(), 2 * kPageBytes);
}

TEST(PusherTest, WritesNoPageThatWasNotReservedForItAndNothingAfterwards) {
  Refusal stray;
  auto pusher = Pusher::Open(*stray.writer, stray.owner.Reserve(3), stray.target, kLayout);
  ASSERT_TRUE(pusher.ok()) << pusher.status();
  PageSpan spans[] = {stray.span, stray.span};
  spans[1].unit = 3;
  const absl::Status status = pusher->Push(spans, absl::Now() + absl::Seconds(5));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("names page 3 of region 0, which is none of the 3 that transfer 3031"));
  EXPECT_EQ(pusher->Push({spans, 1}, absl::Now() + absl::Seconds(5)), status);
  EXPECT_EQ(stray.owner.page(0)[1], std::byte{0});
  EXPECT_EQ(pusher->bytes(), 0);
}

TEST(SenderTest, RefusesADeadRegionGeneration) {
  Refusal refusal;
  refusal.span.region_generation = 7;
  const absl::Status status = refusal.Run();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "region 0 has generation 1, the reservation names 7");
}

TEST(SenderTest, RefusesPagesAndSizesOutsideTheRegion) {
  Refusal refusal;
  refusal.span.unit = kPages;
  EXPECT_EQ(refusal.Run().code(), absl::StatusCode::kInvalidArgument);
  refusal.span.unit = 0;
  refusal.span.region = 2;
  EXPECT_EQ(refusal.Run().code(), absl::StatusCode::kInvalidArgument);
  refusal.span.region = 0;
  const auto long_page = Pattern(kPageBytes + 1, 1);
  refusal.span.bytes = long_page;
  EXPECT_EQ(refusal.Run().code(), absl::StatusCode::kInvalidArgument);
}

TEST(SenderTest, RefusesTheEndpointOfAnotherTransport) {
  Refusal refusal;
  refusal.target.set_transport("nccl");
  EXPECT_EQ(refusal.Run().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ReceiverTest, MissingDoubledAndSurplusDigestsAreLosses) {
  const auto page = Pattern(100, 1);
  const ExpectedGroup group = {2, 1, 0, 3, 256, page};
  v1::KvHandoff handoff;
  EXPECT_THAT(std::string(VerifyGroups(handoff, {&group, 1}, Digest).status().message()),
              HasSubstr("page group (kind 2, page 1, first layer 0)"));
  v1::PageGroupDigest* digest = handoff.add_digests();
  digest->set_cache_kind(2);
  digest->set_page_index(1);
  digest->set_num_layers(3);
  digest->set_first_position(256);
  digest->set_crc32c(Digest(group));
  EXPECT_TRUE(VerifyGroups(handoff, {&group, 1}, Digest).ok());
  EXPECT_THAT(std::string(VerifyGroups(handoff, {}, Digest).status().message()),
              HasSubstr("nobody expects it"));
  *handoff.add_digests() = *digest;
  EXPECT_THAT(std::string(VerifyGroups(handoff, {&group, 1}, Digest).status().message()),
              HasSubstr("two digests came"));
  handoff.mutable_digests()->RemoveLast();
  handoff.mutable_digests(0)->set_first_position(512);
  EXPECT_EQ(VerifyGroups(handoff, {&group, 1}, Digest).status().code(),
            absl::StatusCode::kDataLoss);
}

TEST(ReceiverTest, RefusesAHandoffForAnotherRunTransferOrLayout) {
  LoopbackNetwork network;
  Owner owner(MakeLoopbackTransport(&network, "decode"));
  const v1::KvReservation reservation = owner.Reserve();
  v1::KvHandoff handoff;
  handoff.set_transfer_id(reservation.transfer_id());
  handoff.set_worker_incarnation(kIncarnation);
  handoff.set_layout_fingerprint(kLayout);
  const Identity own = {kIncarnation, kLayout};
  EXPECT_TRUE(CheckHandoff(handoff, reservation, own).ok());
  v1::KvHandoff other = handoff;
  other.set_worker_incarnation(1);
  EXPECT_EQ(CheckHandoff(other, reservation, own).code(), absl::StatusCode::kAborted);
  other = handoff;
  other.set_transfer_id("another");
  EXPECT_EQ(CheckHandoff(other, reservation, own).code(), absl::StatusCode::kAborted);
  other = handoff;
  other.set_layout_fingerprint(1);
  EXPECT_EQ(CheckHandoff(other, reservation, own).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace isthmus::transfer
