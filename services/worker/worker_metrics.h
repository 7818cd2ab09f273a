// SPDX-License-Identifier: Apache-2.0
// Every metric that a worker exports. Names: isthmus_<process>_<quantity>_<base unit>[_total].
#pragma once

#include "services/base/metrics.h"

namespace isthmus::worker {

inline constexpr MetricSpec kPrefills = {
    .name = "isthmus_prefill_prompts_total",
    .kind = MetricKind::kCounter,
    .help = "Prompts whose pages were computed, pushed and acknowledged.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPushedBytes = {
    .name = "isthmus_prefill_pushed_bytes_total",
    .kind = MetricKind::kCounter,
    .help = "Cache bytes written into decode workers' memory and acknowledged.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPushSeconds = {
    .name = "isthmus_prefill_push_seconds",
    .kind = MetricKind::kHistogram,
    .help = "From the first write of a sequence's pages to the last acknowledgement, in seconds.",
    .labels = {},
    .buckets = kLatencyBuckets};

inline constexpr MetricSpec kVerifiedGroups = {
    .name = "isthmus_decode_verified_page_groups_total",
    .kind = MetricKind::kCounter,
    .help = "Page groups whose digest was computed on arrival and found equal.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kHandoffRefusals = {
    .name = "isthmus_decode_handoff_refusals_total",
    .kind = MetricKind::kCounter,
    .help = "Handoffs that were refused: lost reservation, wrong digest, wrong layout or run.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kOutputTokens = {
    .name = "isthmus_decode_output_tokens_total",
    .kind = MetricKind::kCounter,
    .help =
        "Tokens that this worker generated. The first token of a reply is the prefill worker's.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kExpiredLeases = {
    .name = "isthmus_decode_expired_leases_total",
    .kind = MetricKind::kCounter,
    .help = "Reservations that were taken back because no handoff came in time.",
    .labels = {},
    .buckets = {}};

inline constexpr const MetricSpec* kAllMetrics[] = {
    &kPrefills,        &kPushedBytes,  &kPushSeconds,   &kVerifiedGroups,
    &kHandoffRefusals, &kOutputTokens, &kExpiredLeases,
};

}  // namespace isthmus::worker
