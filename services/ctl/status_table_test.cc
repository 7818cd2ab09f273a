// SPDX-License-Identifier: Apache-2.0
#include "services/ctl/status_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace isthmus::ctl {
namespace {

using testing::HasSubstr;

v1::WorkerStatus* AddWorker(v1::StatusReply& status, v1::WorkerRole role, const char* address,
                            v1::WorkerState state, const char* problem) {
  v1::WorkerStatus* worker = status.add_workers();
  worker->set_address(address);
  worker->set_state(state);
  worker->set_problem(problem);
  worker->mutable_card()->set_role(role);
  worker->mutable_card()->set_incarnation(0xab);
  worker->mutable_card()->set_transfer_lane("ucx tcp lo");
  worker->mutable_load()->set_active_sequences(3);
  worker->mutable_load()->set_free_pages(7);
  worker->mutable_load()->set_total_pages(9);
  worker->set_load_age_seconds(0.25);
  worker->set_requests_in_flight(2);
  return worker;
}

TEST(StatusTableTest, ARowForEachWorkerAndAReasonBelowThoseThatAreNotReady) {
  v1::StatusReply status;
  status.set_is_ready(true);
  AddWorker(status, v1::WORKER_ROLE_PREFILL, "127.0.0.1:7101", v1::WORKER_STATE_READY, "");
  AddWorker(status, v1::WORKER_ROLE_DECODE, "d:1", v1::WORKER_STATE_DRAINING, "draining: upgrade");
  AddWorker(status, v1::WORKER_ROLE_DECODE, "d:2", v1::WORKER_STATE_SUSPECT,
            "suspect until its next report: gone");
  AddWorker(status, v1::WORKER_ROLE_DECODE, "d:3", v1::WORKER_STATE_REFUSED,
            "refused: model.index_topk differs: 4, 64");
  const std::string text = StatusTable(status);
  EXPECT_THAT(text, HasSubstr("prefill  127.0.0.1:7101  ready     00000000000000ab  "
                              "3 running, 0 queued, 0.2 s ago  2          7/9         ucx tcp lo\n"
                              "decode   d:1             draining  "));
  EXPECT_THAT(text, HasSubstr("\n  draining: upgrade\ndecode   d:2             suspect   "));
  EXPECT_THAT(text, HasSubstr("\n  suspect until its next report: gone\n"));
  EXPECT_THAT(text, HasSubstr("d:3             refused   "));
  EXPECT_THAT(text, HasSubstr("\n  refused: model.index_topk differs: 4, 64\n"));
}

TEST(StatusTableTest, SaysWhyTheRouterIsNotReady) {
  v1::StatusReply status;
  status.set_not_ready_reason("usable workers: 0 for prefill, 0 for decode");
  EXPECT_THAT(StatusTable(status), HasSubstr("not ready, 0 active, 0 queued\n  usable workers: 0"));
  status.set_is_draining(true);
  EXPECT_THAT(StatusTable(status), HasSubstr("): draining, 0 active"));
}

}  // namespace
}  // namespace isthmus::ctl
