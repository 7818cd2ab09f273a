// SPDX-License-Identifier: Apache-2.0
// The death of a writer's process in the middle of its writes, which its owner must survive: what
// has arrived by then is still worked off, towards a peer that is gone.
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "absl/time/clock.h"
#include "kvtransfer/testing/page_owner.h"
#include "services/base/clock.h"

extern char** environ;

namespace isthmus::transfer {
namespace {

using testing::PageOwner;
using testing::Pattern;

// The process id of a writer to `target`.
pid_t StartWriter(const v1::TransferEndpoint& target) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO);
  posix_spawn_file_actions_addclose(&actions, ends[1]);
  std::string name = ISTHMUS_WRITER_BINARY;
  char* argv[] = {name.data(), nullptr};
  pid_t pid = -1;
  EXPECT_EQ(posix_spawn(&pid, name.c_str(), &actions, nullptr, argv, environ), 0);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[0]);
  const std::string text = target.SerializeAsString();
  EXPECT_EQ(write(ends[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  close(ends[1]);
  return pid;
}

// Whether a fresh writer is served.
::testing::AssertionResult Serves(const PageOwner& owner, uint32_t seed) {
  auto writer = MakeUcxTransport({});
  if (!writer.ok()) return ::testing::AssertionFailure() << writer.status();
  const std::vector<std::byte> page = Pattern(testing::kPageBytes, seed);
  const PageSpan span = {page, 0, 1, 3};
  const absl::Status status =
      (*writer)->Write(owner.endpoint, {&span, 1}, RealClock().Now() + absl::Seconds(20));
  if (!status.ok()) return ::testing::AssertionFailure() << status;
  if (std::equal(page.begin(), page.end(), owner.page(3).begin())) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "the page did not arrive";
}

TEST(WriterDeathTest, InTheMiddleOfAWriteItsOwnerLivesAndServesTheNextWriter) {
  auto made = MakeUcxTransport({});
  ASSERT_TRUE(made.ok()) << made.status();
  PageOwner owner(*std::move(made));
  for (int round = 0; round < 8; ++round) {
    owner.Stop();
    owner.Forget();
    const pid_t writer = StartWriter(owner.endpoint);
    ASSERT_GT(writer, 0);
    const absl::Time patience = RealClock().Now() + absl::Seconds(20);
    while (!owner.has_changed() && RealClock().Now() < patience) {
      owner.Start();
      absl::SleepFor(absl::Milliseconds(10));
      owner.Stop();
    }
    EXPECT_TRUE(owner.has_changed());
    // Half of the time with much under way, half of the time with what there is.
    if (round % 2 == 1) owner.Start();
    absl::SleepFor(absl::Milliseconds(30));
    kill(writer, SIGKILL);
    EXPECT_EQ(waitpid(writer, nullptr, 0), writer);
    if (round % 2 == 0) owner.Start();
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_TRUE(Serves(owner, 2));
}

TEST(WriterDeathTest, WhileItConnectsItsOwnerLivesAndServesTheNextWriter) {
  auto made = MakeUcxTransport({});
  ASSERT_TRUE(made.ok()) << made.status();
  PageOwner owner(*std::move(made));
  for (int round = 0; round < 20; ++round) {
    const bool hangs = round % 2 == 0;
    if (hangs) owner.Stop();
    const pid_t writer = StartWriter(owner.endpoint);
    ASSERT_GT(writer, 0);
    absl::SleepFor(absl::Milliseconds(20 + 3 * round));
    kill(writer, SIGKILL);
    EXPECT_EQ(waitpid(writer, nullptr, 0), writer);
    if (hangs) owner.Start();
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_TRUE(Serves(owner, 3));
}

}  // namespace
}  // namespace isthmus::transfer
