// SPDX-License-Identifier: Apache-2.0
// The tree obeys its own rules. Each test is one rule over all files; a failure lists every place.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/tidy/rules.h"
#include "tests/tidy/source_tree.h"

namespace isthmus::tidy {
namespace {

const SourceTree& Tree() {
  static const SourceTree tree = ReadSourceTree(ISTHMUS_SOURCE_DIR);
  return tree;
}

// Success when a rule has no finding, else one line per place.
testing::AssertionResult Holds(const std::vector<Finding>& findings) {
  if (findings.empty()) return testing::AssertionSuccess();
  testing::AssertionResult failure = testing::AssertionFailure();
  failure << findings.size() << " finding(s):";
  for (const Finding& finding : findings) failure << "\n" << ToString(finding);
  return failure;
}

TEST(TidyTest, TheTreeIsSeen) {
  ASSERT_NE(Tree().Find("CMakeLists.txt"), nullptr);
  ASSERT_NE(Tree().Find("services/base/mutex.h"), nullptr);
  EXPECT_NE(Tree().Find(".ci/run"), nullptr);
  EXPECT_GT(Tree().files().size(), 100u);
}

TEST(TidyTest, IncludesFollowTheLayers) { EXPECT_TRUE(Holds(CheckIncludeArrows(Tree()))); }
TEST(TidyTest, CMakeNamesTheLayersOfTheFolders) { EXPECT_TRUE(Holds(CheckCMakeLayers(Tree()))); }
TEST(TidyTest, EverySourceIsBuilt) { EXPECT_TRUE(Holds(CheckNoOrphanSources(Tree()))); }
TEST(TidyTest, FilesAndLinesAreShort) { EXPECT_TRUE(Holds(CheckLengths(Tree()))); }
TEST(TidyTest, FilesOpenWithLicenceAndPurpose) { EXPECT_TRUE(Holds(CheckFileHeads(Tree()))); }
TEST(TidyTest, UnfinishedWorkNamesItsIssue) { EXPECT_TRUE(Holds(CheckUnfinishedWords(Tree()))); }
TEST(TidyTest, NoFileNamesAPathOfOneMachine) { EXPECT_TRUE(Holds(CheckNoMachinePaths(Tree()))); }
TEST(TidyTest, NamesSayWhatThingsAre) { EXPECT_TRUE(Holds(CheckNames(Tree()))); }
TEST(TidyTest, NoCallThatHasAReplacement) { EXPECT_TRUE(Holds(CheckBannedCalls(Tree()))); }
TEST(TidyTest, SkipsHaveReasons) { EXPECT_TRUE(Holds(CheckSkips(Tree()))); }
TEST(TidyTest, KernelsCanBeEmulated) { EXPECT_TRUE(Holds(CheckCuda(Tree()))); }
TEST(TidyTest, DocumentsAreShortAndRecordsLinked) { EXPECT_TRUE(Holds(CheckDocuments(Tree()))); }
TEST(TidyTest, DocumentsNameWhatExists) { EXPECT_TRUE(Holds(CheckNamedPaths(Tree()))); }
TEST(TidyTest, FuzzTargetsHaveSeeds) { EXPECT_TRUE(Holds(CheckFuzzSeeds(Tree()))); }
TEST(TidyTest, PatchesMetricsAndFieldsExplainThemselves) {
  EXPECT_TRUE(Holds(CheckRegistries(Tree())));
}
TEST(TidyTest, ListsOfFoldersAreComplete) { EXPECT_TRUE(Holds(CheckListsComplete(Tree()))); }
TEST(TidyTest, ScriptsCanBeRun) { EXPECT_TRUE(Holds(CheckRunBits(Tree()))); }

}  // namespace
}  // namespace isthmus::tidy
