// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/program_under_test.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/time/clock.h"
#include "services/base/check.h"

extern char** environ;

namespace isthmus::testing {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(5);

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

pid_t Spawn(const std::vector<std::string>& command, int fd, const std::string& path) {
  std::vector<char*> arguments;
  for (const std::string& argument : command)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, fd, path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t pid = -1;
  const int failed =
      posix_spawn(&pid, command[0].c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  return failed == 0 ? pid : -1;
}

// The exit code of a child that has ended.
std::optional<int> Reap(pid_t pid) {
  int state = 0;
  if (waitpid(pid, &state, WNOHANG) != pid) return std::nullopt;
  return WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  std::string path = std::filesystem::temp_directory_path() / "isthmus-test-XXXXXX";
  ISTHMUS_CHECK(mkdtemp(path.data()) != nullptr);
  path_ = path;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

ServerProgram::ServerProgram(const std::string& binary, const std::string& name,
                             const std::string& folder, const std::vector<std::string>& assignments)
    : log_path_(folder + "/" + name + ".log"), address_path_(folder + "/" + name + ".address") {
  std::vector<std::string> command = {binary, "--set", "listen=127.0.0.1:0", "--set",
                                      "address_file=" + address_path_};
  for (const std::string& assignment : assignments) {
    command.push_back("--set");
    command.push_back(assignment);
  }
  pid_ = Spawn(command, STDERR_FILENO, log_path_);
}

ServerProgram::~ServerProgram() {
  if (pid_ <= 0 || exit_code_.has_value()) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::string ServerProgram::WaitForAddress(absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  while (absl::Now() < deadline && !WaitForExit(absl::ZeroDuration()).has_value()) {
    std::string text = ReadFile(address_path_);
    if (!text.empty() && text.back() == '\n') {
      text.pop_back();
      return text;
    }
    absl::SleepFor(kPoll);
  }
  return "";
}

void ServerProgram::Signal(int signal) {
  if (pid_ > 0 && !exit_code_.has_value()) kill(pid_, signal);
}

std::optional<int> ServerProgram::WaitForExit(absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  while (!exit_code_.has_value() && pid_ > 0) {
    exit_code_ = Reap(pid_);
    if (exit_code_.has_value() || absl::Now() >= deadline) break;
    absl::SleepFor(kPoll);
  }
  return exit_code_;
}

std::string ServerProgram::Log() const { return ReadFile(log_path_); }

ClientProgram::ClientProgram(const std::string& binary, const std::string& folder,
                             const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {binary};
  command.insert(command.end(), arguments.begin(), arguments.end());
  pid_ = Spawn(command, STDOUT_FILENO, folder + "/client.out");
}

void ClientProgram::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

ProgramOutput RunProgram(const std::string& binary, const std::vector<std::string>& arguments) {
  const TemporaryFolder folder;
  const std::string out_path = folder.path() + "/stdout";
  std::vector<std::string> command = {binary};
  command.insert(command.end(), arguments.begin(), arguments.end());
  ProgramOutput output;
  const pid_t pid = Spawn(command, STDOUT_FILENO, out_path);
  if (pid <= 0) return output;
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  std::optional<int> code;
  while (!code.has_value() && absl::Now() < deadline) {
    code = Reap(pid);
    if (!code.has_value()) absl::SleepFor(kPoll);
  }
  if (!code.has_value()) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  output.exit_code = code.value_or(-1);
  output.out = ReadFile(out_path);
  return output;
}

}  // namespace isthmus::testing
