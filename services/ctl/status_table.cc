// SPDX-License-Identifier: Apache-2.0
#include "services/ctl/status_table.h"

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/rpc/wire.h"

namespace isthmus::ctl {
namespace {

constexpr size_t kNumColumns = 8;
using Row = std::array<std::string, kNumColumns>;

// A refused card may lack one.
std::string RoleOf(const v1::WorkerStatus& worker) {
  const v1::WorkerRole role = worker.card().role();
  return role == v1::WORKER_ROLE_UNSPECIFIED ? "?" : std::string(rpc::RoleName(role));
}

Row RowOf(const v1::WorkerStatus& worker) {
  const v1::WorkerLoad& load = worker.load();
  Row row;
  row[0] = RoleOf(worker);
  row[1] = worker.address();
  row[2] = std::string(rpc::WorkerStateName(worker.state()));
  row[3] = absl::StrFormat("%016x", worker.card().incarnation());
  row[4] = worker.state() == v1::WORKER_STATE_REFUSED
               ? std::string(1, '-')
               : absl::StrFormat("%d running, %d queued, %.1f s ago", load.active_sequences(),
                                 load.queued_sequences(), worker.load_age_seconds());
  row[5] = absl::StrCat(worker.requests_in_flight());
  row[6] = absl::StrCat(load.free_pages(), "/", load.total_pages());
  if (load.quarantined_pages() > 0) absl::StrAppend(&row[6], " (", load.quarantined_pages(), " q)");
  row[7] = worker.card().transfer_lane();
  return row;
}

}  // namespace

std::string StatusTable(const v1::StatusReply& status) {
  std::string text = absl::StrFormat(
      "router %s (commit %s, protocol %d): %s, %d active, %d queued\n", status.version(),
      status.commit(), status.protocol_version(),
      status.is_draining() ? "draining" : (status.is_ready() ? "ready" : "not ready"),
      status.active_requests(), status.queued_requests());
  if (!status.is_ready()) absl::StrAppend(&text, "  ", status.not_ready_reason(), "\n");
  if (status.workers().empty()) return text;

  std::vector<Row> rows = {
      {"ROLE", "ADDRESS", "STATE", "INCARNATION", "LOAD", "IN FLIGHT", "FREE PAGES", "LANE"}};
  for (const v1::WorkerStatus& worker : status.workers()) rows.push_back(RowOf(worker));
  std::array<size_t, kNumColumns> widths = {};
  for (const Row& row : rows) {
    for (size_t c = 0; c < kNumColumns; ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    std::string line;
    for (size_t c = 0; c < kNumColumns; ++c) {
      absl::StrAppendFormat(&line, "%-*s", static_cast<int>(widths[c] + 2), rows[r][c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
    if (r == 0) continue;
    const std::string& problem = status.workers(static_cast<int>(r) - 1).problem();
    if (!problem.empty()) absl::StrAppend(&text, "  ", problem, "\n");
  }
  return text;
}

}  // namespace isthmus::ctl
