// SPDX-License-Identifier: Apache-2.0
// isthmus-sparse-checkpoint DIR: writes the checkpoint of sparse_checkpoint.h into DIR, which is
// made when it does not exist. Exit 0 done, 2 wrong usage, 1 anything else.
#include <filesystem>
#include <iostream>
#include <system_error>

#include "tests/tools/sparse_checkpoint.h"

int main(int argc, char** argv) {
  if (argc != 2 || argv[1][0] == '-') {
    std::cerr << "usage: isthmus-sparse-checkpoint DIR\n";
    return 2;
  }
  std::error_code error;
  std::filesystem::create_directories(argv[1], error);
  if (error) {
    std::cerr << argv[1] << ": " << error.message() << "\n";
    return 1;
  }
  const absl::Status status = isthmus::tools::WriteSparseCheckpoint(argv[1]);
  if (!status.ok()) {
    std::cerr << status << "\n";
    return 1;
  }
  return 0;
}
