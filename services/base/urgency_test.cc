// SPDX-License-Identifier: Apache-2.0
#include "services/base/urgency.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace isthmus {
namespace {

absl::Time At(int64_t seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

TEST(UrgencyTest, TheClassDecidesAmongThoseThatArriveWithinOnePatience) {
  const Urgency low = {Priority::kLow, At(1001), At(1000)};
  const Urgency normal = {Priority::kNormal, At(1040), At(1030)};
  const Urgency high = {Priority::kHigh, absl::InfiniteFuture(), At(1059)};
  EXPECT_TRUE(GoesBefore(high, normal));
  EXPECT_TRUE(GoesBefore(normal, low));
  EXPECT_TRUE(GoesBefore(high, low));
}

TEST(UrgencyTest, TheDeadlineDecidesInsideAClassAndTheArrivalBehindIt) {
  const Urgency soon = {Priority::kNormal, At(1030), At(1010)};
  const Urgency later = {Priority::kNormal, At(1050), At(1000)};
  const Urgency never = {Priority::kNormal, absl::InfiniteFuture(), At(1005)};
  const Urgency never_and_later = {Priority::kNormal, absl::InfiniteFuture(), At(1006)};
  EXPECT_TRUE(GoesBefore(soon, later));
  EXPECT_TRUE(GoesBefore(later, never));
  EXPECT_TRUE(GoesBefore(never, never_and_later));
  EXPECT_FALSE(GoesBefore(never, never));
}

TEST(UrgencyTest, DeadlinesBeyondThePatienceDecideAmongEqualArrivals) {
  const Urgency near = {Priority::kNormal, At(1100), At(1000)};
  const Urgency far = {Priority::kNormal, At(1900), At(1000)};
  EXPECT_TRUE(GoesBefore(near, far));
}

// Whatever the classes, deadlines and arrivals: a strict weak order, and nobody who arrives five
// patiences later goes first.
TEST(UrgencyTest, IsAnOrderAndNobodyWaitsForEver) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    std::mt19937 random(seed);
    std::vector<Urgency> all(12);
    for (Urgency& urgency : all) {
      urgency.priority = static_cast<Priority>(random() % 3);
      urgency.arrived = At(static_cast<int64_t>(random() % 1000));
      if (random() % 2 == 0) {
        urgency.deadline = urgency.arrived + absl::Seconds(static_cast<int>(random() % 200) - 20);
      }
    }
    for (const Urgency& a : all) {
      for (const Urgency& b : all) {
        EXPECT_FALSE(GoesBefore(a, b) && GoesBefore(b, a)) << seed;
        const bool is_much_later = b.arrived > a.arrived + 5 * kPatience;
        EXPECT_TRUE(!is_much_later || GoesBefore(a, b)) << seed;
        for (const Urgency& c : all) {
          const bool is_chain = GoesBefore(a, b) && GoesBefore(b, c);
          EXPECT_TRUE(!is_chain || GoesBefore(a, c)) << seed;
        }
      }
    }
  }
}

}  // namespace
}  // namespace isthmus
