// SPDX-License-Identifier: Apache-2.0
// sim_test [--first=K] [--seeds=N] [--seed=S [--trace]]: plays seeds K to K + N - 1, a block of
// them per test case; with --seed that one alone. A seed that fails is printed with the command
// that plays it again, also when the process dies of it.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "services/base/log.h"
#include "tests/sim/play.h"

namespace isthmus::sim {
namespace {

constexpr uint64_t kBlock = 50;
constexpr unsigned kRealSecondsPerSeed = 120;

std::string program;                // NOLINT(runtime/string): set once by main.
std::atomic<uint64_t> playing = 0;  // The seed; 0: none.

std::string ReplayCommand(uint64_t seed) {
  return absl::StrCat("replay: ", program, " --seed=", seed, " --trace\n");
}

// Says which seed the process dies of. snprintf and write alone, as a signal wants it.
void OnDeath(int signal) {
  char text[512];
  const int size = snprintf(text, sizeof(text), "signal %d in seed %llu\nreplay: %s --seed=%llu\n",
                            signal, static_cast<unsigned long long>(playing.load()),
                            program.c_str(), static_cast<unsigned long long>(playing.load()));
  [[maybe_unused]] const auto written =
      write(STDERR_FILENO, text, static_cast<size_t>(std::min<int>(size, sizeof(text) - 1)));
  ::signal(signal, SIG_DFL);
  raise(signal);
}

Outcome PlayGuarded(uint64_t seed, bool trace) {
  playing = seed;
  alarm(kRealSecondsPerSeed);
  Outcome outcome = Play(seed, trace);
  alarm(0);
  playing = 0;
  return outcome;
}

class SeedBlock : public testing::Test {
 public:
  SeedBlock(uint64_t first, uint64_t last, bool trace)
      : first_(first), last_(last), trace_(trace) {}

  void TestBody() override {
    int64_t num_steps = 0;
    uint64_t num_replies = 0;
    std::map<std::string, uint64_t> counts;
    for (uint64_t seed = first_; seed <= last_; ++seed) {
      const Outcome outcome = PlayGuarded(seed, trace_);
      num_steps += outcome.num_steps;
      num_replies += outcome.num_replies;
      for (const auto& [what, count] : outcome.counts) counts[what] += count;
      for (const std::string& violation : outcome.violations) {
        ADD_FAILURE() << "seed " << seed << ": " << violation << "\n" << ReplayCommand(seed);
      }
    }
    RecordProperty("steps", std::to_string(num_steps));
    RecordProperty("replies", std::to_string(num_replies));
    printf("%lld steps, %llu whole replies\n", static_cast<long long>(num_steps),
           static_cast<unsigned long long>(num_replies));
    for (const auto& [what, count] : counts) {
      printf("%10llu  %s\n", static_cast<unsigned long long>(count), what.c_str());
    }
  }

 private:
  const uint64_t first_;
  const uint64_t last_;
  const bool trace_;
};

// Every event of a seed is the same when it is played again.
class Replay : public testing::Test {
 public:
  void TestBody() override {
    for (const uint64_t seed : {3, 5, 11, 17, 42}) {
      const Outcome first = PlayGuarded(seed, false);
      const Outcome second = PlayGuarded(seed, false);
      EXPECT_EQ(first.trace_hash, second.trace_hash) << "seed " << seed;
      EXPECT_EQ(first.num_steps, second.num_steps) << "seed " << seed;
    }
  }
};

struct Flags {
  uint64_t first = 1;
  uint64_t num_seeds = 1000;
  uint64_t seed = 0;
  bool trace = false;
};

bool ReadFlag(absl::string_view argument, absl::string_view name, uint64_t* value) {
  return absl::ConsumePrefix(&argument, name) && absl::SimpleAtoi(argument, value);
}

bool ReadFlags(int argc, char** argv, Flags* flags) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument == "--trace") {
      flags->trace = true;
    } else if (!ReadFlag(argument, "--first=", &flags->first) &&
               !ReadFlag(argument, "--seeds=", &flags->num_seeds) &&
               !ReadFlag(argument, "--seed=", &flags->seed)) {
      fprintf(stderr, "unknown: %s\nusage: %s [--first=K] [--seeds=N] [--seed=S [--trace]]\n",
              argv[i], argv[0]);
      return false;
    }
  }
  return true;
}

void AddBlock(uint64_t first, uint64_t last, bool trace) {
  const std::string name = absl::StrCat("Seeds", first, "To", last);
  testing::RegisterTest("SimulationTest", name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                        [=]() -> testing::Test* { return new SeedBlock(first, last, trace); });
}

}  // namespace
}  // namespace isthmus::sim

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  isthmus::sim::program = argv[0];
  isthmus::sim::Flags flags;
  if (!isthmus::sim::ReadFlags(argc, argv, &flags)) return 2;
  for (const int signal : {SIGABRT, SIGSEGV, SIGALRM}) ::signal(signal, isthmus::sim::OnDeath);
  isthmus::SetUpLog("sim", flags.trace ? isthmus::LogLevel::kInfo : isthmus::LogLevel::kError);
  if (flags.seed != 0) {
    isthmus::sim::AddBlock(flags.seed, flags.seed, flags.trace);
    return RUN_ALL_TESTS();
  }
  testing::RegisterTest("SimulationTest", "ASeedIsTheSameWhenItIsPlayedAgain", nullptr, nullptr,
                        __FILE__, __LINE__,
                        []() -> testing::Test* { return new isthmus::sim::Replay; });
  const uint64_t end = flags.first + flags.num_seeds;
  for (uint64_t first = flags.first; first < end; first += isthmus::sim::kBlock) {
    isthmus::sim::AddBlock(first, std::min(first + isthmus::sim::kBlock, end) - 1, flags.trace);
  }
  return RUN_ALL_TESTS();
}
