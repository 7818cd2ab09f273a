// SPDX-License-Identifier: Apache-2.0
// Everything about a router process that an operator may set. Nothing else reads the environment.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "services/base/config.h"

namespace isthmus::router {

// A field is its default here and one line in VisitFields.
struct RouterConfig {
  std::string listen = "127.0.0.1:7100";
  std::string address_file;
  std::string metrics_listen;
  std::string log_level = "info";
  std::string checkpoint;
  int32_t max_active_requests = 8;
  int32_t max_queued_requests = 64;
  int32_t max_workers = 64;
  int32_t max_attempts = 3;
  int32_t max_behind_messages = 2048;
  absl::Duration token_gather_time = absl::Milliseconds(8);
  std::string route_policy = "least_loaded";
  absl::Duration load_interval = absl::Milliseconds(20);
  absl::Duration heartbeat_interval = absl::Seconds(1);
  absl::Duration lease = absl::Seconds(5);
  int32_t default_output_tokens = 1024;
  double default_temperature = 1.0;
  double default_top_p = 1.0;
  int32_t default_top_k = 0;
  double default_min_p = 0.0;
  absl::Duration request_timeout = absl::Minutes(10);
  absl::Duration stop_patience = absl::Seconds(5);

  template <typename Visitor>
  void VisitFields(Visitor& visit) {
    VisitProcessFields(visit);
    VisitRequestFields(visit);
  }

  // Listeners, workers, stopping.
  template <typename Visitor>
  void VisitProcessFields(Visitor& visit) {
    visit("listen", listen, AnyValue{},
          "host:port of the gRPC listener; port 0 takes a free one. There is no TLS yet.");
    visit("address_file", address_file, AnyValue{},
          "File that gets the listener's host:port once it serves; empty: none.");
    visit("metrics_listen", metrics_listen, AnyValue{},
          "host:port of GET /metrics; empty: no such listener.");
    visit("log_level", log_level, OneOf{{"debug", "info", "warning", "error"}},
          "Lowest level that is logged.");
    visit("checkpoint", checkpoint, AnyValue{},
          "Directory with tokenizer.json and, where the model has one, the chat encoder's file.");
    visit("max_workers", max_workers, Range<int32_t>{1, 4096},
          "Workers that are registered at one time; beyond, RESOURCE_EXHAUSTED.");
    visit("registration.load_interval", load_interval,
          Range<absl::Duration>{absl::Milliseconds(1), absl::Minutes(1)},
          "Least time between two load reports of a worker.");
    visit("registration.heartbeat_interval", heartbeat_interval,
          Range<absl::Duration>{absl::Milliseconds(10), absl::Minutes(1)},
          "Most time between two reports of a worker whose load does not change.");
    visit("registration.lease", lease,
          Range<absl::Duration>{absl::Milliseconds(50), absl::Minutes(10)},
          "A worker that was silent for longer gets no requests, and those that it has fail. "
          "Several heartbeat intervals.");
    visit("stop_patience", stop_patience,
          Range<absl::Duration>{absl::ZeroDuration(), absl::Hours(1)},
          "From SIGTERM to the end of requests that still run.");
  }

  // Admission, placement, defaults of a request.
  template <typename Visitor>
  void VisitRequestFields(Visitor& visit) {
    visit("max_active_requests", max_active_requests, Range<int32_t>{1, 4096},
          "Requests that are worked on at one time.");
    visit("max_queued_requests", max_queued_requests, Range<int32_t>{0, 65536},
          "Requests that wait for that; beyond, RESOURCE_EXHAUSTED.");
    visit("max_attempts", max_attempts, Range<int32_t>{1, 16},
          "Pairs of workers that a request is tried on before its first token.");
    visit("max_behind_messages", max_behind_messages, Range<int32_t>{1, 1 << 20},
          "Messages of tokens that a client may be behind; beyond, its request is ended.");
    visit("token_gather_time", token_gather_time,
          Range<absl::Duration>{absl::ZeroDuration(), absl::Seconds(1)},
          "Between two messages of tokens to a client, on average; only models with quicker steps "
          "see it. 0: every step at once.");
    visit("route.policy", route_policy, OneOf{{"least_loaded", "round_robin"}},
          "How workers are chosen among those that could serve a request.");
    visit("default_output_tokens", default_output_tokens, Range<int32_t>{1, 1 << 24},
          "Output tokens at most when the request does not say.");
    visit("default_temperature", default_temperature, Range<double>{0.0, 2.0},
          "Temperature when the request does not say; 0 is greedy.");
    visit("default_top_p", default_top_p, Range<double>{0.001, 1.0},
          "Share of probability kept when the request does not say.");
    visit("default_top_k", default_top_k, Range<int32_t>{0, 1 << 24},
          "Tokens kept when the request does not say; 0 keeps all.");
    visit("default_min_p", default_min_p, Range<double>{0.0, 1.0},
          "Share of the likeliest token's probability below which tokens are dropped when the "
          "request does not say.");
    visit("request_timeout", request_timeout,
          Range<absl::Duration>{absl::Milliseconds(10), absl::Hours(24)},
          "From accepting a request to its last token. A client's earlier deadline counts.");
  }
};

}  // namespace isthmus::router
