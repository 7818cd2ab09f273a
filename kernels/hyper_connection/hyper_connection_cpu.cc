// SPDX-License-Identifier: Apache-2.0
// The trusted CPU path of the hyper-connections. The mix is one GEMM with 24 outputs; what follows
// runs over groups of 16 tokens, one per lane, because 20 Sinkhorn passes over one 4 x 4 matrix are
// a chain of dependent divisions, while those of 8 or 16 tokens overlap in the divider. Sums over
// the hidden axis are elementwise, so no bit depends on the group, the batch or the SIMD target.
//
// Letters: t token, m i j stream, d element of hidden, k mix.
#include <algorithm>
#include <cmath>

#include "kernels/core/gemm.h"
#include "kernels/core/math.h"
#include "kernels/core/scratch_count.h"
#include "kernels/core/workspace.h"
#include "kernels/hyper_connection/hyper_connection_variants.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/hyper_connection/hyper_connection_cpu.cc"
#include <hwy/foreach_target.h>
#include "kernels/core/simd-inl.h"
// clang-format on

#ifndef ISTHMUS_KERNELS_HYPER_CONNECTION_CPU_ONCE_
#define ISTHMUS_KERNELS_HYPER_CONNECTION_CPU_ONCE_
namespace isthmus::kernels {
namespace {

constexpr int M = kNumStreams;
constexpr int64_t kGroup = 16;

// The mixes of a group of tokens and what they split into, lane by lane: [row][token of the group].
struct MixGroup {
  alignas(64) float mixes[kNumMixes][kGroup] = {};
  alignas(64) float pre[M][kGroup];
  alignas(64) float post[M][kGroup];
  alignas(64) float comb[M * M][kGroup];
};

struct SplitParams {
  const float* scale;
  const float* base;
  int iterations;
  float epsilon;
};

}  // namespace
}  // namespace isthmus::kernels
#endif  // ISTHMUS_KERNELS_HYPER_CONNECTION_CPU_ONCE_

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {
namespace {

// mix * scale + base in two roundings, as the author's code has it.
HWY_INLINE VF Affine(const float* mix, float scale, float base) {
  const DF d;
  return hn::Add(hn::Mul(hn::Load(d, mix), hn::Set(d, scale)), hn::Set(d, base));
}

// Sum of c[first], c[first + step], ... (4 of them), from the left.
HWY_INLINE VF SumOfFour(const VF* c, int first, int step) {
  return hn::Add(hn::Add(hn::Add(c[first], c[first + step]), c[first + 2 * step]),
                 c[first + 3 * step]);
}

// Divides each of the four lines of c (rows: start 4, step 1; columns: start 1, step 4) by its sum
// plus epsilon.
HWY_INLINE void DivideLines(int start, int step, VF epsilon, VF* c) {
  for (int line = 0; line < M; ++line) {
    const int first = line * start;
    const VF sum = hn::Add(SumOfFour(c, first, step), epsilon);
    for (int i = 0; i < M; ++i) c[first + i * step] = hn::Div(c[first + i * step], sum);
  }
}

HWY_INLINE void SoftmaxRow(VF epsilon, VF* c) {
  const VF largest = hn::Max(hn::Max(c[0], c[1]), hn::Max(c[2], c[3]));
  for (int k = 0; k < M; ++k) c[k] = ExpV(hn::Sub(c[k], largest));
  const VF sum = SumOfFour(c, 0, 1);
  for (int k = 0; k < M; ++k) c[k] = hn::Add(hn::Div(c[k], sum), epsilon);
}

// Splits the mixes of lanes [lane, lane + kLanes) (specification 2.3).
void SplitLanes(const SplitParams& params, size_t lane, MixGroup* group) {
  const DF d;
  const VF epsilon = hn::Set(d, params.epsilon);
  for (int j = 0; j < M; ++j) {
    const VF pre = SigmoidV(Affine(group->mixes[j] + lane, params.scale[0], params.base[j]));
    hn::Store(hn::Add(pre, epsilon), d, group->pre[j] + lane);
    const VF post =
        SigmoidV(Affine(group->mixes[M + j] + lane, params.scale[1], params.base[M + j]));
    hn::Store(hn::Add(post, post), d, group->post[j] + lane);
  }
  VF c[M * M];
  for (int i = 0; i < M * M; ++i) {
    c[i] = Affine(group->mixes[2 * M + i] + lane, params.scale[2], params.base[2 * M + i]);
  }
  for (int64_t j = 0; j < M; ++j) SoftmaxRow(epsilon, c + M * j);
  DivideLines(1, M, epsilon, c);
  for (int pass = 1; pass < params.iterations; ++pass) {
    DivideLines(M, 1, epsilon, c);
    DivideLines(1, M, epsilon, c);
  }
  for (int i = 0; i < M * M; ++i) hn::Store(c[i], d, group->comb[i] + lane);
}

void SplitGroup(const SplitParams& params, int64_t tokens, MixGroup* group) {
  for (size_t lane = 0; lane < static_cast<size_t>(tokens); lane += kLanes) {
    SplitLanes(params, lane, group);
  }
}

// rsqrt(mean(v^2) + epsilon)
HWY_INLINE float InverseRms(const float* v, int64_t n, float epsilon) {
  const float mean = Dot16(v, v, static_cast<size_t>(n)) / static_cast<float>(n);
  return 1.0f / std::sqrt(mean + epsilon);
}

HWY_INLINE F32x16 RoundWhen(bool round, const F32x16& x) { return round ? RoundBf16x16(x) : x; }

// x[d] = round(sum_m pre[m] v[m, d]), m ascending.
HWY_INLINE void Combine(const float* v, const float* pre, int64_t hidden, bool round, float* x) {
  F32x16 weight[M];
  for (int m = 0; m < M; ++m) weight[m] = Set16(pre[m]);
  const auto n = static_cast<size_t>(hidden);
  size_t k = 0;
  for (; k + 16 <= n; k += 16) {
    F32x16 sum = Mul16(weight[0], Load16(v + k));
    for (int m = 1; m < M; ++m) sum = MulAdd16(weight[m], Load16(v + m * n + k), sum);
    Store16(RoundWhen(round, sum), x + k);
  }
  if (k == n) return;
  F32x16 sum = Mul16(weight[0], LoadFirst16(v + k, n - k));
  for (int m = 1; m < M; ++m) sum = MulAdd16(weight[m], LoadFirst16(v + m * n + k, n - k), sum);
  StoreFirst16(RoundWhen(round, sum), x + k, n - k);
}

// Tokens [begin, end), at most a group. mix: [tokens, 24], not yet scaled by the inverse rms.
void PreGroup(const HyperConnectionPreArgs& args, const float* mix, int64_t begin, int64_t end) {
  const bool round = args.arithmetic == Arithmetic::kReference;
  MixGroup group;
  for (int64_t t = begin; t < end; ++t) {
    const float r = InverseRms(args.streams.f32(t), args.streams.cols, args.epsilon);
    for (int k = 0; k < kNumMixes; ++k) group.mixes[k][t - begin] = r * mix[t * kNumMixes + k];
  }
  SplitGroup({args.scale.f32(), args.base.f32(), args.sinkhorn_iterations, args.hc_epsilon},
             end - begin, &group);
  for (int64_t t = begin; t < end; ++t) {
    float pre[M];
    for (int m = 0; m < M; ++m) {
      pre[m] = group.pre[m][t - begin];
      args.post.f32(t)[m] = group.post[m][t - begin];
    }
    for (int i = 0; i < M * M; ++i) args.comb.f32(t)[i] = group.comb[i][t - begin];
    Combine(args.streams.f32(t), pre, args.x.cols, round, args.x.f32(t));
  }
}

// post[j] y + sum_i comb[i][j] v[i], i ascending.
HWY_INLINE F32x16 MixInto(int j, const float* post, const float* comb, const F32x16& y,
                          const F32x16* v) {
  F32x16 sum = Mul16(Set16(post[j]), y);
  for (int i = 0; i < M; ++i) sum = MulAdd16(Set16(comb[i * M + j]), v[i], sum);
  return sum;
}

// Sixteen elements of all four streams are read before any of them is written: out may be streams.
void PostToken(const HyperConnectionPostArgs& args, int64_t t) {
  const bool round = args.arithmetic == Arithmetic::kReference;
  const auto n = static_cast<size_t>(args.y.cols);
  const float* y = args.y.f32(t);
  const float* streams = args.streams.f32(t);
  const float* post = args.post.f32(t);
  const float* comb = args.comb.f32(t);
  float* out = args.out.f32(t);
  F32x16 v[M];
  size_t k = 0;
  for (; k + 16 <= n; k += 16) {
    for (int i = 0; i < M; ++i) v[i] = Load16(streams + i * n + k);
    const F32x16 row = Load16(y + k);
    for (int j = 0; j < M; ++j) {
      Store16(RoundWhen(round, MixInto(j, post, comb, row, v)), out + j * n + k);
    }
  }
  if (k == n) return;
  for (int i = 0; i < M; ++i) v[i] = LoadFirst16(streams + i * n + k, n - k);
  const F32x16 row = LoadFirst16(y + k, n - k);
  for (int j = 0; j < M; ++j) {
    StoreFirst16(RoundWhen(round, MixInto(j, post, comb, row, v)), out + j * n + k, n - k);
  }
}

// mix: [tokens, 4], not yet scaled by the inverse rms.
void HeadToken(const HyperConnectionHeadArgs& args, const float* mix, int64_t t) {
  const float r = InverseRms(args.streams.f32(t), args.streams.cols, args.epsilon);
  float pre[M];
  for (int m = 0; m < M; ++m) {
    const float scaled = r * mix[t * M + m];
    pre[m] = Sigmoid(scaled * args.scale.f32()[0] + args.base.f32()[m]) + args.hc_epsilon;
  }
  Combine(args.streams.f32(t), pre, args.x.cols, args.arithmetic == Arithmetic::kReference,
          args.x.f32(t));
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace isthmus::kernels {
namespace {

HWY_EXPORT(SplitGroup);
HWY_EXPORT(PreGroup);
HWY_EXPORT(PostToken);
HWY_EXPORT(HeadToken);

// Elements of the streams that are worth handing to another thread.
constexpr int64_t kGrainElements = 16384;

int64_t TokenGrain(int64_t columns) { return std::max<int64_t>(1, kGrainElements / columns); }

}  // namespace

absl::Status LaunchHyperConnectionPreCpu(const HyperConnectionPreArgs& args, const Exec& exec) {
  const int64_t tokens = args.streams.rows;
  Workspace::Scope scope(exec.workspace);
  auto* mix = scope.Take<float>(tokens * kNumMixes);
  Gemm(args.streams, args.fn, F32Matrix(mix, tokens, kNumMixes), exec);
  const auto group = HWY_DYNAMIC_DISPATCH(PreGroup);
  // A few wide rows make a smaller group, so that a batch of them still fills the threads.
  const int64_t size = std::min(kGroup, TokenGrain(args.streams.cols));
  const int64_t groups = (tokens + size - 1) / size;
  ParallelFor(exec, groups, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t g = begin; g < end; ++g) {
      group(args, mix, g * size, std::min(tokens, (g + 1) * size));
    }
  });
  return absl::OkStatus();
}

absl::Status LaunchHyperConnectionPostCpu(const HyperConnectionPostArgs& args, const Exec& exec) {
  const auto token = HWY_DYNAMIC_DISPATCH(PostToken);
  ParallelFor(exec, args.y.rows, TokenGrain(args.streams.cols),
              [&](int64_t begin, int64_t end, int) {
                for (int64_t t = begin; t < end; ++t) token(args, t);
              });
  return absl::OkStatus();
}

absl::Status LaunchHyperConnectionHeadCpu(const HyperConnectionHeadArgs& args, const Exec& exec) {
  const int64_t tokens = args.streams.rows;
  Workspace::Scope scope(exec.workspace);
  auto* mix = scope.Take<float>(tokens * kNumStreams);
  Gemm(args.streams, args.fn, F32Matrix(mix, tokens, kNumStreams), exec);
  const auto token = HWY_DYNAMIC_DISPATCH(HeadToken);
  ParallelFor(exec, tokens, TokenGrain(args.streams.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) token(args, mix, t);
  });
  return absl::OkStatus();
}

int64_t HyperConnectionScratchBytes(int64_t tokens, int64_t hidden, int threads) {
  ScratchCount scratch;
  scratch.Take<float>(tokens * kNumMixes);  // The head has fewer.
  const GemmInput streams = {tokens, kNumStreams * hidden};
  scratch.Lend(GemmScratchBytes({&streams, 1}, threads));
  return scratch.peak_bytes();
}

void SplitMixes(const float* mixes, const float* scale, const float* base, int sinkhorn_iterations,
                float hc_epsilon, float* pre, float* post, float* comb) {
  MixGroup group;
  for (int k = 0; k < kNumMixes; ++k) group.mixes[k][0] = mixes[k];
  HWY_DYNAMIC_DISPATCH(SplitGroup)({scale, base, sinkhorn_iterations, hc_epsilon}, 1, &group);
  for (int j = 0; j < M; ++j) {
    pre[j] = group.pre[j][0];
    post[j] = group.post[j][0];
  }
  for (int i = 0; i < M * M; ++i) comb[i] = group.comb[i][0];
}

}  // namespace isthmus::kernels
#endif  // HWY_ONCE
