// SPDX-License-Identifier: Apache-2.0
// What a simulation relies on: latency, late landings, losses, cuts and deadlines in its own time.
#include "kvtransfer/transport_loopback.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "kvtransfer/testing/page_owner.h"
#include "services/base/fault.h"
#include "services/base/thread.h"

namespace isthmus::transfer {
namespace {

using testing::kIncarnation;
using testing::kLayout;
using testing::Pattern;

constexpr uint64_t kSmallPage = 100;

// A clock whose waits take no real time: who waits moves it.
class LeapingClock : public Clock {
 public:
  absl::Time Now() override { return absl::UnixEpoch() + absl::Nanoseconds(nanoseconds_.load()); }
  void Sleep(absl::Duration duration) override {
    if (duration > absl::ZeroDuration()) nanoseconds_ += absl::ToInt64Nanoseconds(duration);
  }
  bool WaitFor(CondVar&, MutexLock& lock, absl::Duration timeout,
               absl::FunctionRef<bool()> is_done) override {
    if (is_done()) return true;
    lock.unlock();
    if (during_wait) during_wait();
    lock.lock();
    if (is_done()) return true;
    Sleep(timeout);
    return is_done();
  }

  std::function<void()> during_wait;

 private:
  std::atomic<int64_t> nanoseconds_ = 0;
};

// An owner of four small pages and a writer, in simulated time.
class LoopbackTest : public ::testing::Test {
 protected:
  LoopbackTest() { Publish(kIncarnation); }
  void Publish(uint64_t incarnation) {
    owner_ = MakeLoopbackTransport(&network_, "decode", clock_);
    const LocalRegion region = {memory_.data(), kSmallPage, 4};
    auto published = owner_->Publish({&region, 1}, {incarnation, kLayout});
    ASSERT_TRUE(published.ok()) << published.status();
    endpoint_ = *std::move(published);
  }
  void SetLatency(absl::Duration latency) {
    network_.before_post = [latency](const LoopbackWrite&) {
      return LoopbackFate{latency, {}, {}};
    };
  }
  absl::Status Write(uint32_t unit, absl::Duration patience = absl::Seconds(1)) {
    const PageSpan span = {page_, 0, endpoint_.regions(0).generation(), unit};
    return writer_->Write(endpoint_, {&span, 1}, clock_.Now() + patience);
  }
  bool HasLanded(uint32_t unit) const {
    return std::equal(page_.begin(), page_.end(), memory_.begin() + unit * kSmallPage);
  }
  absl::Duration elapsed() { return clock_.Now() - absl::UnixEpoch(); }

  LeapingClock clock_;
  LoopbackNetwork network_;
  std::vector<std::byte> memory_ = std::vector<std::byte>(4 * kSmallPage);
  const std::vector<std::byte> page_ = Pattern(kSmallPage, 1);
  v1::TransferEndpoint endpoint_;
  std::unique_ptr<Transport> owner_;
  std::unique_ptr<Transport> writer_ = MakeLoopbackTransport(&network_, "prefill", clock_);
};

TEST_F(LoopbackTest, AWriteTakesItsLatencyInTheClocksTime) {
  EXPECT_TRUE(Write(0).ok());
  EXPECT_EQ(elapsed(), absl::ZeroDuration());
  SetLatency(absl::Milliseconds(30));
  EXPECT_TRUE(Write(1).ok());
  EXPECT_EQ(elapsed(), absl::Milliseconds(30));
  EXPECT_TRUE(HasLanded(1));
}

TEST_F(LoopbackTest, PollSleepsThroughTheClock) {
  EXPECT_TRUE(owner_->Poll(absl::Milliseconds(50)).ok());
  EXPECT_EQ(elapsed(), absl::Milliseconds(50));
}

TEST_F(LoopbackTest, SpansOfOneWriteLandInTheOrderOfTheirLatencies) {
  std::vector<uint32_t> posted;
  std::vector<uint32_t> landed;
  network_.before_post = [&](const LoopbackWrite& write) {
    EXPECT_EQ(write.writer, "prefill");
    EXPECT_EQ(write.target, "decode");
    EXPECT_EQ(write.target_incarnation, kIncarnation);
    posted.push_back(write.span.unit);
    return LoopbackFate{absl::Milliseconds(4 - write.span.unit), false, {}};
  };
  network_.after_landing = [&](const LoopbackWrite& write, std::span<std::byte> bytes) {
    EXPECT_FALSE(write.is_abandoned);
    EXPECT_EQ(bytes.data(), memory_.data() + write.span.unit * kSmallPage);
    landed.push_back(write.span.unit);
  };
  PageSpan spans[4];
  for (uint32_t i = 0; i < 4; ++i) spans[i] = {page_, 0, 1, i};
  EXPECT_TRUE(writer_->Write(endpoint_, spans, clock_.Now() + absl::Seconds(1)).ok());
  EXPECT_THAT(posted, ::testing::ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(landed, ::testing::ElementsAre(3, 2, 1, 0));
  EXPECT_EQ(elapsed(), absl::Milliseconds(4));
}

TEST_F(LoopbackTest, ALateSpanLandsAfterItsWriterHasGivenUp) {
  SetLatency(absl::Milliseconds(30));
  bool was_abandoned = false;
  network_.after_landing = [&](const LoopbackWrite& write, std::span<std::byte>) {
    was_abandoned = write.is_abandoned;
  };
  const absl::Status status = Write(2, absl::Milliseconds(10));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
  EXPECT_EQ(elapsed(), absl::Milliseconds(10));
  EXPECT_FALSE(HasLanded(2));
  EXPECT_EQ(network_.num_under_way(), 1);
  EXPECT_TRUE(owner_->Poll(absl::Milliseconds(50)).ok());
  EXPECT_EQ(elapsed(), absl::Milliseconds(30));
  EXPECT_TRUE(HasLanded(2));
  EXPECT_TRUE(was_abandoned);
}

TEST_F(LoopbackTest, PastTheDeadlineNothingIsPosted) {
  const absl::Status status = Write(0, absl::ZeroDuration());
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(network_.num_under_way(), 0);
  EXPECT_FALSE(HasLanded(0));
}

TEST_F(LoopbackTest, ALostSpanCostsTheDeadline) {
  network_.before_post = [](const LoopbackWrite&) { return LoopbackFate{{}, true, {}}; };
  EXPECT_EQ(Write(0).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(elapsed(), absl::Seconds(1));
  EXPECT_FALSE(HasLanded(0));
}

TEST_F(LoopbackTest, AWriterThatDiesMeanwhileIsToldAtOnceAndItsBytesStillLand) {
  SetLatency(absl::Milliseconds(30));
  clock_.during_wait = [this] { network_.Cut("prefill", LoopbackCut::kReset); };
  const absl::Status status = Write(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
  EXPECT_EQ(elapsed(), absl::ZeroDuration());
  clock_.during_wait = nullptr;
  EXPECT_EQ(Write(2).code(), absl::StatusCode::kUnavailable);
  clock_.Sleep(absl::Milliseconds(30));
  network_.Land(clock_.Now());
  EXPECT_TRUE(HasLanded(1));
  EXPECT_FALSE(HasLanded(2));
  network_.Mend("prefill");
  EXPECT_TRUE(Write(2).ok());
}

TEST_F(LoopbackTest, AnOwnerBehindABrokenSwitchCostsTheDeadlineAndGetsNothing) {
  SetLatency(absl::Milliseconds(30));
  network_.Cut("decode", LoopbackCut::kSilent);
  EXPECT_EQ(Write(1).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(elapsed(), absl::Seconds(1));
  EXPECT_FALSE(HasLanded(1));
  network_.Mend("decode");
  EXPECT_TRUE(Write(1).ok());
  EXPECT_TRUE(HasLanded(1));
}

TEST_F(LoopbackTest, NothingLandsInTheMemoryOfADeadOrRestartedOwner) {
  SetLatency(absl::Milliseconds(30));
  clock_.during_wait = [this] { owner_.reset(); };
  EXPECT_EQ(Write(1).code(), absl::StatusCode::kUnavailable);
  clock_.during_wait = nullptr;
  Publish(kIncarnation + 1);
  clock_.Sleep(absl::Milliseconds(30));
  network_.Land(clock_.Now());
  EXPECT_EQ(network_.num_under_way(), 0);
  EXPECT_FALSE(HasLanded(1));
}

TEST_F(LoopbackTest, AKeyOfAnOlderGenerationIsDeadAlsoOnTheWay) {
  SetLatency(absl::Milliseconds(30));
  const v1::TransferEndpoint old = endpoint_;
  clock_.during_wait = [this] {
    clock_.during_wait = nullptr;
    const LocalRegion region = {memory_.data(), kSmallPage, 4};
    EXPECT_TRUE(owner_->Publish({&region, 1}, {kIncarnation, kLayout}).ok());
  };
  EXPECT_EQ(Write(1).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(HasLanded(1));
  const absl::Status status = Write(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "region 0 has generation 2, the write names 1");
}

TEST_F(LoopbackTest, AHookMayCorruptWhatHasLanded) {
  network_.after_landing = [](const LoopbackWrite&, std::span<std::byte> landed) {
    landed[7] ^= std::byte{1};
  };
  EXPECT_TRUE(Write(3).ok());
  EXPECT_EQ(memory_[3 * kSmallPage + 7], page_[7] ^ std::byte{1});
}

TEST(LoopbackThreadsTest, ManyWritersToManyOwnersInRealTime) {
  LoopbackNetwork network;
  network.before_post = [](const LoopbackWrite& write) {
    return LoopbackFate{absl::Microseconds(write.span.unit * 50), false, {}};
  };
  testing::PageOwner first(MakeLoopbackTransport(&network, "decode-1"));
  testing::PageOwner second(MakeLoopbackTransport(&network, "decode-2"));
  std::vector<Thread> threads;
  for (uint32_t writer = 0; writer < 4; ++writer) {
    threads.emplace_back(RealClock(), [&, writer] {
      auto transport = MakeLoopbackTransport(&network, "prefill-" + std::to_string(writer));
      const std::vector<std::byte> page = Pattern(testing::kPageBytes, writer);
      for (uint32_t round = 0; round < 5; ++round) {
        for (testing::PageOwner* owner : {&first, &second}) {
          const PageSpan span = {page, 0, 1, writer * 5 + round};
          const absl::Time deadline = RealClock().Now() + absl::Seconds(20);
          EXPECT_TRUE(transport->Write(owner->endpoint, {&span, 1}, deadline).ok());
        }
      }
    });
  }
  for (Thread& thread : threads) thread.Join();
  for (uint32_t unit = 0; unit < 20; ++unit) {
    const std::vector<std::byte> page = Pattern(testing::kPageBytes, unit / 5);
    EXPECT_TRUE(std::equal(page.begin(), page.end(), first.page(unit).begin()));
    EXPECT_TRUE(std::equal(page.begin(), page.end(), second.page(unit).begin()));
  }
}

}  // namespace
}  // namespace isthmus::transfer
