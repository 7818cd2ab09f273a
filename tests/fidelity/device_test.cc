// SPDX-License-Identifier: Apache-2.0
// Goal: the model on a GPU is the model on the CPU. Method: the same golden files; every tensor of
// a pass against the CPU's; and an engine whose decode steps are graphs with padding rows against
// one on the CPU, by digests of its logits. The trusted paths add in the CPU's order, so bits are
// compared. Runs in the emulator too, hence the few tokens.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "kernels/patches.h"
#include "kernels/testing/device.h"
#include "kernels/testing/golden_file.h"
#include "tests/fidelity/compare.h"
#include "tests/fidelity/models.h"

namespace isthmus::fidelity {
namespace {

using kernels::Arithmetic;

const char kModel[] = "tiny-random-3layer/nvfp4-cast";

EngineChoice OnDevice(Arithmetic arithmetic) {
  return {.checkpoint = BundledPath(kModel),
          .arithmetic = arithmetic,
          .device = "cuda:0",
          .patches = kernels::NoPatches()};
}
EngineChoice OnHost(Arithmetic arithmetic) {
  return {.checkpoint = BundledPath(kModel), .arithmetic = arithmetic};
}

class DeviceTest : public testing::TestWithParam<Arithmetic> {};

// Long enough that both compressors complete entries and that the index has to choose.
TEST_P(DeviceTest, EveryTensorHasTheBitsOfTheCpu) {
  ISTHMUS_REQUIRE_DEVICE();
  const std::vector<int32_t> ids = SeededIds(5, 131, 512);
  const DumpChoice choices[] = {{.decode_tokens = 4},
                                {.set = diag::DumpSet::kCache, .chunk_tokens = 70}};
  for (const DumpChoice& choice : choices) {
    // The emulator has time for one of them.
    const bool is_for_math = &choice == &choices[1];
    if (!kernels::IsRealDevice() && is_for_math != (GetParam() == Arithmetic::kMath)) continue;
    const auto want = DumpOf(OnHost(GetParam()), ids, choice);
    const auto got = DumpOf(OnDevice(GetParam()), ids, choice);
    ASSERT_TRUE(want.ok()) << want.status();
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_EQ(want->size(), got->size());
    for (const auto& [name, tensor] : *want) {
      EXPECT_EQ(tensor.shape, got->at(name).shape) << name;
      EXPECT_EQ(tensor.bytes, got->at(name).bytes) << name;
    }
  }
}

// Greedy replies and the digests of the logits behind every token, of prompts that run together.
std::vector<std::vector<uint32_t>> Replies(const EngineChoice& choice, int64_t num_sequences) {
  std::vector<std::vector<uint32_t>> replies;
  auto local = OpenEngine(choice);
  if (!local.ok()) {
    ADD_FAILURE() << local.status();
    return replies;
  }
  std::vector<engine::Sequence> sequences;
  std::vector<engine::Sequence*> running;
  for (int64_t i = 0; i < num_sequences; ++i) {
    engine::SamplingParams sampling;
    sampling.max_tokens = 4 + i;  // So that a bucket is left while others run on.
    sampling.wants_logits_digests = true;
    auto sequence = (*local)->engine().Admit(
        "device", SeededIds(static_cast<uint64_t>(i), 5 + 3 * i, 512), sampling);
    if (!sequence.ok()) {
      ADD_FAILURE() << sequence.status();
      return replies;
    }
    sequences.push_back(*std::move(sequence));
  }
  for (engine::Sequence& sequence : sequences) running.push_back(&sequence);
  while (!running.empty()) {
    const absl::Status status = (*local)->engine().Step(running);
    if (!status.ok()) {
      ADD_FAILURE() << status;
      return replies;
    }
    std::erase_if(running, [](const engine::Sequence* s) { return s->is_finished(); });
  }
  for (const engine::Sequence& sequence : sequences) {
    std::vector<uint32_t> reply(sequence.tokens.begin(), sequence.tokens.end());
    reply.insert(reply.end(), sequence.logits_crc32c.begin(), sequence.logits_crc32c.end());
    replies.push_back(std::move(reply));
  }
  return replies;
}

TEST_P(DeviceTest, GraphsWithPaddingRowsGiveTheRepliesOfTheCpu) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto want = Replies(OnHost(GetParam()), 3);
  const auto got = Replies(OnDevice(GetParam()), 3);
  EXPECT_EQ(want, got);
}

TEST_P(DeviceTest, LogitsAreWithinTheGoldenTolerances) {
  ISTHMUS_REQUIRE_DEVICE();
  const bool is_math = GetParam() == Arithmetic::kMath;
  if (is_math && !kernels::IsRealDevice()) GTEST_SKIP() << "the emulator is slow";
  const auto golden =
      ReadTensorSet(BundledPath(is_math ? "tiny-random-3layer/io/decode.math.safetensors"
                                        : "tiny-random-3layer/io/decode.ref.safetensors"));
  ASSERT_TRUE(golden.ok()) << golden.status();
  const auto dump = DumpOf(OnDevice(GetParam()), InputIds(*golden), {.decode_tokens = 10});
  ASSERT_TRUE(dump.ok()) << dump.status();
  const Comparison comparison = Compare(*golden, FromDump(*dump));
  EXPECT_TRUE(comparison.passed()) << comparison.Report();
}

// Everything on but what multiplies in less than the reference's precision on purpose.
std::map<std::string, bool> AllPatchesOn() {
  std::map<std::string, bool> patches;
  for (const Patch* patch : kernels::AllPatches()) {
    const bool is_narrow =
        patch->name == "hyper_connection.bf16" || patch->name == "hyper_connection.tf32" ||
        patch->name == "hyper_connection.bf16_hilo" || patch->name == "experts.grouped_w4a4";
    patches[std::string(patch->name)] = !is_narrow;
  }
  return patches;
}

// A failure names the patches without any one of which the rest stays within.
void ExpectWithinTheGoldenTolerances(const EngineChoice& choice, const std::string& golden_path,
                                     int64_t decode_tokens) {
  const auto golden = ReadTensorSet(golden_path);
  ASSERT_TRUE(golden.ok()) << golden.status();
  const auto compare = [&](const EngineChoice& one) {
    const auto dump = DumpOf(one, InputIds(*golden), {.decode_tokens = decode_tokens});
    EXPECT_TRUE(dump.ok()) << dump.status();
    return dump.ok() ? Compare(*golden, FromDump(*dump)) : Comparison{};
  };
  const Comparison comparison = compare(choice);
  EXPECT_TRUE(comparison.passed()) << comparison.Report();
  if (comparison.passed()) return;
  EngineChoice without = choice;
  for (auto& [name, is_on] : without.patches) {
    if (!is_on) continue;
    is_on = false;
    if (compare(without).passed()) ADD_FAILURE() << "within the tolerances without " << name;
    is_on = true;
  }
}

TEST(DevicePatchTest, AllTogetherStayWithinTheGoldenTolerances) {
  ISTHMUS_REQUIRE_DEVICE();
  if (!kernels::IsRealDevice()) GTEST_SKIP() << "the emulator is slow";
  EngineChoice choice = OnDevice(Arithmetic::kReference);
  choice.patches = AllPatchesOn();
  ExpectWithinTheGoldenTolerances(choice,
                                  BundledPath("tiny-random-3layer/io/decode.ref.safetensors"), 10);
}

// The random checkpoint, whose experts are NVFP4 and no casts, from end to end.
TEST(DevicePatchTest, TheRandomCheckpointStaysWithinTheGoldenTolerances) {
  ISTHMUS_REQUIRE_DEVICE();
  ISTHMUS_REQUIRE_GOLDEN();
  if (!kernels::IsRealDevice()) GTEST_SKIP() << "the emulator is slow";
  EngineChoice choice = OnDevice(Arithmetic::kReference);
  choice.checkpoint = kernels::testing::GoldenDir() + "/tiny-random-nvfp4";
  const std::string golden = choice.checkpoint + "/io/decode.ref.safetensors";
  ExpectWithinTheGoldenTolerances(choice, golden, 40);
  choice.patches = AllPatchesOn();
  ExpectWithinTheGoldenTolerances(choice, golden, 40);
}

INSTANTIATE_TEST_SUITE_P(Arithmetics, DeviceTest,
                         testing::Values(Arithmetic::kMath, Arithmetic::kReference),
                         [](const auto& param) {
                           return param.param == Arithmetic::kMath ? "math" : "reference";
                         });

}  // namespace
}  // namespace isthmus::fidelity
