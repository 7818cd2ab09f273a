// SPDX-License-Identifier: Apache-2.0
// A worker as a program: command line, engine host, gRPC server, signals. The two mains differ in
// their defaults alone.
#pragma once

#include "proto/cluster.pb.h"
#include "services/base/program.h"

namespace isthmus::worker {

// The whole of main. `default_listen` is where it listens unless configured. Returns the exit code.
int RunWorker(const ProgramSpec& spec, v1::WorkerRole role, const char* default_listen, int argc,
              const char* const* argv);

}  // namespace isthmus::worker
