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

inline constexpr absl::string_view kCodeLabel[] = {"code"};

inline constexpr MetricSpec kPrefillFailures = {
    .name = "isthmus_prefill_failures_total",
    .kind = MetricKind::kCounter,
    .help = "Prefill calls that ended with an error, by status code; refusals count.",
    .labels = kCodeLabel,
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
    .help =
        "Time in which a prompt's pages were written, acknowledgements included, in seconds. "
        "Computing goes on meanwhile.",
    .labels = {},
    .buckets = kLatencyBuckets};

inline constexpr MetricSpec kLastPushSeconds = {
    .name = "isthmus_prefill_last_push_seconds",
    .kind = MetricKind::kHistogram,
    .help =
        "From posting a prompt's last writes to the answer with its handoff, in seconds: what the "
        "hand-over waits for.",
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

inline constexpr MetricSpec kEarlyEnds = {
    .name = "isthmus_decode_early_ends_total",
    .kind = MetricKind::kCounter,
    .help = "Sequences that ended before their reply was whole, by status code.",
    .labels = kCodeLabel,
    .buckets = {}};

inline constexpr MetricSpec kExpiredLeases = {
    .name = "isthmus_decode_expired_leases_total",
    .kind = MetricKind::kCounter,
    .help = "Reservations that were taken back because no handoff came in time.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kStepSeconds = {
    .name = "isthmus_worker_step_seconds",
    .kind = MetricKind::kHistogram,
    .help = "Duration of one step of the engine, in seconds.",
    .labels = {},
    .buckets = kLatencyBuckets};

inline constexpr double kBatchBuckets[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};

inline constexpr MetricSpec kStepSequences = {
    .name = "isthmus_worker_step_sequences",
    .kind = MetricKind::kHistogram,
    .help = "Sequences that were running in a step, their number.",
    .labels = {},
    .buckets = kBatchBuckets};

inline constexpr absl::string_view kReasonLabel[] = {"reason"};
inline constexpr MetricSpec kPreemptions = {
    .name = "isthmus_decode_preemptions_total",
    .kind = MetricKind::kCounter,
    .help =
        "Sequences that gave their pages back to more urgent ones: to those of their step, or to a "
        "newcomer of a higher class. They are recomputed and go on.",
    .labels = kReasonLabel,
    .buckets = {}};

inline constexpr MetricSpec kRecomputedTokens = {
    .name = "isthmus_decode_recomputed_tokens_total",
    .kind = MetricKind::kCounter,
    .help = "Tokens that were computed again after a preemption.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPreemptedSequences = {
    .name = "isthmus_decode_preempted_sequences",
    .kind = MetricKind::kGauge,
    .help = "Sequences that wait to have their pages again, their number.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kActiveSequences = {
    .name = "isthmus_worker_active_sequences",
    .kind = MetricKind::kGauge,
    .help = "Sequences that the step loop runs, their number.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kQueuedSequences = {
    .name = "isthmus_worker_queued_sequences",
    .kind = MetricKind::kGauge,
    .help = "Sequences that wait for room in the cache or for their first step, their number.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPendingPromptTokens = {
    .name = "isthmus_worker_pending_prompt_tokens",
    .kind = MetricKind::kGauge,
    .help = "Prompt tokens of accepted calls that no step has computed yet, their number.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kTransfers = {
    .name = "isthmus_worker_transfers",
    .kind = MetricKind::kGauge,
    .help =
        "Decode: reserved, being verified or running. Prefill: calls without an answer. Their "
        "number.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kFreePages = {
    .name = "isthmus_worker_free_pages",
    .kind = MetricKind::kGauge,
    .help =
        "Pages of all paged kinds that nobody holds, or that the prefix cache gives up for whoever "
        "needs them, their number.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kTotalPages = {.name = "isthmus_worker_total_pages",
                                           .kind = MetricKind::kGauge,
                                           .help = "Pages of all paged kinds, their number.",
                                           .labels = {},
                                           .buckets = {}};

inline constexpr MetricSpec kFreeStateSlots = {
    .name = "isthmus_worker_free_state_slots",
    .kind = MetricKind::kGauge,
    .help = "State slots that nobody holds, their number. Each sequence takes one.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kTotalStateSlots = {.name = "isthmus_worker_total_state_slots",
                                                .kind = MetricKind::kGauge,
                                                .help = "State slots, their number.",
                                                .labels = {},
                                                .buckets = {}};

inline constexpr MetricSpec kQuarantinedPages = {
    .name = "isthmus_decode_quarantined_pages",
    .kind = MetricKind::kGauge,
    .help = "Pages that wait because a write into them may still be under way, their number.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPrefixQueriedTokens = {
    .name = "isthmus_worker_prefix_queried_tokens_total",
    .kind = MetricKind::kCounter,
    .help = "Prompt tokens that were looked up in the prefix cache.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPrefixHitTokens = {
    .name = "isthmus_worker_prefix_hit_tokens_total",
    .kind = MetricKind::kCounter,
    .help =
        "Of these, the tokens that need not be computed (prefill) or sent (decode), since the "
        "cache has them.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPrefixEvictedBlocks = {
    .name = "isthmus_worker_prefix_evicted_blocks_total",
    .kind = MetricKind::kCounter,
    .help = "Blocks of 128 tokens that the prefix cache gave up for room.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPrefixEvictedSnapshots = {
    .name = "isthmus_worker_prefix_evicted_snapshots_total",
    .kind = MetricKind::kCounter,
    .help = "States at the ends of prefixes that gave way to others while their pages stayed.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPrefixOffloadedBlocks = {
    .name = "isthmus_worker_prefix_offloaded_blocks_total",
    .kind = MetricKind::kCounter,
    .help = "Of the evicted blocks, those of 128 tokens that were copied to host memory.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPrefixLostBlocks = {
    .name = "isthmus_worker_prefix_lost_blocks_total",
    .kind = MetricKind::kCounter,
    .help = "Evicted blocks of 128 tokens that would have exceeded prefix_cache.host_step_bytes.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPrefixHostHitTokens = {
    .name = "isthmus_worker_prefix_host_hit_tokens_total",
    .kind = MetricKind::kCounter,
    .help = "Prompt tokens that host memory had and pages had not.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPrefixHostRefusedBytes = {
    .name = "isthmus_worker_prefix_host_refused_bytes_total",
    .kind = MetricKind::kCounter,
    .help = "Bytes of host memory that were forgotten since their sums differed: memory goes bad.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kPrefixHostBytes = {.name = "isthmus_worker_prefix_host_bytes",
                                                .kind = MetricKind::kGauge,
                                                .help = "Bytes of evicted prefixes in host memory.",
                                                .labels = {},
                                                .buckets = {}};

inline constexpr MetricSpec kPrefixTokens = {
    .name = "isthmus_worker_prefix_tokens",
    .kind = MetricKind::kGauge,
    .help = "Tokens that the prefix cache can find in pages, their number.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kIsDraining = {
    .name = "isthmus_worker_is_draining",
    .kind = MetricKind::kGauge,
    .help = "1 while the worker finishes what it has and takes nothing more, else 0.",
    .labels = {},
    .buckets = {}};

inline constexpr MetricSpec kRegisteredRouters = {
    .name = "isthmus_worker_registered_routers",
    .kind = MetricKind::kGauge,
    .help = "Routers that have accepted this worker's registration, their number.",
    .labels = {},
    .buckets = {}};

inline constexpr const MetricSpec* kAllMetrics[] = {
    &kPrefills,
    &kPushedBytes,
    &kPushSeconds,
    &kLastPushSeconds,
    &kVerifiedGroups,
    &kHandoffRefusals,
    &kOutputTokens,
    &kExpiredLeases,
    &kStepSeconds,
    &kStepSequences,
    &kPreemptions,
    &kRecomputedTokens,
    &kPreemptedSequences,
    &kActiveSequences,
    &kQueuedSequences,
    &kPendingPromptTokens,
    &kTransfers,
    &kFreePages,
    &kTotalPages,
    &kFreeStateSlots,
    &kTotalStateSlots,
    &kQuarantinedPages,
    &kPrefixQueriedTokens,
    &kPrefixHitTokens,
    &kPrefixEvictedBlocks,
    &kPrefixEvictedSnapshots,
    &kPrefixTokens,
    &kPrefixOffloadedBlocks,
    &kPrefixLostBlocks,
    &kPrefixHostHitTokens,
    &kPrefixHostRefusedBytes,
    &kPrefixHostBytes,
    &kIsDraining,
    &kRegisteredRouters,
    &kPrefillFailures,
    &kEarlyEnds,
};

}  // namespace isthmus::worker
