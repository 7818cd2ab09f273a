// SPDX-License-Identifier: Apache-2.0
// The tree's own rules: what a reader may rely on everywhere and no compiler checks. A rule looks
// at the whole tree and returns one finding per place that breaks it; none means it holds.
#pragma once

#include <string>
#include <vector>

#include "tests/tidy/source_tree.h"

namespace isthmus::tidy {

struct Finding {
  std::string path;
  int line = 0;  // 1-based; 0 when the finding is about the whole file.
  std::string message;
};

// "path:line: message", as compilers print it.
std::string ToString(const Finding& finding);

// ---- layer_rules.cc
// #include lines follow the arrows of ARCHITECTURE.md: to lower layers that the folder's row
// names, never up, never sideways.
std::vector<Finding> CheckIncludeArrows(const SourceTree& tree);
// A CMake target names the layer of the folder its first source lies in.
std::vector<Finding> CheckCMakeLayers(const SourceTree& tree);
// Every .cc is named in the CMakeLists.txt of its folder or of one above it.
std::vector<Finding> CheckNoOrphanSources(const SourceTree& tree);

// ---- text_rules.cc
// Files below 500 lines, lines of at most 100 columns.
std::vector<Finding> CheckLengths(const SourceTree& tree);
// The licence's SPDX line first (after "#!"); headers then have a comment and #pragma once.
std::vector<Finding> CheckFileHeads(const SourceTree& tree);
// A word that marks unfinished work names its issue.
std::vector<Finding> CheckUnfinishedWords(const SourceTree& tree);
// No path of the machine that a developer works on.
std::vector<Finding> CheckNoMachinePaths(const SourceTree& tree);

// ---- name_rules.cc
// No word that hides the noun or verb that belongs there, in names of files, folders and types.
std::vector<Finding> CheckNames(const SourceTree& tree);
// Calls that have a replacement here.
std::vector<Finding> CheckBannedCalls(const SourceTree& tree);
// Tests skip with a reason and are never disabled by name.
std::vector<Finding> CheckSkips(const SourceTree& tree);

// ---- cuda_rules.cc
// Outside kernels/core: no header of CUDA's, no <<<>>>, no PTX; the emulator could not follow.
std::vector<Finding> CheckCuda(const SourceTree& tree);

// ---- record_rules.cc
// Documents within their length; every decision record is linked.
std::vector<Finding> CheckDocuments(const SourceTree& tree);
// Files and folders that README.md and ARCHITECTURE.md name in backticks exist.
std::vector<Finding> CheckNamedPaths(const SourceTree& tree);
// FOLDER/NAME_fuzz.cc has kept seeds in FOLDER/fuzz_seeds/NAME/ or FOLDER/fuzz_seeds/NAME_fuzz/.
std::vector<Finding> CheckFuzzSeeds(const SourceTree& tree);
// Patches, metrics and config fields say what they are; patches name a test and a record.
std::vector<Finding> CheckRegistries(const SourceTree& tree);
// Folders are in ARCHITECTURE.md, operations in kernels/README.md.
std::vector<Finding> CheckListsComplete(const SourceTree& tree);
// Scripts that a README names have the run bit.
std::vector<Finding> CheckRunBits(const SourceTree& tree);

}  // namespace isthmus::tidy
