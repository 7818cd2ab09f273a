// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_format.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/testing/page_owner.h"
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

TEST(ReceiverTest, ACorruptGroupIsALossWithBothDigests) {
  auto page = Pattern(100, 1);
  const ExpectedGroup group = {2, 1, 0, 3, 256, page};
  v1::KvHandoff handoff;
  v1::PageGroupDigest* digest = handoff.add_digests();
  digest->set_cache_kind(2);
  digest->set_page_index(1);
  digest->set_num_layers(3);
  digest->set_first_position(256);
  digest->set_crc32c(Digest(group));
  const uint32_t sent = Digest(group);
  for (const size_t at : {size_t{0}, size_t{50}, size_t{99}}) {
    page[at] ^= std::byte{0x10};
    const absl::Status status = VerifyGroups(handoff, {&group, 1}, Digest).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrFormat("%08x", sent)));
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrFormat("%08x", Digest(group))));
    page[at] ^= std::byte{0x10};
  }
  EXPECT_TRUE(VerifyGroups(handoff, {&group, 1}, Digest).ok());
}

TEST(ReceiverTest, RefusesAHandoffForAnotherRunTransferOrLayoutWithBothValues) {
  v1::KvReservation reservation;
  reservation.set_transfer_id("0123456789abcdef");
  v1::KvHandoff handoff;
  handoff.set_transfer_id(reservation.transfer_id());
  handoff.set_worker_incarnation(kIncarnation);
  handoff.set_layout_fingerprint(kLayout);
  const Identity own = {kIncarnation, kLayout};
  EXPECT_TRUE(CheckHandoff(handoff, reservation, own).ok());
  const auto expect = [&](const v1::KvHandoff& other, absl::StatusCode code,
                          const std::string& ours, const std::string& theirs) {
    const absl::Status status = CheckHandoff(other, reservation, own);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
    EXPECT_THAT(std::string(status.message()), HasSubstr(ours));
    EXPECT_THAT(std::string(status.message()), HasSubstr(theirs));
  };
  v1::KvHandoff other = handoff;
  other.set_worker_incarnation(0x99);
  expect(other, absl::StatusCode::kAborted, "0000000000001234", "0000000000000099");
  other = handoff;
  other.set_transfer_id("another");
  expect(other, absl::StatusCode::kAborted, "30313233", "616e6f74686572");
  other = handoff;
  other.set_layout_fingerprint(0x77);
  expect(other, absl::StatusCode::kFailedPrecondition, "000000000000abcd", "0000000000000077");
}

}  // namespace
}  // namespace isthmus::transfer
