// SPDX-License-Identifier: Apache-2.0
// Every metric the router exports. Names: isthmus_<process>_<quantity>_<base unit>[_total].
#pragma once

#include "services/base/metrics.h"

namespace isthmus::router {

inline constexpr absl::string_view kCodeLabel[] = {"code"};

inline constexpr MetricSpec kRequests = {
    .name = "isthmus_router_requests_total",
    .kind = MetricKind::kCounter,
    .help = "Requests that have ended, by canonical status code.",
    .labels = kCodeLabel,
    .buckets = {}};

inline constexpr MetricSpec kTimeToFirstToken = {
    .name = "isthmus_router_time_to_first_token_seconds",
    .kind = MetricKind::kHistogram,
    .help =
        "From a request's acceptance to its first output token on the client stream. "
        "Failed requests are not observed.",
    .labels = {},
    .buckets = kLatencyBuckets};

inline constexpr MetricSpec kPromptTokens = {
    .name = "isthmus_router_prompt_tokens_total",
    .kind = MetricKind::kCounter,
    .help = "Prompt tokens of requests that were handed over to a decode worker.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kRelayedTokens = {
    .name = "isthmus_router_output_tokens_total",
    .kind = MetricKind::kCounter,
    .help = "Output tokens written to clients, end tokens included.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kHandoffFailures = {
    .name = "isthmus_router_handoff_failures_total",
    .kind = MetricKind::kCounter,
    .help = "Requests whose KV pages did not reach a decode worker.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kActiveRequests = {
    .name = "isthmus_router_num_active_requests",
    .kind = MetricKind::kGauge,
    .help = "Requests that are worked on now; queued ones are not counted.",
    .labels = {},
    .buckets = {}};

inline constexpr const MetricSpec* kAllMetrics[] = {
    &kRequests,      &kTimeToFirstToken, &kPromptTokens,
    &kRelayedTokens, &kHandoffFailures,  &kActiveRequests,
};

}  // namespace isthmus::router
