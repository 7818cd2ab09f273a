// SPDX-License-Identifier: Apache-2.0
// How busy a worker is, from all who know a part of it.
#pragma once

#include "services/worker/decode_service.h"
#include "services/worker/prefill_service.h"
#include "services/worker/worker.h"

namespace isthmus::worker {

inline v1::WorkerLoad LoadOf(const Worker& worker, const PrefillService& prefill,
                             const DecodeService& decode) {
  v1::WorkerLoad load = worker.load();
  prefill.AddLoad(&load);
  decode.AddLoad(&load);
  return load;
}

}  // namespace isthmus::worker
