// SPDX-License-Identifier: Apache-2.0
// What a user meets first: the programs, their tool, start and stop, and what is refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "services/base/version.h"
#include "tests/integration/cluster.h"
#include "tests/integration/running_request.h"

namespace isthmus::testing {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

// One cluster with the bundled model for all tests.
class FrontTest : public SharedClusterTest<FrontTest> {
 public:
  static ClusterOptions Options() { return {}; }

 protected:
  static v1::ChatRequest ChatOf(const Json& messages) {
    v1::ChatRequest request;
    request.set_conversation_json(Json{{"messages", messages}}.dump());
    return request;
  }
  static absl::Status StatusOfChat(const v1::ChatRequest& request) {
    return cluster_->client().Chat(request, kReplyPatience, [](const v1::TokenDelta&) {}).status();
  }
  static absl::Status StatusOfGenerate(const v1::GenerateRequest& request) {
    return cluster_->client()
        .Generate(request, kReplyPatience, [](const v1::TokenDelta&) {})
        .status();
  }
};

TEST_F(FrontTest, RefusesBadInputByTheNameOfItsField) {
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
  generate = RequestOf(3, 0);
  expect(StatusOfGenerate(generate), "sampling.max_output_tokens");
  generate = RequestOf(3, 1);
  generate.mutable_token_ids()->add_ids(100000);
  expect(StatusOfGenerate(generate), "token 3 has id 100000");
  expect(StatusOfGenerate(RequestOf(70000, 1)), "prompt: has 70000 tokens, want at most");
  generate = v1::GenerateRequest();
  generate.set_text("caf\xc3");
  expect(StatusOfGenerate(generate), "UTF-8");
}

TEST(LimitsTest, ConcurrentRequestsAreAnsweredOrRefusedInABoundedWay) {
  ClusterOptions options;
  options.router = {"max_active_requests=1", "max_queued_requests=2"};
  Cluster narrow(options);
  ASSERT_TRUE(narrow.WaitUntilReady());
  std::vector<std::unique_ptr<RunningRequest>> requests;
  for (int i = 0; i < 8; ++i) {
    requests.push_back(
        std::make_unique<RunningRequest>(narrow.router().address(), RequestOf(600, 16)));
  }
  int num_ok = 0;
  int num_refused = 0;
  for (const auto& request : requests) {
    const absl::Status status = request->Wait();
    num_ok += status.ok() ? 1 : 0;
    num_refused += absl::IsResourceExhausted(status) ? 1 : 0;
  }
  EXPECT_EQ(num_ok + num_refused, 8);
  EXPECT_GE(num_ok, 3);
  EXPECT_GE(num_refused, 1);
}

TEST(StartTest, StartsWithinTwoSecondsAndStopsOnSigterm) {
  const absl::Time start = absl::Now();
  Cluster fresh{ClusterOptions()};
  ASSERT_TRUE(fresh.WaitUntilReady());
  // Generous: the machine that runs the tests is busy with others.
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  RecordProperty("ready_ms", static_cast<int>(absl::ToInt64Milliseconds(absl::Now() - start)));
  for (const Role role : {Role::kRouter, Role::kPrefill, Role::kDecode}) {
    ServerProgram& program = fresh.member(role).program();
    program.Signal(SIGTERM);
    EXPECT_EQ(program.WaitForExit(absl::Seconds(10)), 0) << program.Log();
    EXPECT_THAT(program.Log(), HasSubstr("\"msg\":\"stopped\""));
  }
}

// User and system time of a process so far.
absl::Duration ProcessorTime(const ServerProgram& program) {
  std::ifstream file(absl::StrCat("/proc/", program.pid(), "/stat"));
  const std::string text(std::istreambuf_iterator<char>(file), {});
  // After the name, which ends with the last ')': state, then fields 4 on; 14 and 15 are ours.
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string skipped;
  for (int field = 3; field < 14; ++field) fields >> skipped;
  int64_t user = 0;
  int64_t system = 0;
  fields >> user >> system;
  return absl::Seconds(1) * static_cast<double>(user + system) /
         static_cast<double>(sysconf(_SC_CLK_TCK));
}

TEST(StartTest, AnIdleClusterTakesLessThanATwentiethOfACore) {
  Cluster idle{ClusterOptions()};
  ASSERT_TRUE(idle.WaitUntilReady());
  const auto spent = [&idle] {
    absl::Duration sum;
    for (const Role role : {Role::kRouter, Role::kPrefill, Role::kDecode}) {
      sum += ProcessorTime(idle.member(role).program());
    }
    return sum;
  };
  const absl::Duration before = spent();
  const absl::Time start = absl::Now();
  absl::SleepFor(absl::Seconds(3));
  const double share = absl::FDivDuration(spent() - before, absl::Now() - start);
  EXPECT_GT(absl::ToDoubleSeconds(before), 0);
  EXPECT_LT(share, 0.05);
  RecordProperty("per_mille_of_a_core", static_cast<int>(share * 1000));
}

TEST(ProgramsTest, EveryProgramHasVersionHelpAndConfig) {
  const std::string examples = ISTHMUS_SOURCE_DIR "/deploy/examples/";
  const std::pair<std::string, std::string> programs[] = {
      {ISTHMUS_ROUTER_BINARY, examples + "router.json"},
      {ISTHMUS_PREFILL_BINARY, examples + "prefill.json"},
      {ISTHMUS_DECODE_BINARY, examples + "decode.json"}};
  for (const auto& [binary, example] : programs) {
    const ProgramOutput version = RunProgram(binary, {"--version"});
    EXPECT_EQ(version.exit_code, 0);
    EXPECT_THAT(version.out, HasSubstr(absl::StrCat("protocol ", kProtocolVersion)));
    EXPECT_EQ(RunProgram(binary, {"--help"}).exit_code, 0);
    const ProgramOutput config = RunProgram(binary, {"--config", example, "--print-config"});
    EXPECT_EQ(config.exit_code, 0) << example;
    const Json printed = Json::parse(config.out, nullptr, false);
    ASSERT_TRUE(printed.is_object());
    EXPECT_EQ(printed["checkpoint"], "tests/golden/tiny-recall");
    EXPECT_EQ(RunProgram(binary, {"--set", "lisen=x"}).exit_code, 2);
    EXPECT_EQ(RunProgram(binary, {"--set", "listen=127.0.0.1:0"}).exit_code, 2)
        << "no checkpoint is given";
  }
  EXPECT_THAT(RunProgram(ISTHMUS_CTL_BINARY, {"--version"}).out, HasSubstr("isthmusctl "));
  EXPECT_EQ(RunProgram(ISTHMUS_CTL_BINARY, {"unknown"}).exit_code, 2);
}

TEST_F(FrontTest, TheToolPrintsTheParsedReplyAndTheStatus) {
  const ProgramOutput chat = RunProgram(
      ISTHMUS_CTL_BINARY, {"--server", cluster_->router().address(), "chat", "--json", "--message",
                           "Remember that the harbor code for Lisbon is amber falcon. What is the "
                           "harbor code for Lisbon?"});
  ASSERT_EQ(chat.exit_code, 0);
  const Json reply = Json::parse(chat.out, nullptr, false);
  ASSERT_TRUE(reply.is_object()) << chat.out;
  EXPECT_EQ(reply["role"], "assistant");
  EXPECT_EQ(reply["finish_reason"], "stop");
  EXPECT_GT(reply["transfer"]["digests_verified"].get<int>(), 0);
  EXPECT_GT(reply["usage"]["completion_tokens"].get<int>(), 0);
  const ProgramOutput status =
      RunProgram(ISTHMUS_CTL_BINARY, {"--server", cluster_->router().address(), "status"});
  EXPECT_EQ(status.exit_code, 0);
  EXPECT_THAT(status.out, HasSubstr("ready"));
}

}  // namespace
}  // namespace isthmus::testing
