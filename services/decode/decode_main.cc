// SPDX-License-Identifier: Apache-2.0
// isthmus-decode: a worker that continues sequences whose cache a prefill worker has pushed.
#include "services/worker/worker_server.h"

int main(int argc, char** argv) {
  return isthmus::worker::RunWorker(
      {"isthmus-decode", "Holds KV pages and generates tokens for sequences handed over to it."},
      isthmus::v1::WORKER_ROLE_DECODE, "127.0.0.1:7102", argc, argv);
}
