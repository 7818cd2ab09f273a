// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvtransfer/sender.h"
#include "kvtransfer/testing/page_owner.h"
#include "kvtransfer/transport_loopback.h"
#include "services/base/clock.h"
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

struct Refusal {
  LoopbackNetwork network;
  PageOwner owner{MakeLoopbackTransport(&network, "decode")};
  std::unique_ptr<Transport> writer = MakeLoopbackTransport(&network, "prefill");
  std::vector<std::byte> page = Pattern(kPageBytes, 1);
  PageSpan span = {page, 0, 1, 0};
  v1::KvReservation reservation = owner.Reserve();
  v1::TransferEndpoint target = owner.endpoint;
  uint64_t own_layout = kLayout;

  absl::Status Run() {
    auto pusher = Pusher::Open(*writer, reservation, target, own_layout);
    const absl::Status status = pusher.ok()
                                    ? pusher->Push({&span, 1}, RealClock().Now() + absl::Seconds(5))
                                    : pusher.status();
    EXPECT_EQ(owner.page(0)[1], std::byte{0});  // Not one byte came.
    return status;
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
  const absl::Status status = refusal.Run();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
  EXPECT_THAT(std::string(status.message()), HasSubstr("reservation 0000000000000005"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("endpoint 0000000000001234"));
}

TEST(SenderTest, RefusesADeadIncarnationWhoseAddressAnotherOneHas) {
  Refusal refusal;
  refusal.reservation.set_worker_incarnation(0x99);
  refusal.target.set_worker_incarnation(0x99);
  const absl::Status status = refusal.Run();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
  EXPECT_THAT(std::string(status.message()), HasSubstr("0000000000001234"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("want 0000000000000099"));
}

TEST(PusherTest, WritesPiecesAndCountsWhatWasAcknowledged) {
  Refusal piece;
  auto pusher = Pusher::Open(*piece.writer, piece.reservation, piece.target, kLayout);
  ASSERT_TRUE(pusher.ok()) << pusher.status();
  EXPECT_EQ(pusher->bytes(), 0);
  const absl::Time deadline = RealClock().Now() + absl::Seconds(5);
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
  const absl::Status status = pusher->Push(spans, RealClock().Now() + absl::Seconds(5));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("names page 3 of region 0, which is none of the 3 that transfer 3031"));
  EXPECT_EQ(pusher->Push({spans, 1}, RealClock().Now() + absl::Seconds(5)), status);
  EXPECT_EQ(stray.owner.page(0)[1], std::byte{0});
  EXPECT_EQ(pusher->bytes(), 0);
}

TEST(PusherTest, APieceThatComesTooLateEndsTheTransfer) {
  Refusal late;
  auto pusher = Pusher::Open(*late.writer, late.reservation, late.target, kLayout);
  ASSERT_TRUE(pusher.ok()) << pusher.status();
  const absl::Status status = pusher->Push({&late.span, 1}, RealClock().Now() - absl::Seconds(1));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(pusher->Push({&late.span, 1}, RealClock().Now() + absl::Seconds(5)), status);
  EXPECT_EQ(late.owner.page(0)[1], std::byte{0});
}

TEST(PusherTest, MayFillTheStateSlotThatIsReserved) {
  Refusal slot;
  v1::KvReservation reservation = slot.owner.Reserve(0);
  reservation.mutable_state()->set_region_generation(1);
  reservation.mutable_state()->set_slot(9);
  auto pusher = Pusher::Open(*slot.writer, reservation, slot.target, kLayout);
  ASSERT_TRUE(pusher.ok()) << pusher.status();
  slot.span.unit = 9;
  EXPECT_TRUE(pusher->Push({&slot.span, 1}, RealClock().Now() + absl::Seconds(5)).ok());
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
  const absl::Status status = refusal.Run();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("transport differs: ours loopback, decode worker's nccl"));
}

}  // namespace
}  // namespace isthmus::transfer
