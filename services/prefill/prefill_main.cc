// SPDX-License-Identifier: Apache-2.0
// isthmus-prefill: a worker that computes prompts and pushes their cache to decode workers.
#include "services/worker/worker_server.h"

int main(int argc, char** argv) {
  return isthmus::worker::RunWorker(
      {"isthmus-prefill", "Computes prompts and pushes their KV pages to decode workers."},
      isthmus::v1::WORKER_ROLE_PREFILL, "127.0.0.1:7101", argc, argv);
}
