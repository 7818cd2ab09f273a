// SPDX-License-Identifier: Apache-2.0
// post_pre on the CPU: the three operations in turn, and what it refuses.
#include "kernels/fused/post_pre/post_pre.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/fused/post_pre/post_pre_cases.h"
#include "kernels/fused/post_pre/post_pre_variants.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/testing/compare.h"

namespace isthmus::kernels {
namespace {

using kernels::testing::SameBits;

TEST(PostPreTest, IsPostThenPreThenTheNorm) {
  for (const bool has_norm : {true, false}) {
    PostPreCase fused(1, 5, 48);
    fused.has_norm = has_norm;
    fused.Run();
    PostPreCase apart(1, 5, 48);
    const PostPreArgs args = apart.Args();
    ASSERT_TRUE(HyperConnectionPost(args.post, Exec{}).ok());
    ASSERT_TRUE(HyperConnectionPre(args.pre, Exec{}).ok());
    if (has_norm) {
      ASSERT_TRUE(
          RmsNorm({.x = args.pre.x, .weight = args.norm_weight, .out = args.pre.x}, Exec{}).ok());
    }
    EXPECT_TRUE(SameBits(fused.post.out, apart.post.out));
    EXPECT_TRUE(SameBits(fused.pre.x, apart.pre.x));
    EXPECT_TRUE(SameBits(fused.pre.post, apart.pre.post));
    EXPECT_TRUE(SameBits(fused.pre.comb, apart.pre.comb));
  }
}

TEST(PostPreTest, StaysNearItsDefinition) {
  PostPreCase c(2, 3, 64), exact(2, 3, 64);
  c.Run();
  exact.Run(PostPreDefinition);
  EXPECT_TRUE(kernels::testing::WithinRelativeL2(c.pre.post, exact.pre.post, 1e-5));
  EXPECT_TRUE(kernels::testing::WithinRelativeL2(c.pre.x, exact.pre.x, 1e-3));
}

TEST(PostPreTest, RefusesOtherStreamsAndAnotherWeight) {
  PostPreCase c(3, 2, 8);
  PostPreArgs args = c.Args();
  args.pre.streams = args.post.streams;
  EXPECT_EQ(PostPre(args, Exec{}).message(), "post_pre: pre.streams is not post.out");
  args = c.Args();
  args.norm_weight.size = 7;
  const std::string message(PostPre(args, Exec{}).message());
  EXPECT_NE(message.find("norm_weight has 7 elements"), std::string::npos) << message;
  args = c.Args();
  args.pre.arithmetic = Arithmetic::kMath;
  EXPECT_EQ(PostPre(args, Exec{}).message(), "post_pre: post and pre have different arithmetics");
  args = c.Args();
  args.post.y.rows = 1;
  EXPECT_EQ(PostPre(args, Exec{}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PostPreDefinition(args, Exec{}), PostPre(args, Exec{}));
}

}  // namespace
}  // namespace isthmus::kernels
