// SPDX-License-Identifier: Apache-2.0
// Fault scopes: which one a status keeps, and what it leaves alone.
#include "services/base/fault.h"

#include "absl/strings/cord.h"
#include "gtest/gtest.h"

namespace isthmus {
namespace {

constexpr FaultScope kAll[] = {FaultScope::kRequest, FaultScope::kPeer, FaultScope::kDevice,
                               FaultScope::kProcess};

TEST(FaultTest, GivesBackTheScopeThatWasAttached) {
  for (const FaultScope scope : kAll) {
    EXPECT_EQ(FaultScopeOf(WithFaultScope(absl::InternalError("broken"), scope)), scope)
        << FaultScopeName(scope);
  }
}

TEST(FaultTest, IsTheRequestWhenNobodyNamedAScope) {
  EXPECT_EQ(FaultScopeOf(absl::InternalError("broken")), FaultScope::kRequest);
  EXPECT_EQ(FaultScopeOf(absl::OkStatus()), FaultScope::kRequest);
}

TEST(FaultTest, KeepsTheInnermostScope) {
  absl::Status status = WithFaultScope(absl::UnavailableError("gone"), FaultScope::kPeer);
  status = WithFaultScope(status, FaultScope::kProcess);
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
}

TEST(FaultTest, AnInnermostScopeOfRequestIsKeptToo) {
  absl::Status status = WithFaultScope(absl::InternalError("broken"), FaultScope::kRequest);
  status = WithFaultScope(status, FaultScope::kDevice);
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kRequest);
}

TEST(FaultTest, LeavesCodeAndMessageAlone) {
  const absl::Status status = WithFaultScope(absl::AbortedError("lease lost"), FaultScope::kPeer);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "lease lost");
}

TEST(FaultTest, LeavesSuccessAlone) {
  const absl::Status status = WithFaultScope(absl::OkStatus(), FaultScope::kProcess);
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kRequest);
}

TEST(FaultTest, TravelsWithACopy) {
  const absl::Status status = WithFaultScope(absl::InternalError("broken"), FaultScope::kDevice);
  const absl::Status copy = status;
  EXPECT_EQ(FaultScopeOf(copy), FaultScope::kDevice);
}

TEST(FaultTest, ReadsAnUnknownScopeAsTheRequest) {
  absl::Status status = absl::InternalError("from a newer peer");
  status.SetPayload("isthmus/fault-scope", absl::Cord("galaxy"));
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kRequest);
}

TEST(FaultTest, NamesEveryScopeAsOnTheWire) {
  EXPECT_EQ(FaultScopeName(FaultScope::kRequest), "request");
  EXPECT_EQ(FaultScopeName(FaultScope::kPeer), "peer");
  EXPECT_EQ(FaultScopeName(FaultScope::kDevice), "device");
  EXPECT_EQ(FaultScopeName(FaultScope::kProcess), "process");
}

}  // namespace
}  // namespace isthmus
