// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvtransfer/receiver.h"
#include "kvtransfer/testing/page_owner.h"
#include "kvtransfer/transport_loopback.h"
#include "services/base/crc32c.h"

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
  PageOwner owner(MakeLoopbackTransport(&network, "decode"));
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
