// SPDX-License-Identifier: Apache-2.0
// Every metric the router exports. Names: isthmus_<process>_<quantity>_<base unit>[_total].
#pragma once

#include "services/base/metrics.h"

namespace isthmus::router {

inline constexpr absl::string_view kCodeLabel[] = {"code"};
inline constexpr absl::string_view kOutcomeLabel[] = {"outcome"};
inline constexpr absl::string_view kRoleAndStateLabels[] = {"role", "state"};

// Seconds, 0.1 ms to 2.5 s: times between tokens.
inline constexpr double kTokenBuckets[] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01,
                                           0.025,  0.05,    0.1,    0.25,  0.5,    1,     2.5};

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

inline constexpr MetricSpec kTimePerOutputToken = {
    .name = "isthmus_router_time_per_output_token_seconds",
    .kind = MetricKind::kHistogram,
    .help =
        "Seconds per output token after the first, the mean of each finished request. "
        "Requests of one output token are not observed.",
    .labels = {},
    .buckets = kTokenBuckets};

inline constexpr MetricSpec kQueueTime = {
    .name = "isthmus_router_queue_seconds",
    .kind = MetricKind::kHistogram,
    .help =
        "From a request's acceptance to its reservation on a decode worker, the waits for its turn "
        "and for room included. Requests that got none are not observed.",
    .labels = {},
    .buckets = kLatencyBuckets};

inline constexpr MetricSpec kHandoverTime = {
    .name = "isthmus_router_handover_seconds",
    .kind = MetricKind::kHistogram,
    .help =
        "From a reservation to the decode worker's admission: prefill, transfer and verification. "
        "Failed attempts are not observed.",
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
    .help = "Output tokens written to clients of finished requests, end tokens included.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kHandoffFailures = {
    .name = "isthmus_router_handoff_failures_total",
    .kind = MetricKind::kCounter,
    .help =
        "Attempts whose KV pages did not reach a decode worker, by canonical status code. "
        "Workers without room are not counted.",
    .labels = kCodeLabel,
    .buckets = {}};

inline constexpr MetricSpec kRetries = {
    .name = "isthmus_router_retries_total",
    .kind = MetricKind::kCounter,
    .help = "Attempts after the first one of their request, by the code that the one before gave.",
    .labels = kCodeLabel,
    .buckets = {}};

inline constexpr MetricSpec kPlacementFailures = {
    .name = "isthmus_router_placement_failures_total",
    .kind = MetricKind::kCounter,
    .help = "Requests for which there was no pair of usable workers.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kCancels = {
    .name = "isthmus_router_cancels_total",
    .kind = MetricKind::kCounter,
    .help =
        "Transfers that ended early. acknowledged: both workers said that their pages are free; "
        "unacknowledged: the lease or the quarantine frees them.",
    .labels = kOutcomeLabel,
    .buckets = {}};

inline constexpr MetricSpec kSlowClients = {
    .name = "isthmus_router_slow_clients_total",
    .kind = MetricKind::kCounter,
    .help = "Requests that were ended since their client read more slowly than tokens were made.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kActiveRequests = {
    .name = "isthmus_router_num_active_requests",
    .kind = MetricKind::kGauge,
    .help = "Requests that are worked on now; queued ones are not counted.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kQueuedRequests = {
    .name = "isthmus_router_num_queued_requests",
    .kind = MetricKind::kGauge,
    .help = "Requests that wait to be worked on, and active ones that wait for room on a worker.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPendingCancels = {
    .name = "isthmus_router_num_pending_cancels",
    .kind = MetricKind::kGauge,
    .help = "Transfers that ended early and that both workers have not acknowledged yet.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kWorkers = {
    .name = "isthmus_router_num_workers",
    .kind = MetricKind::kGauge,
    .help =
        "Workers by role (prefill, decode) and state (ready, draining, suspect, refused). Suspect "
        "and refused ones are counted for a minute.",
    .labels = kRoleAndStateLabels,
    .buckets = {}};

inline constexpr const MetricSpec* kAllMetrics[] = {
    &kRequests,     &kTimeToFirstToken, &kTimePerOutputToken, &kQueueTime,      &kHandoverTime,
    &kPromptTokens, &kRelayedTokens,    &kHandoffFailures,    &kRetries,        &kPlacementFailures,
    &kCancels,      &kSlowClients,      &kActiveRequests,     &kQueuedRequests, &kPendingCancels,
    &kWorkers,
};

}  // namespace isthmus::router
