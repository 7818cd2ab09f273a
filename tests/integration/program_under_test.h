// SPDX-License-Identifier: Apache-2.0
// Real programs as child processes: started with port 0, found by their address file, stopped by
// signal. Every wait is bounded.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace isthmus::testing {

// A folder that is removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A server program. Killed, if need be, when the object dies.
class ServerProgram {
 public:
  // `assignments` are --set arguments; listen=127.0.0.1:0 and the address file are added. stderr
  // goes to <folder>/<name>.log.
  ServerProgram(const std::string& binary, const std::string& name, const std::string& folder,
                const std::vector<std::string>& assignments);
  ~ServerProgram();
  ServerProgram(const ServerProgram&) = delete;
  ServerProgram& operator=(const ServerProgram&) = delete;

  // "host:port" once the program listens; empty when it does not within `patience` or has ended.
  std::string WaitForAddress(absl::Duration patience);

  void Signal(int signal);
  pid_t pid() const { return pid_; }

  // The exit code, 128 + signal for a killed program; nothing when it still runs after `patience`.
  std::optional<int> WaitForExit(absl::Duration patience);

  // What it has logged so far.
  std::string Log() const;

 private:
  const std::string log_path_;
  const std::string address_path_;
  pid_t pid_ = -1;
  std::optional<int> exit_code_;
};

// A client program in the background, for killing it. Killed, if need be, when the object dies.
class ClientProgram {
 public:
  // stdout goes to <folder>/client.out.
  ClientProgram(const std::string& binary, const std::string& folder,
                const std::vector<std::string>& arguments);
  ~ClientProgram() { Kill(); }
  ClientProgram(const ClientProgram&) = delete;
  ClientProgram& operator=(const ClientProgram&) = delete;

  // SIGKILL, and waits until it is gone.
  void Kill();

 private:
  pid_t pid_ = -1;
};

// Runs a program to its end, at most a minute. Exit code and what it wrote to stdout.
struct ProgramOutput {
  int exit_code = -1;
  std::string out;
};
ProgramOutput RunProgram(const std::string& binary, const std::vector<std::string>& arguments);

}  // namespace isthmus::testing
