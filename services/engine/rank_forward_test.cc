// SPDX-License-Identifier: Apache-2.0
// What every rank is given, and what becomes of a group whose ranks do not end alike.
#include "services/engine/rank_forward.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "services/base/fault.h"

namespace isthmus::engine {
namespace {

using ::testing::HasSubstr;
using Body = std::function<absl::Status(const model::ForwardBatch&, const kernels::Exec&)>;

constexpr int64_t kVocab = 6;

// A forward pass that does what a test says.
class FakeForward : public model::Forward {
 public:
  absl::Status Run(const model::ForwardBatch& batch, const kernels::Exec& exec) override {
    return body ? body(batch, exec) : absl::OkStatus();
  }
  int64_t vocab_size() const override { return kVocab; }
  int64_t max_positions() const override { return 100; }
  const kernels::KvLayout& layout() const override { return layout_; }

  Body body;

 private:
  kernels::KvLayout layout_;
};

class RankForwardTest : public testing::Test {
 protected:
  // Two ranks with half of the vocabulary each.
  std::unique_ptr<RankForward> Make(absl::Duration limit = absl::Seconds(20)) {
    std::vector<Rank> ranks(2);
    for (size_t r = 0; r < 2; ++r) {
      ranks[r].forward = &forwards_[r];
      ranks[r].vocabulary = {static_cast<int64_t>(3 * r), 3};
      ranks[r].exec.num_sms = static_cast<int>(10 + r);
      ranks[r].on_start = on_start_;
    }
    ranks[1].caches = {{whole_, 64, copy_}};
    return std::make_unique<RankForward>(std::move(ranks), RealClock(), limit,
                                         [this](const absl::Status& why) {
                                           ++num_stalls_;
                                           MutexLock lock(mutex_);
                                           why_ = why;
                                           is_aborted_ = true;
                                           changed_.notify_all();
                                         });
  }
  // As a rank in an all-reduce: until somebody aborts the group.
  absl::Status Hang() {
    MutexLock lock(mutex_);
    RealClock().WaitFor(changed_, lock, absl::Seconds(20), [this] { return is_aborted_; });
    return absl::AbortedError("the group was aborted");
  }
  model::ForwardBatch Batch() {
    return {.tokens = tokens_,
            .sequences = {&sequence_, 1},
            .logit_rows = logit_rows_,
            .logits = kernels::F32Matrix(logits_, 2, kVocab),
            .draws = draws_,
            .drawn = drawn_};
  }

  FakeForward forwards_[2];
  std::function<absl::Status()> on_start_;
  std::byte whole_[64] = {};
  std::byte copy_[64] = {};
  std::byte* pages_[2] = {whole_ + 16, whole_ + 32};
  kernels::SequenceKv sequence_ = {
      .num_rows = 2, .pages = {std::span<std::byte* const>(pages_), {}, {}}, .state = whole_ + 48};
  std::vector<int32_t> tokens_ = {1, 2};
  std::vector<int64_t> logit_rows_ = {0, 1};
  float logits_[2 * kVocab] = {};
  std::optional<model::RowDraw> draws_[2] = {model::RowDraw{}, std::nullopt};
  int32_t drawn_[2] = {model::kNotDrawn, model::kNotDrawn};
  int num_stalls_ = 0;
  Mutex mutex_;
  CondVar changed_;
  bool is_aborted_ = false;
  absl::Status why_;
};

TEST_F(RankForwardTest, GivesEveryRankItsColumnsAndItsCopyOfTheCache) {
  std::byte* state[2] = {};
  std::byte* page[2] = {};
  int num_sms[2] = {};
  for (size_t r = 0; r < 2; ++r) {
    forwards_[r].body = [&, r](const model::ForwardBatch& batch, const kernels::Exec& exec) {
      EXPECT_EQ(exec.phase, kPhaseDecode);
      EXPECT_EQ(batch.tokens.size(), 2u);
      EXPECT_EQ(batch.logits.cols, 3);
      EXPECT_TRUE(batch.draws.empty());  // Of a part of the columns nothing can be drawn.
      EXPECT_TRUE(batch.drawn.empty());
      state[r] = batch.sequences[0].state;
      page[r] = batch.sequences[0].pages[0][1];
      num_sms[r] = exec.num_sms;
      for (int64_t t = 0; t < 2; ++t) batch.logits.f32(t)[0] = static_cast<float>(10 * r + t + 1);
      return absl::OkStatus();
    };
  }
  const std::unique_ptr<RankForward> group = Make();
  EXPECT_EQ(group->vocab_size(), kVocab);
  for (int step = 0; step < 50; ++step) {
    kernels::Exec exec;
    exec.phase = kPhaseDecode;
    ASSERT_TRUE(group->Run(Batch(), exec).ok());
  }
  EXPECT_EQ(state[0], whole_ + 48);
  EXPECT_EQ(state[1], copy_ + 48);
  EXPECT_EQ(page[0], whole_ + 32);
  EXPECT_EQ(page[1], copy_ + 32);
  EXPECT_EQ(num_sms[0], 10);
  EXPECT_EQ(num_sms[1], 11);
  const float expected[] = {1, 0, 0, 11, 0, 0, 2, 0, 0, 12, 0, 0};
  for (size_t i = 0; i < 2 * kVocab; ++i) EXPECT_EQ(logits_[i], expected[i]) << i;
  EXPECT_EQ(num_stalls_, 0);
}

TEST_F(RankForwardTest, PassesOnWhatAllRanksRefuse) {
  for (FakeForward& forward : forwards_) {
    forward.body = [](const model::ForwardBatch&, const kernels::Exec&) {
      return absl::InvalidArgumentError("token 7 of 6");
    };
  }
  const std::unique_ptr<RankForward> group = Make();
  EXPECT_EQ(group->Run(Batch(), {}).message(), "token 7 of 6");
  for (FakeForward& forward : forwards_) forward.body = {};
  EXPECT_TRUE(group->Run(Batch(), {}).ok());  // Nothing is broken.
  EXPECT_EQ(num_stalls_, 0);
}

TEST_F(RankForwardTest, AbortsAGroupOfWhichARankNeverArrives) {
  forwards_[1].body = [&](const model::ForwardBatch&, const kernels::Exec&) { return Hang(); };
  const std::unique_ptr<RankForward> group = Make(absl::Milliseconds(50));
  const absl::Status status = group->Run(Batch(), {});
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 1 of 2 did not end its step within 50ms"));
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kDevice);
  EXPECT_EQ(num_stalls_, 1);
  EXPECT_EQ(why_, status);
  EXPECT_EQ(group->Run(Batch(), {}), status);  // No rank is asked again.
  EXPECT_EQ(num_stalls_, 1);
}

TEST_F(RankForwardTest, AbortsAGroupOfWhichARankFailsAlone) {
  forwards_[0].body = [&](const model::ForwardBatch&, const kernels::Exec&) { return Hang(); };
  forwards_[1].body = [](const model::ForwardBatch&, const kernels::Exec&) {
    return absl::InternalError("an illegal address");
  };
  const std::unique_ptr<RankForward> group = Make();
  const absl::Status status = group->Run(Batch(), {});
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 1 of 2 failed alone: an illegal address"));
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kDevice);
  EXPECT_EQ(num_stalls_, 1);
}

TEST_F(RankForwardTest, FailsWhenARankCannotStart) {
  on_start_ = [] { return absl::NotFoundError("no device 7"); };
  const std::unique_ptr<RankForward> group = Make();
  EXPECT_EQ(group->Run(Batch(), {}).message(), "no device 7");
}

TEST_F(RankForwardTest, GivesTheTapToTheFirstRankAlone) {
  const float streams[8] = {};
  int num_tensors = 0;
  model::Tap tap;
  tap.on_tensor = [&](const model::TapTensor&) { ++num_tensors; };
  tap.input_streams = [&](int) { return streams; };
  for (FakeForward& forward : forwards_) {
    forward.body = [&](const model::ForwardBatch& batch, const kernels::Exec&) {
      EXPECT_EQ(batch.tap->input_streams(0), streams);
      if (batch.tap->on_tensor) batch.tap->on_tensor({});
      return absl::OkStatus();
    };
  }
  const std::unique_ptr<RankForward> group = Make();
  model::ForwardBatch batch = Batch();
  batch.tap = &tap;
  EXPECT_TRUE(group->Run(batch, {}).ok());
  EXPECT_EQ(num_tensors, 1);
}

TEST(RankForwardDeathTest, EndsTheProcessWhenARankCannotBeStopped) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto never_returns = [] {
    FakeForward forward;
    forward.body = [](const model::ForwardBatch&, const kernels::Exec&) {
      RealClock().Sleep(absl::Minutes(1));
      return absl::OkStatus();
    };
    std::vector<Rank> ranks(1);
    ranks[0].forward = &forward;
    RankForward group(std::move(ranks), RealClock(), absl::Milliseconds(20), {});
    (void)group.Run({}, {});
  };
  EXPECT_DEATH(never_returns(), "does not end after its group was aborted");
}

}  // namespace
}  // namespace isthmus::engine
