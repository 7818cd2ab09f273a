// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/supervisor.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace isthmus::rpc {
namespace {

// A datagram socket where a service manager would listen, named in NOTIFY_SOCKET while it lives.
class ListeningSupervisor {
 public:
  ListeningSupervisor() : path_(testing::TempDir() + "notify." + std::to_string(getpid())) {
    fd_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
    is_bound_ = bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    const timeval patience = {/*tv_sec=*/2, /*tv_usec=*/0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setenv("NOTIFY_SOCKET", path_.c_str(), /*overwrite=*/1);
  }
  ~ListeningSupervisor() {
    unsetenv("NOTIFY_SOCKET");
    close(fd_);
    unlink(path_.c_str());
  }
  ListeningSupervisor(const ListeningSupervisor&) = delete;
  ListeningSupervisor& operator=(const ListeningSupervisor&) = delete;

  bool is_bound() const { return is_bound_; }

  // The next message, or "nothing" after two seconds.
  std::string Next() {
    char text[2048];
    const ssize_t size = recv(fd_, text, sizeof(text), 0);
    return size < 0 ? "nothing" : std::string(text, static_cast<size_t>(size));
  }

 private:
  const std::string path_;
  int fd_ = -1;
  bool is_bound_ = false;
};

TEST(SupervisorTest, TellsThatItIsReadyInOneMessage) {
  ListeningSupervisor supervisor;
  ASSERT_TRUE(supervisor.is_bound());

  NotifyReady("serves on 127.0.0.1:7101");

  EXPECT_EQ(supervisor.Next(), "READY=1\nSTATUS=serves on 127.0.0.1:7101");
}

TEST(SupervisorTest, LetsNoStatusBeginAnotherAssignment) {
  ListeningSupervisor supervisor;
  ASSERT_TRUE(supervisor.is_bound());

  NotifyReady("one\nSTOPPING=1");

  EXPECT_EQ(supervisor.Next(), "READY=1\nSTATUS=one STOPPING=1");
}

TEST(SupervisorTest, CutsALongStatus) {
  ListeningSupervisor supervisor;
  ASSERT_TRUE(supervisor.is_bound());

  NotifyReady(std::string(100000, 'x'));

  EXPECT_EQ(supervisor.Next(), "READY=1\nSTATUS=" + std::string(512, 'x'));
}

TEST(SupervisorTest, TellsThatItDrainsAndThatItLives) {
  ListeningSupervisor supervisor;
  ASSERT_TRUE(supervisor.is_bound());

  NotifyAlive();
  NotifyStopping();

  EXPECT_EQ(supervisor.Next(), "WATCHDOG=1");
  EXPECT_EQ(supervisor.Next(), "STOPPING=1\nSTATUS=draining");
}

TEST(SupervisorTest, DoesNothingWithoutAManager) {
  unsetenv("NOTIFY_SOCKET");
  NotifyReady("serves");
  NotifyAlive();
  NotifyStopping();

  // A manager that has gone away leaves a path that nobody listens on.
  setenv("NOTIFY_SOCKET", (testing::TempDir() + "nobody").c_str(), /*overwrite=*/1);
  NotifyReady("serves");
  NotifyAlive();
  unsetenv("NOTIFY_SOCKET");
}

}  // namespace
}  // namespace isthmus::rpc
