// SPDX-License-Identifier: Apache-2.0
// Replies of the bundled model through three processes: they answer, and token by token and bit by
// bit of the logits they are those of a single process, alone and in a batch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "services/engine/engine.h"
#include "services/model/forward.h"
#include "services/model/weights.h"
#include "tests/integration/cluster.h"
#include "tests/integration/running_request.h"

namespace isthmus::testing {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

// One cluster for all tests, with room for eight sequences.
class ReplyTest : public SharedClusterTest<ReplyTest> {
 public:
  static ClusterOptions Options() {
    ClusterOptions options;
    options.workers = {"max_sequences=10", "cache_tokens=32768"};
    options.router = {"max_active_requests=8"};
    return options;
  }

 protected:
  static v1::ChatRequest ChatOf(const Json& messages) {
    v1::ChatRequest request;
    request.set_conversation_json(Json{{"messages", messages}}.dump());
    request.mutable_sampling()->set_temperature(0);
    request.mutable_sampling()->set_max_output_tokens(100);
    return request;
  }
};

Json RecallCase(const std::string& id) {
  std::ifstream file(BundledCheckpoint() + "/recall-cases.json");
  for (const Json& one : Json::parse(file)) {
    if (one["id"] == id) return one;
  }
  return {};
}

TEST_F(ReplyTest, AnswersFromAFactInThePromptAndAcrossTurns) {
  const Json recall = RecallCase("multiturn-10-0");
  ASSERT_FALSE(recall.is_null());
  Json messages = Json::array();
  for (const Json& turn : recall["turns"]) {
    messages.push_back({{"role", "user"}, {"content", turn["user"]}});
    std::string streamed;
    const auto finish =
        cluster_->client().Chat(ChatOf(messages), kReplyPatience,
                                [&](const v1::TokenDelta& delta) { streamed += delta.content(); });
    ASSERT_TRUE(finish.ok()) << finish.status() << cluster_->Logs();
    const Json message = Json::parse(finish->ends[0].message_json());
    EXPECT_EQ(message["content"], streamed);
    EXPECT_EQ(finish->ends[0].finish_reason(), v1::FINISH_REASON_STOP);
    EXPECT_GT(finish->finish.usage().prompt_tokens(), 0);
    EXPECT_GT(finish->finish.usage().output_tokens(), 1);
    EXPECT_GT(finish->finish.timings().ttft_ms(), 0);
    EXPECT_GT(finish->finish.timings().tokens_per_s(), 0);
    EXPECT_GT(finish->finish.transfer().kv_bytes(), 0);
    EXPECT_GT(finish->finish.transfer().digests_verified(), 0);
    if (turn.contains("expect") && !turn["expect"].is_null()) {
      EXPECT_THAT(streamed, HasSubstr(turn["expect"].get<std::string>()));
    }
    messages.push_back(message);
  }
}

TEST_F(ReplyTest, FindsAFactAThousandWordsEarlier) {
  const Json recall = RecallCase("needle-1000-0");
  ASSERT_FALSE(recall.is_null());
  const Json messages = {{{"role", "user"}, {"content", recall["turns"][0]["user"]}}};
  std::string streamed;
  const auto finish =
      cluster_->client().Chat(ChatOf(messages), kReplyPatience,
                              [&](const v1::TokenDelta& delta) { streamed += delta.content(); });
  ASSERT_TRUE(finish.ok()) << finish.status();
  EXPECT_THAT(streamed, HasSubstr(recall["turns"][0]["expect"].get<std::string>()));
  EXPECT_GT(finish->finish.usage().prompt_tokens(), 1000);
}

struct Reply {
  std::vector<uint32_t> tokens;
  std::vector<uint32_t> logits;
  bool operator==(const Reply&) const = default;
};

void PrintTo(const Reply& reply, std::ostream* out) {
  *out << "tokens " << ::testing::PrintToString(reply.tokens) << ", logits "
       << ::testing::PrintToString(reply.logits);
}

// An engine in this process, as the reference for what comes through the cluster.
struct LocalEngine {
  std::unique_ptr<model::Weights> weights;
  std::unique_ptr<model::ModelForward> forward;
  std::unique_ptr<kv::CachePool> pool;
  std::unique_ptr<engine::Engine> engine;

  void Load() {
    weights = *model::Weights::Load(BundledCheckpoint(), {});
    forward = *model::ModelForward::Create(weights.get(), kernels::Arithmetic::kReference, 256);
    pool = *kv::CachePool::Create(forward->layout(), 8192, 2);
    engine::EngineOptions options;
    options.eos_token_id = weights->config().eos_token_id;
    engine = std::make_unique<engine::Engine>(forward.get(), pool.get(), options, kernels::Exec{});
  }
  // The output tokens and the digests of the logits that they were drawn from.
  Reply Run(const v1::GenerateRequest& request) {
    engine::SamplingParams sampling;
    sampling.temperature = static_cast<float>(request.sampling().temperature());
    sampling.top_p =
        request.sampling().has_top_p() ? static_cast<float>(request.sampling().top_p()) : 1.0f;
    sampling.seed = request.sampling().seed();
    sampling.wants_logits_digests = true;
    sampling.max_tokens = request.sampling().max_output_tokens();
    auto sequence = engine->Admit(
        "local", {request.token_ids().ids().begin(), request.token_ids().ids().end()}, sampling);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    engine::Sequence* const one = &*sequence;
    while (!one->is_finished()) EXPECT_TRUE(engine->Step({&one, 1}).ok());
    return {{one->tokens.begin() + one->num_prompt_tokens, one->tokens.end()}, one->logits_crc32c};
  }
};

// Digests are asked for; every other prompt is sampled, so that the sampler's state crosses too.
v1::GenerateRequest DiagnosedRequest(size_t num_prompt_tokens) {
  v1::GenerateRequest request = RequestOf(num_prompt_tokens, 12);
  request.mutable_sampling()->set_wants_logits_digests(true);
  if (num_prompt_tokens % 2 == 1) {
    request.mutable_sampling()->set_temperature(1);
    request.mutable_sampling()->set_seed(num_prompt_tokens);
  }
  return request;
}

Reply ReplyOf(RunningRequest& request) {
  const absl::Status status = request.Wait();
  EXPECT_TRUE(status.ok()) << status;
  return {request.tokens(), request.logits_digests()};
}

// Every residue mod 4, around the entries of 128 tokens and around the pages of 256.
constexpr size_t kLengths[] = {1,   2,   3,   4,   5,   6,   7,   126, 127, 128,
                               129, 130, 255, 256, 257, 258, 511, 512, 513, 600};

TEST_F(ReplyTest, AreBitForBitThoseOfASingleProcess) {
  LocalEngine local;
  local.Load();
  for (const size_t length : kLengths) {
    const v1::GenerateRequest asked = DiagnosedRequest(length);
    RunningRequest request(cluster_->router().address(), asked);
    const Reply reply = ReplyOf(request);
    EXPECT_EQ(reply.logits.size(), reply.tokens.size());
    EXPECT_EQ(reply, local.Run(asked)) << "prompt of " << length << " tokens";
    EXPECT_EQ(request.finish().usage().prompt_tokens(), length);
  }
}

TEST_F(ReplyTest, AreTheSameAloneAndInABatchOfEight) {
  std::vector<v1::GenerateRequest> asked;
  std::vector<Reply> alone;
  for (size_t i = 0; i < 8; ++i) {
    asked.push_back(DiagnosedRequest(100 + 71 * i));
    asked.back().mutable_sampling()->set_max_output_tokens(24);
    RunningRequest request(cluster_->router().address(), asked.back());
    alone.push_back(ReplyOf(request));
  }
  std::vector<std::unique_ptr<RunningRequest>> together;
  for (const v1::GenerateRequest& one : asked) {
    together.push_back(std::make_unique<RunningRequest>(cluster_->router().address(), one));
  }
  // Batched indeed, not one after the other.
  EXPECT_TRUE(WaitUntil(absl::Seconds(20),
                        [] { return cluster_->decode().Load().active_sequences() > 1; }));
  for (size_t i = 0; i < together.size(); ++i) {
    EXPECT_EQ(ReplyOf(*together[i]), alone[i]) << "request " << i;
  }
}

TEST_F(ReplyTest, OneOutputTokenIsAWholeReply) {
  const auto finish =
      cluster_->client().Generate(RequestOf(20, 1), kReplyPatience, [](const v1::TokenDelta&) {});
  ASSERT_TRUE(finish.ok()) << finish.status();
  EXPECT_EQ(finish->finish.usage().output_tokens(), 1);
  EXPECT_GT(finish->finish.transfer().digests_verified(), 0);
}

}  // namespace
}  // namespace isthmus::testing
