// SPDX-License-Identifier: Apache-2.0
// Everything about a worker process that an operator may set. Nothing else reads the environment.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kernels/core/communicator.h"
#include "services/base/config.h"

namespace isthmus::worker {

// A field is its default here and one line in VisitFields.
struct WorkerConfig {
  std::string listen;
  std::string address_file;
  std::string metrics_listen;
  std::vector<std::string> routers;
  std::string advertise;
  std::string log_level = "info";
  std::string model_kind = "checkpoint";
  std::string checkpoint;
  std::string device = "cpu";
  int32_t tp = 1;
  bool batch_invariant = false;
  std::string arithmetic = "reference";
  std::string index_key_format = "default";
  int32_t index_topk = 0;
  int32_t page_tokens = 256;
  int64_t cache_tokens = 65536;
  std::string memory = "0";
  int64_t max_sequence_tokens = 0;
  int32_t max_sequences = 8;
  int32_t prefix_snapshots = 64;
  int64_t prefix_snapshot_interval = 4096;
  int32_t prefix_tails = 2;
  int64_t prefix_host_bytes = 0;
  int64_t prefix_host_step_bytes = int64_t{256} << 20;
  int32_t max_queued_sequences = 16;
  double expected_output_quantile = 0.8;
  double first_output_share = 0.5;
  int32_t max_unread_messages = 8192;
  absl::Duration token_gather_time = absl::Milliseconds(8);
  int64_t chunk_tokens = 512;
  int64_t max_batch_tokens = 512;
  int32_t threads = 0;
  std::string transfer_lanes = "tcp";
  std::string transfer_devices = "lo";
  absl::Duration transfer_timeout = absl::Seconds(10);
  absl::Duration reservation_lease = absl::Minutes(2);
  absl::Duration quarantine_time = absl::Minutes(1);
  absl::Duration liveness_timeout = absl::Seconds(60);
  absl::Duration stop_patience = absl::Seconds(30);
  int64_t scripted_seed = 1;
  int32_t scripted_vocab_size = 512;
  int32_t scripted_end_token_id = 1;
  int64_t scripted_max_positions = 65536;
  int32_t scripted_layer_pairs = 1;
  double scripted_end_probability = 0.0;
  int32_t scripted_max_tokens_per_step = 1;
  absl::Duration scripted_step_time;
  absl::Duration scripted_prefill_token_time;
  std::map<std::string, bool> patches;

  template <typename Visitor>
  void VisitFields(Visitor& visit) {
    visit("listen", listen, AnyValue{},
          "host:port of the gRPC listener; port 0 takes a free one. There is no TLS yet.");
    visit("address_file", address_file, AnyValue{},
          "File that gets the listener's host:port once it serves; empty: none.");
    visit("metrics_listen", metrics_listen, AnyValue{},
          "host:port of GET /metrics; empty: no such listener.");
    visit("routers", routers, AnyValue{},
          "host:port of every router that this worker registers with.");
    visit("advertise", advertise, AnyValue{},
          "host:port at which routers reach this worker; empty: the listener's own.");
    visit("log_level", log_level, OneOf{{"debug", "info", "warning", "error"}},
          "Lowest level that is logged.");
    visit("model.kind", model_kind, OneOf{{"checkpoint", "scripted"}},
          "scripted: no model, tokens from a seed, for tests of the machinery.");
    visit("checkpoint", checkpoint, AnyValue{},
          "Directory with config.json, model.safetensors.index.json and the shards.");
    visit("device", device, AnyValue{},
          "Where the model runs: cpu, or a GPU by its number, as in cuda:0; of tp GPUs the first, "
          "or all of them with commas.");
    visit("tp", tp, Range<int32_t>{1, kernels::kMaxRanks},
          "GPUs that share the model's weights and compute every step together (tensor parallel). "
          "Each holds the whole cache.");
    visit("batch_invariant", batch_invariant, AnyValue{},
          "A GPU's bits of a sequence do not depend on what else runs; slower.");
    visit("arithmetic", arithmetic, OneOf{{"math", "reference"}},
          "reference rounds as the model's author does; math does not. Equal on all workers.");
    visit("model.index_topk", index_topk, Range<int32_t>{0, 1 << 20},
          "Entries that the indexer selects; 0: as config.json says. Equal on all workers.");
    visit("model.index_key_format", index_key_format,
          OneOf{{"default", "fp4", "fp8", "bf16", "f32"}},
          "How the cache stores index keys; default: fp4, as the model's author, in reference "
          "arithmetic, where fp8 and bf16 round less and take more memory; f32 in math, which "
          "has no other. Equal on all workers.");
    VisitCache(visit);
    visit("max_unread_messages", max_unread_messages, Range<int32_t>{1, 1 << 20},
          "Token messages that a router may leave unread; beyond, its sequences are cancelled.");
    visit("token_gather_time", token_gather_time,
          Range<absl::Duration>{absl::ZeroDuration(), absl::Seconds(1)},
          "Between two messages of tokens to a router, on average; only quicker steps see it. 0: "
          "every step at once.");
    visit("chunk_tokens", chunk_tokens, Range<int64_t>{1, 65536},
          "Prompt tokens of one sequence in one step.");
    visit("max_batch_tokens", max_batch_tokens, Range<int64_t>{1, 1 << 20},
          "Prompt tokens of all sequences in one step, which they share.");
    visit("threads", threads, Range<int32_t>{0, 256},
          "Threads of the kernels; 0: one per processor.");
    VisitTransfer(visit);
    VisitPrefixCache(visit);
    VisitScripted(visit);
    visit("patches", patches, AnyValue{}, "Named optimisations to switch on or off.");
  }

 private:
  // Who may hold how much of the cache.
  template <typename Visitor>
  void VisitCache(Visitor& visit) {
    visit("page_tokens", page_tokens, MultipleOf<int32_t>{128, 4096},
          "Tokens per KV page. Equal on all workers.");
    visit("cache_tokens", cache_tokens, Range<int64_t>{256, int64_t{1} << 32},
          "Tokens of all sequences together that the KV pages have room for.");
    visit("memory", memory, AnyValue{},
          "What weights, steps and cache may take together, as \"96GiB\": pages get what the rest "
          "leaves, and cache_tokens does not count. 0: as many pages as cache_tokens asks for.");
    visit("max_sequence_tokens", max_sequence_tokens, Range<int64_t>{0, int64_t{1} << 32},
          "Tokens of one sequence, prompt and output, that must fit into the KV pages; beyond, "
          "INVALID_ARGUMENT. 0: as many as the pages and the model have room for.");
    visit("max_sequences", max_sequences, Range<int32_t>{1, 4096},
          "Sequences that hold a state slot at one time, running or reserved.");
    visit("max_queued_sequences", max_queued_sequences, Range<int32_t>{1, 65536},
          "Prompts that wait for room in a prefill worker's cache; beyond, RESOURCE_EXHAUSTED.");
    visit(
        "admission.expected_output_quantile", expected_output_quantile, Range<double>{0.0, 1.0},
        "A decode worker reserves no pages for a sequence that would leave too few for what runs, "
        "if replies get as long as this quantile of recent ones. Lower: more at once, and more "
        "preemptions.");
    visit("admission.first_output_share", first_output_share, Range<double>{0.0, 1.0},
          "The same before any reply has ended: this share of a request's max_output_tokens.");
  }

  // What crosses to other workers, and how long it is waited for.
  template <typename Visitor>
  void VisitTransfer(Visitor& visit) {
    visit("transfer.lanes", transfer_lanes, AnyValue{},
          "UCX transports for KV pages. Shared memory does not notice a dead peer.");
    visit("transfer.devices", transfer_devices, AnyValue{},
          "Network devices for KV pages; the transport listens on them, without TLS.");
    visit("transfer.timeout", transfer_timeout,
          Range<absl::Duration>{absl::Milliseconds(10), absl::Minutes(10)},
          "From posting some of a sequence's pages to their acknowledgement.");
    visit("reservation_lease", reservation_lease,
          Range<absl::Duration>{absl::Milliseconds(100), absl::Hours(1)},
          "From reserving pages to the handoff. Past it they are taken back: ABORTED.");
    visit("quarantine_time", quarantine_time,
          Range<absl::Duration>{absl::ZeroDuration(), absl::Minutes(10)},
          "How long pages stay unused when a write into them may still be under way: longer than "
          "transfer.timeout of the prefill workers and the age of a message that they may get.");
    visit("liveness_timeout", liveness_timeout,
          Range<absl::Duration>{absl::Milliseconds(10), absl::Hours(1)},
          "Work is pending and no step has ended for so long: not live. Longer than any step.");
    visit("stop_patience", stop_patience,
          Range<absl::Duration>{absl::ZeroDuration(), absl::Hours(1)},
          "From SIGTERM to the end of what still runs; nothing is accepted meanwhile.");
  }

  template <typename Visitor>
  void VisitPrefixCache(Visitor& visit) {
    visit("prefix_cache.snapshots", prefix_snapshots, Range<int32_t>{0, 1 << 20},
          "States at the ends of prefixes that are kept, each of a slot's size without the rows of "
          "ratio 128. 0: prefixes are not reused.");
    visit("prefix_cache.snapshot_interval", prefix_snapshot_interval,
          MultipleOf<int64_t>{128, int64_t{1} << 30},
          "Tokens between the snapshots of a long prompt, beside the one at its end.");
    visit("prefix_cache.tails", prefix_tails, Range<int32_t>{1, 1024},
          "Snapshots that a conversation keeps of its latest ends; more for agents that go back "
          "several turns.");
    visit("prefix_cache.host_bytes", prefix_host_bytes, Range<int64_t>{0, int64_t{1} << 44},
          "Bytes of host memory for prefixes that pages had no room for, so that idle "
          "conversations are not computed again. On the CPU they are part of memory. 0: none.");
    visit("prefix_cache.host_step_bytes", prefix_host_step_bytes,
          Range<int64_t>{0, int64_t{1} << 40},
          "Bytes that making room, or beginning a sequence, may copy to or from that memory while "
          "a step waits; what exceeds them is computed again.");
  }
  template <typename Visitor>
  void VisitScripted(Visitor& visit) {
    visit("scripted.seed", scripted_seed, Range<int64_t>{0, INT64_MAX},
          "Decides every token. Equal on all workers, as the next four.");
    visit("scripted.vocab_size", scripted_vocab_size, Range<int32_t>{4, 1 << 20},
          "Token ids are below this.");
    visit("scripted.end_token_id", scripted_end_token_id, Range<int32_t>{0, 1 << 20},
          "The token that ends a reply.");
    visit("scripted.end_probability", scripted_end_probability, Range<double>{0.0, 1.0},
          "Chance that a token is the end token; 0: a reply has its full length.");
    visit("scripted.layer_pairs", scripted_layer_pairs, Range<int32_t>{1, 1024},
          "Size of pages: layers of ratio 4, and as many of ratio 128.");
    visit("scripted.max_positions", scripted_max_positions, Range<int64_t>{2, 2'000'000},
          "Tokens of one sequence at most.");
    visit("scripted.max_tokens_per_step", scripted_max_tokens_per_step, Range<int32_t>{1, 4},
          "Tokens that a reply gains in one step, at most.");
    visit("scripted.step_time", scripted_step_time,
          Range<absl::Duration>{absl::ZeroDuration(), absl::Minutes(1)},
          "What one step takes, whatever it computes.");
    visit("scripted.prefill_token_time", scripted_prefill_token_time,
          Range<absl::Duration>{absl::ZeroDuration(), absl::Seconds(1)},
          "What every prompt token takes besides, the first of each sequence and step excepted.");
  }
};

}  // namespace isthmus::worker
