// SPDX-License-Identifier: Apache-2.0
// Queues, policies, placement and the relay of tokens, without a network.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "router/admission.h"
#include "router/place.h"
#include "router/route_policy.h"
#include "router/token_relay.h"
#include "services/base/version.h"

namespace isthmus::router {
namespace {

using testing::HasSubstr;

const std::function<bool()> kStays = [] { return false; };

const auto kNoProblems = [] { return std::vector<v1::WorkerStatus>(); };

// Of a request that has just come.
Urgency UrgencyOf(absl::Duration time_left, Priority priority = Priority::kNormal) {
  return {priority, RealClock().Now() + time_left, RealClock().Now()};
}

Urgency Later() { return UrgencyOf(absl::Minutes(1)); }

void WaitUntil(const std::function<bool()>& holds) {
  for (int i = 0; i < 10000 && !holds(); ++i) RealClock().Sleep(absl::Milliseconds(1));
  ASSERT_TRUE(holds());
}

TEST(AdmissionTest, AdmitsQueuesAndRefusesInThatOrder) {
  Admission admission(1, 1, RealClock());
  auto first = std::make_unique<absl::StatusOr<Admission::Place>>(admission.Enter(Later(), kStays));
  ASSERT_TRUE(first->ok());
  std::atomic<bool> is_in = false;
  std::thread waiter([&] {
    const auto second = admission.Enter(Later(), kStays);
    EXPECT_TRUE(second.ok()) << second.status();
    is_in = true;
  });
  WaitUntil([&] { return admission.queued() == 1; });
  const absl::Status third = admission.Enter(Later(), kStays).status();
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(is_in);
  first.reset();
  waiter.join();
  EXPECT_TRUE(is_in);
  EXPECT_EQ(admission.active(), 0);
}

TEST(AdmissionTest, AWaitEndsWithItsClientOrItsDeadline) {
  Admission admission(1, 4, RealClock());
  const auto first = admission.Enter({}, kStays);
  EXPECT_EQ(admission.Enter({}, [] { return true; }).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(admission.Enter(UrgencyOf(absl::Milliseconds(5)), kStays).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(admission.queued(), 0);
}

TEST(AdmissionTest, AClosedOneRefusesAndFinishesWhatIsInside) {
  Admission admission(2, 4, RealClock());
  auto first = std::make_unique<absl::StatusOr<Admission::Place>>(admission.Enter(Later(), kStays));
  admission.Close();
  const absl::Status refused = admission.Enter(Later(), kStays).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("draining"));
  EXPECT_FALSE(admission.WaitUntilEmpty(absl::Milliseconds(5)));
  first.reset();
  EXPECT_TRUE(admission.WaitUntilEmpty(absl::ZeroDuration()));
}

TEST(AdmissionTest, ThoseThatWaitForRoomTryInTheirOrder) {
  Admission admission(8, 8, RealClock());
  Admission::Turn first(&admission, Later());
  ASSERT_TRUE(first.Wait(kStays).ok());
  EXPECT_TRUE(admission.has_line());
  std::atomic<int> tries = 0;
  std::thread second([&] {
    Admission::Turn turn(&admission, Later());
    EXPECT_TRUE(turn.Wait(kStays).ok());
    tries = 1;
    EXPECT_TRUE(turn.Wait(kStays).ok());
    tries = 2;
  });
  WaitUntil([&] { return admission.queued() == 2; });
  admission.Wake();
  RealClock().Sleep(absl::Milliseconds(20));
  EXPECT_EQ(tries, 0);
  first.End();
  second.join();
  EXPECT_EQ(tries, 2);
  EXPECT_FALSE(admission.has_line());
}

TEST(AdmissionTest, AClientLeavesTheLineAndTheNextOneTries) {
  Admission admission(8, 8, RealClock());
  Admission::Turn first(&admission, Later());
  ASSERT_TRUE(first.Wait(kStays).ok());
  {
    Admission::Turn second(&admission, Later());
    EXPECT_EQ(second.Wait([] { return true; }).code(), absl::StatusCode::kCancelled);
    Admission::Turn late(&admission, UrgencyOf(absl::ZeroDuration(), Priority::kLow));
    EXPECT_EQ(late.Wait(kStays).code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(admission.queued(), 3);
  }
  EXPECT_EQ(admission.queued(), 1);
}

// Eight come while one is inside; they go in by urgency, whatever the order in which they came.
TEST(AdmissionTest, TheMoreUrgentGoFirst) {
  Admission admission(1, 16, RealClock());
  auto first = std::make_unique<absl::StatusOr<Admission::Place>>(admission.Enter({}, kStays));
  const absl::Time now = RealClock().Now();
  const std::vector<Urgency> urgencies = {
      {Priority::kLow, now + absl::Seconds(30), now},
      {Priority::kNormal, now + absl::Seconds(50), now},
      {Priority::kNormal, now + absl::Seconds(40), now + absl::Seconds(1)},
      {Priority::kHigh, now + absl::Seconds(59), now},
      {Priority::kHigh, absl::InfiniteFuture(), now + absl::Seconds(2)},
      {Priority::kNormal, absl::InfiniteFuture(), now},
      // So old that its class does not matter any more.
      {Priority::kLow, absl::InfiniteFuture(), now - absl::Minutes(6)},
  };
  Mutex mutex;
  std::vector<size_t> order;
  std::vector<std::thread> waiters;
  for (size_t i = 0; i < urgencies.size(); ++i) {
    waiters.emplace_back([&, i] {
      const auto place = admission.Enter(urgencies[i], kStays);
      EXPECT_TRUE(place.ok()) << place.status();
      MutexLock lock(mutex);
      order.push_back(i);
    });
    WaitUntil([&] { return admission.queued() == static_cast<int64_t>(i) + 1; });
  }
  first.reset();
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(order, (std::vector<size_t>{6, 3, 4, 2, 1, 5, 0}));
}

TEST(AdmissionTest, AnUrgentRequestTriesBeforeThoseThatWaitForRoom) {
  Admission admission(8, 8, RealClock());
  Admission::Turn first(&admission, Later());
  ASSERT_TRUE(first.Wait(kStays).ok());
  Admission::Turn urgent(&admission, UrgencyOf(absl::Minutes(1), Priority::kHigh));
  EXPECT_TRUE(urgent.Wait(kStays).ok());
  // The first one goes on when the urgent one has room.
  std::atomic<bool> has_tried = false;
  std::thread again([&] {
    EXPECT_TRUE(first.Wait(kStays).ok());
    has_tried = true;
  });
  RealClock().Sleep(absl::Milliseconds(20));
  EXPECT_FALSE(has_tried);
  urgent.End();
  admission.Wake();
  again.join();
}

v1::WorkerCard CardOf(v1::WorkerRole role, uint64_t incarnation) {
  v1::WorkerCard card;
  card.set_incarnation(incarnation);
  card.set_role(role);
  card.set_protocol_version(kProtocolVersion);
  card.set_address(absl::StrCat("w:", incarnation));
  card.mutable_values()->set_index_topk(64);
  card.mutable_values()->set_index_key_format("fp4");
  card.mutable_values()->set_checkpoint_fingerprint(0xa);
  card.mutable_values()->set_arithmetic("math");
  card.mutable_values()->set_max_sequence_tokens(100);
  return card;
}

TEST(CheckMatchTest, NamesTheValueThatDiffersBothWays) {
  const v1::WorkerCard a = CardOf(v1::WORKER_ROLE_PREFILL, 1);
  v1::WorkerCard b = CardOf(v1::WORKER_ROLE_DECODE, 2);
  const auto check = [&] { return CheckMatch(a, "this worker's", b, "that of w:2"); };
  EXPECT_TRUE(check().ok());
  b.mutable_values()->set_max_sequence_tokens(7);  // A cache may be smaller.
  EXPECT_TRUE(check().ok());
  b.mutable_values()->set_checkpoint_fingerprint(0xb);
  EXPECT_EQ(check().message(),
            "checkpoint fingerprint differs: this worker's is 000000000000000a, that of w:2 "
            "000000000000000b");
  b.mutable_values()->set_index_topk(4);
  EXPECT_EQ(check().message(), "model.index_topk differs: this worker's is 64, that of w:2 4");
  b = a;
  b.mutable_values()->set_arithmetic("reference");
  EXPECT_EQ(check().code(), absl::StatusCode::kFailedPrecondition);
  b = a;
  b.mutable_values()->set_index_key_format("fp8");
  b.mutable_values()->set_layout_fingerprint(3);
  EXPECT_EQ(check().message(),
            "model.index_key_format differs: this worker's is fp4, that of w:2 fp8");
  b = a;
  b.mutable_values()->set_layout_fingerprint(3);
  EXPECT_EQ(check().code(), absl::StatusCode::kFailedPrecondition);
  b = a;
  b.set_protocol_version(9);
  EXPECT_EQ(check().code(), absl::StatusCode::kFailedPrecondition);
  b = a;
  b.mutable_values()->set_vocab_size(9);
  EXPECT_EQ(check().code(), absl::StatusCode::kFailedPrecondition);
  b = a;
  b.mutable_values()->set_end_token_id(9);
  EXPECT_EQ(check().code(), absl::StatusCode::kFailedPrecondition);
}

// A registered worker that nobody calls.
std::shared_ptr<WorkerLink> LinkOf(v1::WorkerRole role, uint64_t incarnation) {
  auto link = std::make_shared<WorkerLink>(nullptr, CardOf(role, incarnation), absl::Minutes(1),
                                           RealClock());
  link->SetRegistered(1);
  link->SetTokensOpen(true);
  return link;
}

v1::WorkerLoad DecodeLoad(uint64_t transfers, uint64_t free_pages, uint64_t free_slots = 8) {
  v1::WorkerLoad load;
  load.set_transfers(transfers);
  load.set_free_pages(free_pages);
  load.set_free_state_slots(free_slots);
  load.set_total_state_slots(8);
  return load;
}

TEST(RoutePolicyTest, RoundRobinTakesTurnsForEachRole) {
  const auto policy = MakeRoutePolicy("round_robin");
  const std::vector<LinkLoad> two(2);
  std::string prefill;
  std::string decode;
  for (int i = 0; i < 4; ++i) {
    absl::StrAppend(&decode, policy->Choose(v1::WORKER_ROLE_DECODE, two));
    absl::StrAppend(&prefill, policy->Choose(v1::WORKER_ROLE_PREFILL, two));
  }
  EXPECT_EQ(decode, "0101");
  EXPECT_EQ(prefill, "0101");
}

TEST(RoutePolicyTest, LeastLoadedGoesByWhatEachRoleIsShortOf) {
  const auto policy = MakeRoutePolicy("least_loaded");
  std::vector<LinkLoad> loads(2);
  loads[0].reported.set_pending_prompt_tokens(500);
  loads[1].reported.set_pending_prompt_tokens(100);
  loads[1].reported.set_transfers(9);
  EXPECT_EQ(policy->Choose(v1::WORKER_ROLE_PREFILL, loads), 1);
  loads[1].prompt_tokens_since_report = 1000;  // What the report cannot know yet.
  EXPECT_EQ(policy->Choose(v1::WORKER_ROLE_PREFILL, loads), 0);

  loads[0].reported = DecodeLoad(3, 10);
  loads[1].reported = DecodeLoad(2, 5);
  EXPECT_EQ(policy->Choose(v1::WORKER_ROLE_DECODE, loads), 1);
  loads[1].reported = DecodeLoad(3, 5);
  EXPECT_EQ(policy->Choose(v1::WORKER_ROLE_DECODE, loads), 0);
  loads[0].reported = DecodeLoad(1, 0);  // The least busy one has no pages.
  EXPECT_EQ(policy->Choose(v1::WORKER_ROLE_DECODE, loads), 1);
}

TEST(RoutePolicyTest, TiesTakeTurns) {
  const auto policy = MakeRoutePolicy("least_loaded");
  const std::vector<LinkLoad> three(3);
  std::string choices;
  for (int i = 0; i < 6; ++i) {
    absl::StrAppend(&choices, policy->Choose(v1::WORKER_ROLE_DECODE, three));
  }
  EXPECT_EQ(choices, "012012");
}

TEST(PlacerTest, WithoutWorkersSaysWhoIsMissing) {
  Placer placer("least_loaded");
  v1::WorkerStatus refused;
  refused.set_address("w:9");
  refused.set_problem("refused: index_topk");
  const absl::Status status =
      placer.Place({}, [&] { return std::vector<v1::WorkerStatus>{refused}; }, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(),
            "usable workers: 0 for prefill, 0 for decode; w:9: refused: index_topk");
}

TEST(PlacerTest, SpreadsWhatIsInFlightAndTakesItOffTheBooks) {
  Placer placer("least_loaded");
  const Links links = {LinkOf(v1::WORKER_ROLE_PREFILL, 1), LinkOf(v1::WORKER_ROLE_DECODE, 2),
                       LinkOf(v1::WORKER_ROLE_DECODE, 3)};
  PlaceWish wish;
  wish.num_prompt_tokens = 10;
  {
    const auto first = placer.Place(links, kNoProblems, wish);
    const auto second = placer.Place(links, kNoProblems, wish);
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_NE(first->decode, second->decode);
    EXPECT_EQ(links[0]->load().prompt_tokens_in_flight, 20);
    EXPECT_EQ(links[1]->load().requests_in_flight, 1);
  }
  for (const auto& link : links) EXPECT_EQ(link->load().requests_in_flight, 0);
}

TEST(PlacerTest, AvoidsWhoFailedTakesNobodyThatIsFullAndNobodyThatIsTooSmall) {
  Placer placer("least_loaded");
  const Links links = {LinkOf(v1::WORKER_ROLE_PREFILL, 1), LinkOf(v1::WORKER_ROLE_DECODE, 2),
                       LinkOf(v1::WORKER_ROLE_DECODE, 3)};
  PlaceWish wish;
  wish.failed = {2};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(placer.Place(links, kNoProblems, wish)->decode, links[2]);
  wish.failed = {2, 3};  // There is nobody else.
  EXPECT_TRUE(placer.Place(links, kNoProblems, wish).ok());
  wish.failed = {};
  wish.full = {3};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(placer.Place(links, kNoProblems, wish)->decode, links[1]);
  wish.full = {2, 3};
  EXPECT_TRUE(absl::IsResourceExhausted(placer.Place(links, kNoProblems, wish).status()));
  wish.full = {};
  wish.num_prompt_tokens = 101;
  EXPECT_TRUE(absl::IsUnavailable(placer.Place(links, kNoProblems, wish).status()));
}

v1::StepTokens StepOf(const std::string& transfer_id, uint64_t first_index, uint32_t token) {
  v1::StepTokens step;
  step.add_sequences()->set_transfer_id(transfer_id);
  step.mutable_sequences(0)->set_first_index(first_index);
  step.mutable_sequences(0)->add_token_ids(token);
  return step;
}

std::shared_ptr<TokenMailbox> MailboxOf(size_t max_behind, std::function<void()> on_overflow = {}) {
  return std::make_shared<TokenMailbox>(max_behind, std::move(on_overflow), RealClock());
}

TEST(TokenRelayTest, DeliversToSubscribersAndEndsThemAllWithTheStream) {
  TokenRelay relay;
  const auto a = MailboxOf(8);
  const auto b = MailboxOf(8);
  relay.Subscribe("a", a);
  relay.Subscribe("b", b);
  relay.Deliver(StepOf("a", 1, 5));
  relay.Deliver(StepOf("nobody", 1, 6));
  EXPECT_EQ(a->TakeFor(absl::ZeroDuration())->at(0).token_ids(0), 5);
  EXPECT_TRUE(b->TakeFor(absl::ZeroDuration())->empty());
  relay.Deliver(StepOf("a", 2, 7));
  relay.FailAll(absl::UnavailableError("gone"));
  EXPECT_EQ(a->TakeFor(absl::ZeroDuration())->at(0).token_ids(0), 7);  // It came before the end.
  EXPECT_EQ(a->TakeFor(absl::ZeroDuration()).status(), absl::UnavailableError("gone"));
  EXPECT_EQ(b->TakeFor(absl::ZeroDuration()).status(), absl::UnavailableError("gone"));
}

TEST(TokenMailboxTest, WhoIsBehindGetsAllInOneMessage) {
  TokenRelay relay;
  const auto mailbox = MailboxOf(8);
  relay.Subscribe("a", mailbox);
  for (uint32_t i = 1; i <= 3; ++i) relay.Deliver(StepOf("a", i, 10 + i));
  v1::StepTokens last = StepOf("a", 4, 14);
  last.mutable_sequences(0)->set_end(v1::SEQUENCE_END_STOP);
  relay.Deliver(last);
  const auto tokens = mailbox->TakeFor(absl::ZeroDuration());
  ASSERT_TRUE(tokens.ok() && tokens->size() == 1);
  EXPECT_THAT(tokens->at(0).token_ids(), testing::ElementsAre(11, 12, 13, 14));
  EXPECT_EQ(tokens->at(0).first_index(), 1);
  EXPECT_EQ(tokens->at(0).end(), v1::SEQUENCE_END_STOP);
}

TEST(TokenMailboxTest, EachReplyHasAMessageOfItsOwn) {
  const auto mailbox = MailboxOf(8);
  const auto push = [&](uint32_t reply, uint64_t first_index, v1::SequenceEnd end) {
    v1::StepTokens step = StepOf("a", first_index, 10 * reply + static_cast<uint32_t>(first_index));
    step.mutable_sequences(0)->set_reply_index(reply);
    step.mutable_sequences(0)->set_end(end);
    mailbox->Push(step.sequences(0));
  };
  push(1, 1, v1::SEQUENCE_END_UNSPECIFIED);
  push(0, 1, v1::SEQUENCE_END_UNSPECIFIED);
  push(1, 2, v1::SEQUENCE_END_STOP);
  push(0, 2, v1::SEQUENCE_END_UNSPECIFIED);
  const auto messages = mailbox->TakeFor(absl::ZeroDuration());
  ASSERT_TRUE(messages.ok() && messages->size() == 2);
  EXPECT_THAT(messages->at(0).token_ids(), testing::ElementsAre(11, 12));
  EXPECT_EQ(messages->at(0).end(), v1::SEQUENCE_END_STOP);
  EXPECT_THAT(messages->at(1).token_ids(), testing::ElementsAre(1, 2));
  EXPECT_EQ(messages->at(1).end(), v1::SEQUENCE_END_UNSPECIFIED);
}

TEST(TokenMailboxTest, ASlowReaderIsEndedOnceAndNobodyElseIs) {
  TokenRelay relay;
  int num_ended = 0;
  const auto slow = MailboxOf(4, [&] { ++num_ended; });
  const auto quick = MailboxOf(4);
  relay.Subscribe("slow", slow);
  relay.Subscribe("quick", quick);
  for (uint32_t i = 1; i <= 4; ++i) relay.Deliver(StepOf("slow", i, 1));
  EXPECT_FALSE(slow->has_overflowed());
  for (uint32_t i = 5; i <= 8; ++i) relay.Deliver(StepOf("slow", i, 1));
  relay.Deliver(StepOf("quick", 1, 2));
  EXPECT_EQ(num_ended, 1);
  EXPECT_TRUE(slow->has_overflowed());
  EXPECT_TRUE(absl::IsResourceExhausted(slow->TakeFor(absl::ZeroDuration()).status()));
  EXPECT_EQ(quick->TakeFor(absl::ZeroDuration())->size(), 1u);
}

TEST(TokenMailboxTest, APauseGathersTokensAndEndsWithTheSequence) {
  const auto mailbox = MailboxOf(8);
  mailbox->Push(StepOf("a", 1, 5).sequences(0));
  const absl::Time start = RealClock().Now();
  const auto first = mailbox->TakeFor(absl::Seconds(10), start + absl::Milliseconds(20));
  EXPECT_GE(RealClock().Now() - start, absl::Milliseconds(20));
  EXPECT_EQ(first->size(), 1u);
  std::thread sender([&] {
    mailbox->Push(StepOf("a", 2, 6).sequences(0));
    v1::StepTokens last = StepOf("a", 3, 7);
    last.mutable_sequences(0)->set_end(v1::SEQUENCE_END_LENGTH);
    mailbox->Push(last.sequences(0));
  });
  const auto rest = mailbox->TakeFor(absl::Seconds(10), RealClock().Now() + absl::Minutes(1));
  sender.join();
  EXPECT_THAT(rest->at(0).token_ids(), testing::ElementsAre(6, 7));
}

TEST(TokenMailboxTest, AMissingTokenIsAnError) {
  const auto mailbox = MailboxOf(8);
  mailbox->Push(StepOf("a", 1, 5).sequences(0));
  mailbox->Push(StepOf("a", 3, 6).sequences(0));
  EXPECT_EQ(mailbox->TakeFor(absl::ZeroDuration())->size(), 1u);
  EXPECT_EQ(mailbox->TakeFor(absl::ZeroDuration()).status(),
            absl::InternalError("token 3 came, want 2"));
}

}  // namespace
}  // namespace isthmus::router
