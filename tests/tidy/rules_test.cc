// SPDX-License-Identifier: Apache-2.0
// The rules find what they forbid: each gets a bad snippet and must point at it, and a good one and
// must be silent. Snippets are built from halves where the real rules would find them here.
#include "tests/tidy/rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/tidy/source_tree.h"

namespace isthmus::tidy {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kSpdx[] = "// SPDX-License-Identifier: Apache-2.0\n";

SourceFile File(std::string path, const std::string& text) {
  SourceFile file;
  file.path = std::move(path);
  file.lines = absl::StrSplit(text, '\n');
  return file;
}

SourceTree TreeOf(std::string path, const std::string& text) {
  return SourceTree({File(std::move(path), text)});
}

// The quotes would be an include of this file.
std::string Include(const std::string& path) { return absl::StrCat("#include \"", path, "\""); }

TEST(CodeOnlyTest, BlanksCommentsAndLiteralsAndKeepsColumns) {
  const std::vector<std::string> code =
      CodeOnly(File("a.cc", "f(\"x\\\"y\"); // g()\na /* b\nc */ d\nconst int n = 1'000;"));
  EXPECT_EQ(code[0], "f(\"    \");       ");
  EXPECT_EQ(code[1], "a     ");
  EXPECT_EQ(code[2], "     d");
  EXPECT_EQ(code[3], "const int n = 1'000;");
}

TEST(CodeOnlyTest, BlanksRawStringsOverLines) {
  const std::string open = "s = R\"(a";
  const std::vector<std::string> code = CodeOnly(File("a.cc", open + "\nrand()\nb)\"; rand();"));
  EXPECT_FALSE(HasCall(code[1], "rand"));
  EXPECT_TRUE(HasCall(code[2], "rand"));
}

TEST(IncludeArrowsTest, RefusesUpwardIncludes) {
  const auto findings =
      CheckIncludeArrows(TreeOf("kernels/rope/rope.cc", Include("services/model/forward.h")));
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_EQ(findings[0].line, 1);
  EXPECT_THAT(findings[0].message, HasSubstr("layer 30"));
}

TEST(IncludeArrowsTest, RefusesSidewaysIncludes) {
  EXPECT_THAT(CheckIncludeArrows(TreeOf("kernels/rope/rope.cc", Include("kernels/gate/gate.h"))),
              SizeIs(1));
  EXPECT_THAT(CheckIncludeArrows(TreeOf("router/place.cc", Include("services/worker/worker.h"))),
              SizeIs(1));
  EXPECT_THAT(CheckIncludeArrows(TreeOf("services/base/log.cc", Include("proto/cluster.pb.h"))),
              SizeIs(1));
}

TEST(IncludeArrowsTest, RefusesLowerLayersThatTheRowDoesNotName) {
  EXPECT_THAT(CheckIncludeArrows(TreeOf("router/place.cc", Include("services/kv/page_pool.h"))),
              SizeIs(1));
  EXPECT_THAT(CheckIncludeArrows(TreeOf("services/model/forward.cc", Include("services/kv/a.h"))),
              SizeIs(1));
}

TEST(IncludeArrowsTest, AllowsDownwardIncludesAndTestInputs) {
  EXPECT_THAT(CheckIncludeArrows(TreeOf("services/engine/step.cc", Include("services/kv/a.h"))),
              IsEmpty());
  EXPECT_THAT(CheckIncludeArrows(TreeOf("kernels/rope/rope.cc", Include("kernels/rope/rope.h"))),
              IsEmpty());
  const std::string testing = Include("kernels/testing/compare.h");
  EXPECT_THAT(CheckIncludeArrows(TreeOf("kernels/core/quantise_test.cc", testing)), IsEmpty());
  EXPECT_THAT(CheckIncludeArrows(TreeOf("kernels/rope/rope.cc", testing)), SizeIs(1));
}

TEST(IncludeArrowsTest, KnowsHeadersThatTestsShare) {
  const SourceFile cases = File("kernels/rope/cases.h", Include("kernels/testing/inputs.h"));
  const std::string user = Include("kernels/rope/cases.h");
  EXPECT_THAT(CheckIncludeArrows(SourceTree({cases, File("kernels/rope/rope_test.cc", user)})),
              IsEmpty());
  EXPECT_THAT(CheckIncludeArrows(SourceTree({cases, File("kernels/rope/rope.cc", user)})),
              SizeIs(1));
}

TEST(IncludeArrowsTest, RefusesAFolderOutsideTheTable) {
  EXPECT_THAT(CheckIncludeArrows(TreeOf("services/extra/a.cc", "int a;")), SizeIs(1));
}

TEST(CMakeLayersTest, ComparesTheNumberWithTheFolder) {
  const std::string wrong = "isthmus_library(isthmus_rope\n  LAYER 10\n  SRCS rope.cc\n  DEPS x)";
  const std::string right = "isthmus_library(isthmus_rope\n  LAYER 20\n  SRCS rope.cc\n  DEPS x)";
  EXPECT_THAT(CheckCMakeLayers(TreeOf("kernels/rope/CMakeLists.txt", wrong)), SizeIs(1));
  EXPECT_THAT(CheckCMakeLayers(TreeOf("kernels/rope/CMakeLists.txt", right)), IsEmpty());
}

TEST(CMakeLayersTest, LetsAProgramStandAboveItsLibrary) {
  const std::string program = "isthmus_program(isthmus-diag\n  LAYER 70\n  SRCS diag_main.cc)";
  EXPECT_THAT(CheckCMakeLayers(TreeOf("services/diag/CMakeLists.txt", program)), IsEmpty());
  const std::string low = "isthmus_program(isthmus-diag\n  LAYER 60\n  SRCS diag_main.cc)";
  EXPECT_THAT(CheckCMakeLayers(TreeOf("services/diag/CMakeLists.txt", low)), SizeIs(1));
}

TEST(OrphanSourcesTest, FindsASourceNobodyBuilds) {
  const SourceFile list = File("router/CMakeLists.txt", "SRCS place.cc http/parse.cc");
  EXPECT_THAT(CheckNoOrphanSources(SourceTree({list, File("router/place.cc", "")})), IsEmpty());
  EXPECT_THAT(CheckNoOrphanSources(SourceTree({list, File("router/http/parse.cc", "")})),
              IsEmpty());
  EXPECT_THAT(CheckNoOrphanSources(SourceTree({list, File("router/accept.cc", "")})), SizeIs(1));
}

TEST(LengthsTest, CountsLinesAndCharacters) {
  EXPECT_THAT(CheckLengths(TreeOf("a.cc", std::string(101, 'x'))), SizeIs(1));
  std::string accents;
  for (int i = 0; i < 100; ++i) accents += "\xC3\xA9";
  EXPECT_THAT(CheckLengths(TreeOf("a.cc", accents)), IsEmpty());
  EXPECT_THAT(CheckLengths(TreeOf("a.cc", std::string(499, '\n'))), SizeIs(1));
  EXPECT_THAT(CheckLengths(TreeOf("a.cc", std::string(498, '\n'))), IsEmpty());
}

TEST(FileHeadsTest, WantsLicencePurposeAndGuard) {
  EXPECT_THAT(CheckFileHeads(TreeOf("a.cc", "int a;")), SizeIs(1));
  EXPECT_THAT(CheckFileHeads(TreeOf("a.h", absl::StrCat(kSpdx, "#pragma once"))), SizeIs(1));
  EXPECT_THAT(CheckFileHeads(TreeOf("a.h", absl::StrCat(kSpdx, "// Says."))), SizeIs(1));
  EXPECT_THAT(CheckFileHeads(TreeOf("a.h", absl::StrCat(kSpdx, "// Says.\n#pragma once"))),
              IsEmpty());
}

TEST(UnfinishedWordsTest, WantsAnIssue) {
  const std::string word = absl::StrCat("TO", "DO");
  EXPECT_THAT(CheckUnfinishedWords(TreeOf("a.cc", "// " + word + ": later")), SizeIs(1));
  EXPECT_THAT(CheckUnfinishedWords(TreeOf("a.cc", "// " + word + "(#12): later")), IsEmpty());
}

TEST(MachinePathsTest, FindsPathsThatStartAtTheRoot) {
  const std::string path = absl::StrCat("/wo", "rk/main");
  EXPECT_THAT(CheckNoMachinePaths(TreeOf("a.md", "see " + path)), SizeIs(1));
  EXPECT_THAT(CheckNoMachinePaths(TreeOf("a.md", "see net" + path)), IsEmpty());
}

TEST(NamesTest, FindsBannedWordsInFilesFoldersAndTypes) {
  EXPECT_THAT(CheckNames(TreeOf("router/string_utils.cc", "")), SizeIs(1));
  EXPECT_THAT(CheckNames(TreeOf("services/common/a.cc", "")), SizeIs(1));
  EXPECT_THAT(CheckNames(TreeOf("kernels/core/tensor.h", "")), IsEmpty());
  EXPECT_THAT(CheckNames(TreeOf("a.cc", "class PageManager final {")), SizeIs(1));
  EXPECT_THAT(CheckNames(TreeOf("a.cc", "enum class OldState : int {")), SizeIs(1));
  EXPECT_THAT(CheckNames(TreeOf("a.cc", "// class PageManager")), IsEmpty());
  EXPECT_THAT(CheckNames(TreeOf("a.cc", "struct Database {")), IsEmpty());
}

TEST(BannedCallsTest, FindsCallsAndNamesTheReplacement) {
  const auto findings = CheckBannedCalls(TreeOf("router/a.cc", "x = std::getenv(name);"));
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_THAT(findings[0].message, HasSubstr("config"));
  EXPECT_THAT(CheckBannedCalls(TreeOf("router/a_test.cc", "x = std::getenv(name);")), IsEmpty());
  EXPECT_THAT(CheckBannedCalls(TreeOf("a.cc", absl::StrCat("ass", "ert(x);"))), SizeIs(1));
  EXPECT_THAT(CheckBannedCalls(TreeOf("a.cc", "static_assert(sizeof(x) == 4);")), IsEmpty());
  EXPECT_THAT(CheckBannedCalls(TreeOf("a.cc", "std::snprintf(p, n, f);")), IsEmpty());
  EXPECT_THAT(CheckBannedCalls(TreeOf("a.cc", "brand(x); gen.rand(3); // rand()")), IsEmpty());
}

TEST(BannedCallsTest, KeepsLibmOutOfKernels) {
  EXPECT_THAT(CheckBannedCalls(TreeOf("kernels/gate/gate_cpu.cc", "y = std::exp(x);")), SizeIs(1));
  EXPECT_THAT(CheckBannedCalls(TreeOf("kernels/gate/gate_definition.cc", "y = std::exp(x);")),
              IsEmpty());
  EXPECT_THAT(CheckBannedCalls(TreeOf("kernels/gate/gate_cpu.cc", "y = Exp(x);")), IsEmpty());
  EXPECT_THAT(CheckBannedCalls(TreeOf("kernels/gate/gate_cpu.cc", "y = std::sqrt(x);")), IsEmpty());
}

TEST(CudaTest, KeepsKernelsWhereTheEmulatorCanFollow) {
  EXPECT_THAT(CheckCuda(TreeOf("kernels/gate/gate.cu", "#include <cuda_bf16.h>")), SizeIs(1));
  EXPECT_THAT(CheckCuda(TreeOf("kernels/gate/gate.cu", "Kernel<<<1, 32>>>(p);")), SizeIs(1));
  EXPECT_THAT(CheckCuda(TreeOf("kernels/gate/gate.cu", "asm volatile(\"bar.sync\");")), SizeIs(1));
  EXPECT_THAT(CheckCuda(TreeOf("kernels/gate/gate.cu", "s << a << b;  // <<< asm")), IsEmpty());
  EXPECT_THAT(CheckCuda(TreeOf("kernels/core/mma.cuh", "asm volatile(\"mma\");")), IsEmpty());
  EXPECT_THAT(CheckBannedCalls(TreeOf("kernels/gate/gate.cu", "cudaMalloc(&p, n);")), SizeIs(1));
  EXPECT_THAT(CheckBannedCalls(TreeOf("kernels/core/a.cc", "cudaMalloc(&p, n);")), IsEmpty());
  EXPECT_THAT(CheckBannedCalls(TreeOf("kernels/gate/a_test.cu", "cudaMalloc(&p, n);")), IsEmpty());
}

TEST(SkipsTest, WantReasons) {
  const std::string skip = absl::StrCat("GTEST_", "SKIP()");
  EXPECT_THAT(CheckSkips(TreeOf("a.cc", skip + ";")), SizeIs(1));
  EXPECT_THAT(CheckSkips(TreeOf("a.cc", skip + " << why;")), IsEmpty());
  EXPECT_THAT(CheckSkips(TreeOf("a.cc", absl::StrCat("TEST(A, DISA", "BLED_B) {"))), SizeIs(1));
}

TEST(DocumentsTest, LimitLengthsAndFindUnlinkedRecords) {
  EXPECT_THAT(CheckDocuments(TreeOf("README.md", std::string(150, '\n'))), SizeIs(1));
  EXPECT_THAT(CheckDocuments(TreeOf("README.md", std::string(149, '\n'))), IsEmpty());
  EXPECT_THAT(CheckDocuments(TreeOf("router/README.md", std::string(60, '\n'))), SizeIs(1));
  const SourceFile record = File("kernels/decisions/0001-order.md", "Order");
  EXPECT_THAT(CheckDocuments(SourceTree({record})), SizeIs(1));
  EXPECT_THAT(CheckDocuments(SourceTree({record, File("a.cc", "// 0001-order.md")})), IsEmpty());
}

TEST(NamedPathsTest, FindsWhatDoesNotExist) {
  const SourceFile place = File("router/place.cc", "");
  const auto with = [&](const std::string& text) {
    return CheckNamedPaths(SourceTree({place, File("README.md", text)}));
  };
  EXPECT_THAT(with("see `router/place.cc` and `router/`, not `KvHandoff`"), IsEmpty());
  EXPECT_THAT(with("see `router/accept.cc`"), SizeIs(1));
  EXPECT_THAT(with("see `route/`"), SizeIs(1));
  EXPECT_THAT(with("see `kernels/<operation>/`"), IsEmpty());
}

TEST(FuzzSeedsTest, WantAFolderOfTheTarget) {
  const SourceFile target = File("services/text/reply_fuzz.cc", "");
  EXPECT_THAT(CheckFuzzSeeds(SourceTree({target})), SizeIs(1));
  EXPECT_THAT(CheckFuzzSeeds(SourceTree({target, File("services/text/fuzz_seeds/reply/a", "")})),
              IsEmpty());
}

TEST(RegistriesTest, WantUnitsHelpTestsAndRecords) {
  EXPECT_THAT(CheckRegistries(TreeOf("router/a.h",
                                     "inline constexpr MetricSpec kA = {\n"
                                     "    .name = \"isthmus_router_wait\", .help = \"\"};")),
              SizeIs(2));
  EXPECT_THAT(CheckRegistries(TreeOf("router/a.h",
                                     "inline constexpr MetricSpec kA = {\n"
                                     "    .name = \"isthmus_router_wait_seconds\",\n"
                                     "    .help =\n        \"Time a request waits.\"};")),
              IsEmpty());
  EXPECT_THAT(CheckRegistries(TreeOf("kernels/a/a.cc",
                                     "constexpr Patch kA = {\n    .name = \"a.b\",\n"
                                     "    .summary = \"Says what it changes.\",\n"
                                     "    .test = \"ATest\",\n    .decision = \"none.md\"};")),
              SizeIs(2));
  EXPECT_THAT(CheckRegistries(TreeOf("router/a.h", "    visit(\"port\", port, Range{1, 2});")),
              SizeIs(1));
}

TEST(ListsCompleteTest, FolderMustBeInItsList) {
  const SourceFile folder = File("kernels/rope/CMakeLists.txt", "");
  EXPECT_THAT(CheckListsComplete(SourceTree({folder})), SizeIs(1));
  EXPECT_THAT(CheckListsComplete(SourceTree({folder, File("kernels/README.md", "| `rope` |")})),
              IsEmpty());
}

TEST(RunBitsTest, FindsAScriptThatCannotBeRun) {
  SourceFile script = File("deploy/demo", "#!/usr/bin/env bash");
  EXPECT_THAT(CheckRunBits(SourceTree({script})), SizeIs(1));
  script.executable = true;
  EXPECT_THAT(CheckRunBits(SourceTree({script})), IsEmpty());
}

}  // namespace
}  // namespace isthmus::tidy
