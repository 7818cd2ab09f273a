// SPDX-License-Identifier: Apache-2.0
// The two steps of Indexer on a GPU, each by itself, for measurements.
//
// Arguments  As Indexer's, with scores set; device_batch of at most 65535 rows.
// Patches    indexer.mma_scores decides the one, indexer.radix_top_k the other.
// Errors     InvalidArgument  A shape breaks Indexer's contract; no GPU, no scores, too many rows.
#pragma once

#include "kernels/indexer/indexer.h"

namespace isthmus::kernels {

// args.scores of the rows that see more than topk keys, each as far as it sees; nothing else.
absl::Status IndexerScores(const IndexerArgs& args, const Exec& exec);
// args.selected from args.scores, each row in ascending order.
absl::Status IndexerSelection(const IndexerArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
