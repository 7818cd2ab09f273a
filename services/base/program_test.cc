// SPDX-License-Identifier: Apache-2.0
#include "services/base/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/base/version.h"

namespace isthmus {
namespace {

struct SmallConfig {
  int32_t port = 1;
  std::string name;
  template <typename Visitor>
  void VisitFields(Visitor& visit) {
    visit("port", port, Range<int32_t>{0, 65535}, "The port.");
    visit("name", name, AnyValue{}, "A name.");
  }
};

std::optional<int> Start(SmallConfig& config, std::vector<const char*> arguments) {
  ConfigFields fields = ConfigFields::Of(config);
  arguments.insert(arguments.begin(), "isthmus-test");
  return StartProgram({"isthmus-test", "A test."}, fields, static_cast<int>(arguments.size()),
                      arguments.data());
}

TEST(ProgramTest, RunsWithTheLastAssignment) {
  SmallConfig config;
  EXPECT_EQ(Start(config, {"--set", "port=5", "--set", "port=6", "--set", "name=a b"}),
            std::nullopt);
  EXPECT_EQ(config.port, 6);
  EXPECT_EQ(config.name, "a b");
}

TEST(ProgramTest, ExitsWithTwoAfterBadInput) {
  SmallConfig config;
  testing::internal::CaptureStderr();
  EXPECT_EQ(Start(config, {"--set", "prt=5"}), 2);
  EXPECT_EQ(Start(config, {"--unknown"}), 2);
  EXPECT_EQ(Start(config, {"--config", "/nonexistent"}), 2);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), testing::HasSubstr("unknown key \"prt\""));
}

TEST(ProgramTest, PrintsTheEffectiveConfiguration) {
  SmallConfig config;
  testing::internal::CaptureStdout();
  EXPECT_EQ(Start(config, {"--set", "port=5", "--print-config"}), 0);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "{\n  \"port\": 5,\n  \"name\": \"\"\n}\n");
}

TEST(ProgramTest, PrintsWhatAProgramAddsFromItsConfiguration) {
  SmallConfig config;
  ConfigFields fields = ConfigFields::Of(config);
  const ProgramSpec spec = {
      "isthmus-test",
      "A test.",
      {{"--print-port", "Print the port and exit", [&config]() -> absl::StatusOr<std::string> {
          if (config.port == 0) return absl::InvalidArgumentError("port: is 0");
          if (config.port == 2) return absl::InternalError("a bug");
          return std::to_string(config.port) + "\n";
        }}}};
  const auto start = [&](const char* assignment) {
    const char* arguments[] = {"isthmus-test", "--print-port", "--set", assignment};
    return StartProgram(spec, fields, 4, arguments);
  };
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  EXPECT_EQ(start("port=5"), 0);
  EXPECT_EQ(start("port=0"), 2);
  EXPECT_EQ(start("port=2"), 1);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "5\n");
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "isthmus-test: port: is 0\nisthmus-test: a bug\n");
}

TEST(ProgramTest, PrintsASchemaOfTheFile) {
  SmallConfig config;
  testing::internal::CaptureStdout();
  EXPECT_EQ(Start(config, {"--print-config-schema"}), 0);
  EXPECT_THAT(testing::internal::GetCapturedStdout(),
              testing::ContainsRegex("\"minimum\": 0,\\s+\"maximum\": 65535"));
}

TEST(ProgramTest, VersionNamesProgramCommitAndProtocol) {
  SmallConfig config;
  testing::internal::CaptureStdout();
  EXPECT_EQ(Start(config, {"--version"}), 0);
  EXPECT_THAT(
      testing::internal::GetCapturedStdout(),
      testing::MatchesRegex(
          "isthmus-test [0-9]+\\.[0-9]+\\.[0-9]+ \\(commit [0-9a-z]+, protocol [0-9]+\\)\n"));
}

TEST(ProgramTest, HelpListsTheFields) {
  SmallConfig config;
  testing::internal::CaptureStdout();
  EXPECT_EQ(Start(config, {"--help"}), 0);
  EXPECT_THAT(testing::internal::GetCapturedStdout(),
              testing::HasSubstr("port (integer, 0 to 65535; default 1)"));
}

}  // namespace
}  // namespace isthmus
