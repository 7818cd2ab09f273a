// SPDX-License-Identifier: Apache-2.0
#include "services/base/queue.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

namespace isthmus {
namespace {

TEST(BoundedQueueTest, RefusesWhenFullAndKeepsTheItem) {
  BoundedQueue<std::unique_ptr<int>> queue(1);
  EXPECT_TRUE(queue.TryPush(std::make_unique<int>(1)));
  auto second = std::make_unique<int>(2);
  EXPECT_FALSE(queue.TryPush(std::move(second)));
  EXPECT_EQ(*second, 2);  // NOLINT(bugprone-use-after-move): a refused item is untouched.
  EXPECT_EQ(**queue.PopFor(absl::ZeroDuration()), 1);
}

TEST(BoundedQueueTest, AWaitEndsAtItsTimeout) {
  BoundedQueue<int> queue(1);
  EXPECT_FALSE(queue.PopFor(absl::Milliseconds(5)).has_value());
}

TEST(BoundedQueueTest, AClosedQueueDrainsAndThenEnds) {
  BoundedQueue<int> queue(4);
  EXPECT_TRUE(queue.TryPush(7));
  queue.Close();
  EXPECT_FALSE(queue.TryPush(8));
  EXPECT_EQ(queue.PopFor(absl::Seconds(10)), 7);
  EXPECT_FALSE(queue.PopFor(absl::Seconds(10)).has_value());
}

TEST(BoundedQueueTest, CloseWakesAWaiter) {
  BoundedQueue<int> queue(1);
  std::thread waiter([&] { EXPECT_FALSE(queue.PopFor(absl::Seconds(60)).has_value()); });
  queue.Close();
  waiter.join();
}

}  // namespace
}  // namespace isthmus
