// SPDX-License-Identifier: Apache-2.0
// Router, prefill and decode worker as three real processes on loopback, with the bundled model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "services/engine/engine.h"
#include "services/model/forward.h"
#include "services/model/weights.h"
#include "services/rpc/router_client.h"
#include "tests/integration/program_under_test.h"

namespace isthmus {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

constexpr char kCheckpoint[] = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";
constexpr absl::Duration kStartPatience = absl::Seconds(30);
constexpr absl::Duration kReplyPatience = absl::Minutes(3);

// Three processes, or the workers of another cluster with a router of their own.
class Cluster {
 public:
  Cluster(const std::vector<std::string>& prefill_set, std::vector<std::string> decode_set,
          const std::vector<std::string>& router_set) {
    prefill = Start(ISTHMUS_PREFILL_BINARY, "prefill", prefill_set);
    // Pages of a client that left come back soon; nothing here can write into them any more.
    decode_set.push_back("quarantine_time=1s");
    decode = Start(ISTHMUS_DECODE_BINARY, "decode", decode_set);
    prefill_address = prefill->WaitForAddress(kStartPatience);
    decode_address = decode->WaitForAddress(kStartPatience);
    StartRouter(prefill_address, decode_address, router_set);
  }
  Cluster(const Cluster& workers, const std::vector<std::string>& router_set) {
    StartRouter(workers.prefill_address, workers.decode_address, router_set);
  }

  // Whether the router becomes ready; `reason` is why not.
  bool WaitUntilReady(absl::Duration patience, std::string* reason) {
    const absl::Time deadline = absl::Now() + patience;
    while (absl::Now() < deadline) {
      const auto status = client->Status(absl::Seconds(5));
      if (status.ok() && status->is_ready()) return true;
      *reason = status.ok() ? status->not_ready_reason() : status.status().ToString();
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }

  // Whether the router says that it is not ready for a reason with `text` in it.
  bool WaitForReason(const std::string& text, absl::Duration patience, std::string* reason) {
    const absl::Time deadline = absl::Now() + patience;
    while (absl::Now() < deadline) {
      const auto status = client->Status(absl::Seconds(5));
      *reason = status.ok() ? status->not_ready_reason() : status.status().ToString();
      if (absl::StrContains(*reason, text)) return true;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }

  // Whether every page and slot of both workers is free again.
  bool WaitUntilFree(absl::Duration patience) {
    const absl::Time deadline = absl::Now() + patience;
    while (absl::Now() < deadline) {
      const auto status = client->Status(absl::Seconds(5));
      bool all_free = status.ok() && status->active_requests() == 0;
      for (int i = 0; all_free && i < status->workers_size(); ++i) {
        const v1::WorkerLoad& load = status->workers(i).load();
        all_free = load.free_pages() == load.total_pages() &&
                   load.free_state_slots() == load.total_state_slots() &&
                   load.active_sequences() == 0;
      }
      if (all_free) return true;
      absl::SleepFor(absl::Milliseconds(50));
    }
    return false;
  }

  testing::TemporaryFolder folder;
  std::unique_ptr<testing::ServerProgram> prefill;
  std::unique_ptr<testing::ServerProgram> decode;
  std::unique_ptr<testing::ServerProgram> router;
  std::string prefill_address;
  std::string decode_address;
  std::string router_address;
  std::unique_ptr<rpc::RouterClient> client;

 private:
  std::unique_ptr<testing::ServerProgram> Start(const std::string& binary, const std::string& name,
                                                std::vector<std::string> assignments) {
    assignments.push_back(std::string("checkpoint=") + kCheckpoint);
    return std::make_unique<testing::ServerProgram>(binary, name, folder.path(), assignments);
  }
  void StartRouter(const std::string& prefill_at, const std::string& decode_at,
                   std::vector<std::string> assignments) {
    assignments.push_back("prefill_workers=" + prefill_at);
    assignments.push_back("decode_workers=" + decode_at);
    assignments.push_back("poll_interval=50ms");
    router = Start(ISTHMUS_ROUTER_BINARY, "router", assignments);
    router_address = router->WaitForAddress(kStartPatience);
    client = std::make_unique<rpc::RouterClient>(router_address);
  }
};

class ClusterTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    cluster_ = new Cluster({}, {}, {});
    std::string reason;
    ASSERT_TRUE(cluster_->WaitUntilReady(kStartPatience, &reason))
        << reason << "\n"
        << cluster_->router->Log() << cluster_->prefill->Log() << cluster_->decode->Log();
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }
  // After every test: nothing that was taken stays taken.
  void TearDown() override { EXPECT_TRUE(cluster_->WaitUntilFree(absl::Seconds(20))); }

  static v1::SamplingParams Greedy(uint32_t max_output_tokens) {
    v1::SamplingParams sampling;
    sampling.set_temperature(0);
    sampling.set_max_output_tokens(max_output_tokens);
    return sampling;
  }
  static v1::ChatRequest ChatOf(const Json& messages) {
    v1::ChatRequest request;
    request.set_conversation_json(Json{{"messages", messages}}.dump());
    *request.mutable_sampling() = Greedy(100);
    return request;
  }
  static v1::GenerateRequest TokensOf(size_t count, uint32_t max_output_tokens) {
    v1::GenerateRequest request;
    for (size_t i = 0; i < count; ++i) {
      request.mutable_token_ids()->add_ids(static_cast<uint32_t>(10 + (i * 37) % 1900));
    }
    *request.mutable_sampling() = Greedy(max_output_tokens);
    return request;
  }
  static absl::Status StatusOfChat(const v1::ChatRequest& request) {
    return cluster_->client->Chat(request, kReplyPatience, [](const v1::TokenDelta&) {}).status();
  }
  static absl::Status StatusOfGenerate(const v1::GenerateRequest& request) {
    return cluster_->client->Generate(request, kReplyPatience, [](const v1::TokenDelta&) {})
        .status();
  }

  static Cluster* cluster_;
};

Cluster* ClusterTest::cluster_ = nullptr;

Json RecallCase(const std::string& id) {
  std::ifstream file(std::string(kCheckpoint) + "/recall-cases.json");
  for (const Json& one : Json::parse(file)) {
    if (one["id"] == id) return one;
  }
  return {};
}

TEST_F(ClusterTest, AnswersFromAFactInThePromptAndAcrossTurns) {
  const Json recall = RecallCase("multiturn-10-0");
  ASSERT_FALSE(recall.is_null());
  Json messages = Json::array();
  for (const Json& turn : recall["turns"]) {
    messages.push_back({{"role", "user"}, {"content", turn["user"]}});
    std::string streamed;
    const auto finish =
        cluster_->client->Chat(ChatOf(messages), kReplyPatience,
                               [&](const v1::TokenDelta& delta) { streamed += delta.content(); });
    ASSERT_TRUE(finish.ok()) << finish.status() << cluster_->decode->Log();
    const Json message = Json::parse(finish->message_json());
    EXPECT_EQ(message["content"], streamed);
    EXPECT_EQ(finish->finish_reason(), v1::FINISH_REASON_STOP);
    EXPECT_GT(finish->usage().prompt_tokens(), 0);
    EXPECT_GT(finish->usage().output_tokens(), 1);
    EXPECT_GT(finish->timings().ttft_ms(), 0);
    EXPECT_GT(finish->timings().tokens_per_s(), 0);
    EXPECT_GT(finish->transfer().kv_bytes(), 0);
    EXPECT_GT(finish->transfer().digests_verified(), 0);
    if (turn.contains("expect") && !turn["expect"].is_null()) {
      EXPECT_THAT(streamed, HasSubstr(turn["expect"].get<std::string>()));
    }
    messages.push_back(message);
  }
}

TEST_F(ClusterTest, FindsAFactAThousandWordsEarlier) {
  const Json recall = RecallCase("needle-1000-0");
  ASSERT_FALSE(recall.is_null());
  const Json messages = {{{"role", "user"}, {"content", recall["turns"][0]["user"]}}};
  std::string streamed;
  const auto finish =
      cluster_->client->Chat(ChatOf(messages), kReplyPatience,
                             [&](const v1::TokenDelta& delta) { streamed += delta.content(); });
  ASSERT_TRUE(finish.ok()) << finish.status();
  EXPECT_THAT(streamed, HasSubstr(recall["turns"][0]["expect"].get<std::string>()));
  EXPECT_GT(finish->usage().prompt_tokens(), 1000);
}

// An engine in this process, as the reference for what comes through the cluster.
struct LocalEngine {
  std::unique_ptr<model::Weights> weights;
  std::unique_ptr<model::ModelForward> forward;
  std::unique_ptr<kv::CachePool> pool;
  std::unique_ptr<engine::Engine> engine;

  void Load() {
    weights = *model::Weights::Load(kCheckpoint, {});
    forward = *model::ModelForward::Create(weights.get(), kernels::Arithmetic::kReference, 256);
    pool = *kv::CachePool::Create(forward->layout(), 8192, 2);
    engine::EngineOptions options;
    options.eos_token_id = weights->config().eos_token_id;
    engine = std::make_unique<engine::Engine>(forward.get(), pool.get(), options, kernels::Exec{});
  }
  std::vector<uint32_t> Run(const v1::GenerateRequest& request) {
    engine::SamplingParams sampling;
    sampling.temperature = static_cast<float>(request.sampling().temperature());
    sampling.top_p =
        request.sampling().has_top_p() ? static_cast<float>(request.sampling().top_p()) : 1.0f;
    sampling.seed = request.sampling().seed();
    sampling.max_tokens = request.sampling().max_output_tokens();
    auto sequence = engine->Admit(
        "local", {request.token_ids().ids().begin(), request.token_ids().ids().end()}, sampling);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    engine::Sequence* const one = &*sequence;
    while (!one->is_finished()) EXPECT_TRUE(engine->Step({&one, 1}).ok());
    return {one->tokens.begin() + one->num_prompt_tokens, one->tokens.end()};
  }
};

TEST_F(ClusterTest, RepliesAreThoseOfASingleProcess) {
  LocalEngine local;
  local.Load();
  for (const size_t length : {1u, 2u, 3u, 4u, 5u, 6u, 127u, 128u, 129u, 255u, 256u, 257u, 600u}) {
    v1::GenerateRequest request = TokensOf(length, 12);
    if (length % 2 == 1) {  // The sampler's state crosses the hand-over too.
      request.mutable_sampling()->set_temperature(1);
      request.mutable_sampling()->set_seed(length);
    }
    std::vector<uint32_t> tokens;
    const auto finish =
        cluster_->client->Generate(request, kReplyPatience, [&](const v1::TokenDelta& delta) {
          tokens.insert(tokens.end(), delta.token_ids().begin(), delta.token_ids().end());
        });
    ASSERT_TRUE(finish.ok()) << finish.status();
    EXPECT_EQ(tokens, local.Run(request)) << "prompt of " << length << " tokens";
    EXPECT_EQ(finish->usage().prompt_tokens(), length);
    EXPECT_EQ(finish->usage().output_tokens(), tokens.size());
  }
}

TEST_F(ClusterTest, OneOutputTokenIsAWholeReply) {
  const auto finish =
      cluster_->client->Generate(TokensOf(20, 1), kReplyPatience, [](const v1::TokenDelta&) {});
  ASSERT_TRUE(finish.ok()) << finish.status();
  EXPECT_EQ(finish->usage().output_tokens(), 1);
  EXPECT_GT(finish->transfer().digests_verified(), 0);
}

TEST_F(ClusterTest, RefusesBadInputByTheNameOfItsField) {
  const auto expect = [](const absl::Status& status, const std::string& text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  v1::ChatRequest chat = ChatOf(Json::array());
  chat.set_conversation_json("{\"messages\": [");
  expect(StatusOfChat(chat), "conversation_json");
  chat.set_conversation_json("[1]");
  expect(StatusOfChat(chat), "conversation_json");
  chat.set_conversation_json(R"({"messages": [{"role": "king", "content": "x"}]})");
  expect(StatusOfChat(chat), "role");
  chat = ChatOf({{{"role", "user"}, {"content", "Hello."}}});
  chat.set_request_id(std::string(200, 'x'));
  expect(StatusOfChat(chat), "request_id");
  chat.set_request_id("");
  chat.mutable_sampling()->set_temperature(3);
  expect(StatusOfChat(chat), "sampling.temperature: is 3, want 0 to 2");
  chat.mutable_sampling()->set_temperature(std::nan(""));
  expect(StatusOfChat(chat), "sampling.temperature");
  chat.mutable_sampling()->set_temperature(0);
  chat.mutable_sampling()->set_top_p(0);
  expect(StatusOfChat(chat), "sampling.top_p");

  v1::GenerateRequest generate;
  expect(StatusOfGenerate(generate), "prompt: has no tokens");
  generate = TokensOf(3, 0);
  expect(StatusOfGenerate(generate), "sampling.max_output_tokens");
  generate = TokensOf(3, 1);
  generate.mutable_token_ids()->add_ids(100000);
  expect(StatusOfGenerate(generate), "token 3 has id 100000");
  expect(StatusOfGenerate(TokensOf(70000, 1)), "prompt: has 70000 tokens, want at most");
  generate = v1::GenerateRequest();
  generate.set_text("caf\xc3");
  expect(StatusOfGenerate(generate), "UTF-8");
}

TEST_F(ClusterTest, ConcurrentRequestsAreAnsweredOrRefusedInABoundedWay) {
  Cluster narrow(*cluster_, {"max_active_requests=1", "max_queued_requests=2"});
  std::string reason;
  ASSERT_TRUE(narrow.WaitUntilReady(kStartPatience, &reason)) << reason;
  std::atomic<int> num_ok = 0;
  std::atomic<int> num_refused = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const absl::Status status =
          narrow.client->Generate(TokensOf(600, 16), kReplyPatience, [](const v1::TokenDelta&) {})
              .status();
      if (status.ok()) ++num_ok;
      if (absl::IsResourceExhausted(status)) ++num_refused;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_ok + num_refused, 8);
  EXPECT_GE(num_ok, 3);
  EXPECT_GE(num_refused, 1);
}

TEST_F(ClusterTest, RequestsAtOneTimeGetTheRepliesTheyGetAlone) {
  std::vector<std::vector<uint32_t>> alone(4);
  std::vector<std::vector<uint32_t>> together(4);
  const auto run = [](size_t i, std::vector<uint32_t>* tokens) {
    const auto finish = cluster_->client->Generate(
        TokensOf(100 + 90 * i, 24), kReplyPatience, [&](const v1::TokenDelta& delta) {
          tokens->insert(tokens->end(), delta.token_ids().begin(), delta.token_ids().end());
        });
    EXPECT_TRUE(finish.ok()) << finish.status();
  };
  for (size_t i = 0; i < alone.size(); ++i) run(i, &alone[i]);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < alone.size(); ++i) threads.emplace_back(run, i, &together[i]);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(together, alone);
}

TEST_F(ClusterTest, AClientThatLeavesFreesThePagesOfBothWorkers) {
  // The client's deadline is a departure as seen from the router: it comes in every phase.
  for (const int milliseconds : {1, 20, 60, 150, 400}) {
    v1::GenerateRequest request = TokensOf(2000, 4000);
    request.mutable_sampling()->set_temperature(2);
    const auto finish = cluster_->client->Generate(request, absl::Milliseconds(milliseconds),
                                                   [](const v1::TokenDelta&) {});
    if (finish.ok()) continue;  // The reply was shorter than that.
    EXPECT_EQ(finish.status().code(), absl::StatusCode::kDeadlineExceeded) << finish.status();
    EXPECT_TRUE(cluster_->WaitUntilFree(absl::Seconds(20))) << cluster_->decode->Log();
  }
  EXPECT_TRUE(StatusOfGenerate(TokensOf(20, 4)).ok());
}

TEST_F(ClusterTest, WorkersOfAnotherIndexTopkAreRefusedWithBothValues) {
  Cluster mixed({}, {"model.index_topk=4"}, {});
  std::string reason;
  EXPECT_TRUE(
      mixed.WaitForReason("model.index_topk differs: prefill worker's is 64, decode worker's 4",
                          kStartPatience, &reason))
      << reason;
  const absl::Status status =
      mixed.client->Generate(TokensOf(3, 1), kReplyPatience, [](const v1::TokenDelta&) {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("model.index_topk"));
}

TEST_F(ClusterTest, WorkersOfAnotherPageSizeAreRefusedWithBothValues) {
  Cluster mixed({"page_tokens=128"}, {}, {});
  std::string reason;
  EXPECT_TRUE(
      mixed.WaitForReason("layout fingerprint (page_tokens?) differs", kStartPatience, &reason))
      << reason;
}

TEST_F(ClusterTest, StartsWithinTwoSecondsAndStopsOnSigterm) {
  const absl::Time start = absl::Now();
  Cluster fresh({}, {}, {});
  std::string reason;
  ASSERT_TRUE(fresh.WaitUntilReady(kStartPatience, &reason)) << reason;
  // Generous: the machine that runs the tests is busy with others.
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  ::testing::Test::RecordProperty("ready_ms",
                                  static_cast<int>(absl::ToInt64Milliseconds(absl::Now() - start)));
  for (testing::ServerProgram* program :
       {fresh.router.get(), fresh.prefill.get(), fresh.decode.get()}) {
    program->Signal(SIGTERM);
    EXPECT_EQ(program->WaitForExit(absl::Seconds(10)), 0) << program->Log();
    EXPECT_THAT(program->Log(), HasSubstr("\"msg\":\"stopped\""));
  }
}

TEST_F(ClusterTest, ALostDecodeWorkerIsUnavailableAndItsSuccessorServes) {
  Cluster own({}, {}, {});
  std::string reason;
  ASSERT_TRUE(own.WaitUntilReady(kStartPatience, &reason)) << reason;
  own.decode->Signal(SIGKILL);
  EXPECT_EQ(own.decode->WaitForExit(absl::Seconds(10)), 128 + SIGKILL);
  const absl::Status status =
      own.client->Generate(TokensOf(3, 1), kReplyPatience, [](const v1::TokenDelta&) {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  testing::ServerProgram successor(
      ISTHMUS_DECODE_BINARY, "successor", own.folder.path(),
      {std::string("checkpoint=") + kCheckpoint, "listen=" + own.decode_address});
  ASSERT_NE(successor.WaitForAddress(kStartPatience), "") << successor.Log();
  ASSERT_TRUE(own.WaitUntilReady(kStartPatience, &reason)) << reason;
  const auto finish =
      own.client->Generate(TokensOf(300, 8), kReplyPatience, [](const v1::TokenDelta&) {});
  EXPECT_TRUE(finish.ok()) << finish.status();
}

TEST(ProgramsTest, EveryProgramHasVersionHelpAndConfig) {
  const std::string examples = ISTHMUS_SOURCE_DIR "/deploy/examples/";
  const std::pair<std::string, std::string> programs[] = {
      {ISTHMUS_ROUTER_BINARY, examples + "router.json"},
      {ISTHMUS_PREFILL_BINARY, examples + "prefill.json"},
      {ISTHMUS_DECODE_BINARY, examples + "decode.json"}};
  for (const auto& [binary, example] : programs) {
    const testing::ProgramOutput version = testing::RunProgram(binary, {"--version"});
    EXPECT_EQ(version.exit_code, 0);
    EXPECT_THAT(version.out, HasSubstr("protocol 1"));
    EXPECT_EQ(testing::RunProgram(binary, {"--help"}).exit_code, 0);
    const testing::ProgramOutput config =
        testing::RunProgram(binary, {"--config", example, "--print-config"});
    EXPECT_EQ(config.exit_code, 0) << example;
    const Json printed = Json::parse(config.out, nullptr, false);
    ASSERT_TRUE(printed.is_object());
    EXPECT_EQ(printed["checkpoint"], "tests/golden/tiny-recall");
    EXPECT_EQ(testing::RunProgram(binary, {"--set", "lisen=x"}).exit_code, 2);
    EXPECT_EQ(testing::RunProgram(binary, {"--set", "listen=127.0.0.1:0"}).exit_code, 2)
        << "no checkpoint is given";
  }
  EXPECT_THAT(testing::RunProgram(ISTHMUS_CTL_BINARY, {"--version"}).out, HasSubstr("isthmusctl "));
  EXPECT_EQ(testing::RunProgram(ISTHMUS_CTL_BINARY, {"unknown"}).exit_code, 2);
}

TEST_F(ClusterTest, TheToolPrintsTheParsedReplyAndTheStatus) {
  const testing::ProgramOutput chat = testing::RunProgram(
      ISTHMUS_CTL_BINARY, {"--server", cluster_->router_address, "chat", "--json", "--message",
                           "Remember that the harbor code for Lisbon is amber falcon. What is the "
                           "harbor code for Lisbon?"});
  ASSERT_EQ(chat.exit_code, 0);
  const Json reply = Json::parse(chat.out, nullptr, false);
  ASSERT_TRUE(reply.is_object()) << chat.out;
  EXPECT_EQ(reply["role"], "assistant");
  EXPECT_EQ(reply["finish_reason"], "stop");
  EXPECT_GT(reply["transfer"]["digests_verified"].get<int>(), 0);
  EXPECT_GT(reply["usage"]["completion_tokens"].get<int>(), 0);
  const testing::ProgramOutput status =
      testing::RunProgram(ISTHMUS_CTL_BINARY, {"--server", cluster_->router_address, "status"});
  EXPECT_EQ(status.exit_code, 0);
  EXPECT_THAT(status.out, HasSubstr("ready"));
}

}  // namespace
}  // namespace isthmus
