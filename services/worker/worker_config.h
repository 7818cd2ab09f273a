// SPDX-License-Identifier: Apache-2.0
// Everything about a worker process that an operator may set. Nothing else reads the environment.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/time/time.h"
#include "services/base/config.h"

namespace isthmus::worker {

// A field is its default here and one line in VisitFields.
struct WorkerConfig {
  std::string listen;
  std::string address_file;
  std::string metrics_listen;
  std::string log_level = "info";
  std::string checkpoint;
  std::string arithmetic = "reference";
  int32_t index_topk = 0;
  int32_t page_tokens = 256;
  int64_t cache_tokens = 65536;
  int32_t max_sequences = 8;
  int32_t max_queued_sequences = 16;
  int64_t chunk_tokens = 512;
  int32_t threads = 0;
  std::string transfer_lanes = "tcp";
  std::string transfer_devices = "lo";
  absl::Duration transfer_timeout = absl::Seconds(10);
  absl::Duration reservation_lease = absl::Minutes(2);
  absl::Duration quarantine_time = absl::Seconds(12);
  absl::Duration stop_patience = absl::Seconds(5);
  std::map<std::string, bool> patches;

  template <typename Visitor>
  void VisitFields(Visitor& visit) {
    visit("listen", listen, AnyValue{},
          "host:port of the gRPC listener; port 0 takes a free one. There is no TLS yet.");
    visit("address_file", address_file, AnyValue{},
          "File that gets the listener's host:port once it serves; empty: none.");
    visit("metrics_listen", metrics_listen, AnyValue{},
          "host:port of GET /metrics; empty: no such listener.");
    visit("log_level", log_level, OneOf{{"debug", "info", "warning", "error"}},
          "Lowest level that is logged.");
    visit("checkpoint", checkpoint, AnyValue{},
          "Directory with config.json, model.safetensors.index.json and the shards.");
    visit("arithmetic", arithmetic, OneOf{{"math", "reference"}},
          "reference rounds as the model's author does; math does not. Equal on all workers.");
    visit("model.index_topk", index_topk, Range<int32_t>{0, 1 << 20},
          "Entries that the indexer selects; 0: as config.json says. Equal on all workers.");
    visit("page_tokens", page_tokens, MultipleOf<int32_t>{128, 4096},
          "Tokens per KV page. Equal on all workers.");
    visit("cache_tokens", cache_tokens, Range<int64_t>{256, int64_t{1} << 32},
          "Tokens of all sequences together that the KV pages have room for.");
    visit("max_sequences", max_sequences, Range<int32_t>{1, 4096},
          "Sequences that hold a state slot at one time, running or reserved.");
    visit("max_queued_sequences", max_queued_sequences, Range<int32_t>{1, 65536},
          "Sequences that wait for the step loop; beyond, RESOURCE_EXHAUSTED.");
    visit("chunk_tokens", chunk_tokens, Range<int64_t>{1, 65536},
          "Prompt tokens of one sequence in one step.");
    visit("threads", threads, Range<int32_t>{0, 256},
          "Threads of the kernels; 0: one per processor.");
    visit("transfer.lanes", transfer_lanes, AnyValue{},
          "UCX transports for KV pages. Shared memory does not notice a dead peer.");
    visit("transfer.devices", transfer_devices, AnyValue{},
          "Network devices for KV pages; the transport listens on them, without TLS.");
    visit("transfer.timeout", transfer_timeout,
          Range<absl::Duration>{absl::Milliseconds(10), absl::Minutes(10)},
          "From the first write of a sequence's pages to the last acknowledgement.");
    visit("reservation_lease", reservation_lease,
          Range<absl::Duration>{absl::Milliseconds(100), absl::Hours(1)},
          "From reserving pages to the handoff. Past it they are taken back: ABORTED.");
    visit("quarantine_time", quarantine_time,
          Range<absl::Duration>{absl::ZeroDuration(), absl::Minutes(10)},
          "How long pages stay unused when a write into them may still be under way: longer than "
          "transfer.timeout of the prefill workers.");
    visit("stop_patience", stop_patience,
          Range<absl::Duration>{absl::ZeroDuration(), absl::Hours(1)},
          "From SIGTERM to the end of calls that still run.");
    visit("patches", patches, AnyValue{}, "Named optimisations to switch on or off.");
  }
};

}  // namespace isthmus::worker
