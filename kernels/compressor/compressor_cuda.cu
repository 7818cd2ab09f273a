// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of the compressor: one launch pools, finishes and inserts the entries that
// complete, a block each; a second one, after all of them have read the ring, writes the rows that
// later entries read. The order of every sum is the CPU's. Bound by latency: a block's chain is
// the rows of its entry, 8 or 128, twice.
#include "kernels/compressor/compressor_device.cuh"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 256;

// Grid: [most entries that complete in a sequence, sequences]. Block: kThreads. Shared memory: dim
// floats, dynamic.
__global__ __launch_bounds__(kThreads, 1) void InsertEntry(CompressorParams params) {
  __shared__ float partial[16];
  auto* z = reinterpret_cast<float*>(DynamicShared());
  const int64_t s = blockIdx.y;
  const DeviceSequence& seq = params.batch.sequences[s];
  const int64_t j = seq.start_position / params.ratio + blockIdx.x;
  if (j >= (seq.start_position + seq.num_rows) / params.ratio) return;
  for (int d = static_cast<int>(threadIdx.x); d < params.dim; d += kThreads) {
    const float pooled = PoolChannel(params, seq, j, d);
    z[d] = params.is_reference ? RoundBf16(pooled) : pooled;
  }
  __syncthreads();
  float* entry_out = nullptr;
  if (params.entries != nullptr) {
    entry_out = params.entries + EntryNumber(params, s, j) * params.dim;
  }
  FinishEntry(params, seq, j, z, partial, entry_out);
}

// Grid: rows. Block: kThreads. Shared memory: none.
__global__ __launch_bounds__(kThreads, 1) void KeepRows(CompressorParams params) {
  const int64_t r = blockIdx.x;
  const int32_t s = params.batch.row_sequence[r];
  if (s < 0) return;
  KeepRow(params, params.batch.sequences[s], r, params.batch.row_position[r],
          static_cast<int>(threadIdx.x), kThreads);
}

}  // namespace

CompressorParams ParamsOf(const CompressorArgs& args) {
  return {.u = static_cast<const float*>(args.u.data),
          .g = static_cast<const float*>(args.g.data),
          .ape = static_cast<const float*>(args.ape.data),
          .norm_weight = args.norm_weight.f32(),
          .frequency = args.frequency.data(),
          .u_stride = args.u.row_stride,
          .g_stride = args.g.row_stride,
          .ape_stride = args.ape.row_stride,
          .dim = static_cast<int>(args.dim),
          .rope_dim = static_cast<int>(args.rope_dim),
          .ratio = static_cast<int>(args.ratio),
          .width = static_cast<int>(CompressorWidth(args)),
          .epsilon = args.epsilon,
          .is_index_key = args.is_index_key,
          .is_reference = args.arithmetic == Arithmetic::kReference,
          .batch = *args.device_batch,
          .entry_plane = args.entry_plane,
          .entry_kind = args.entry_kind,
          .state_plane = args.state_plane,
          .entries = args.entries};
}

absl::Status LaunchCompressorCuda(const CompressorArgs& args, const Exec& exec) {
  const DeviceBatch& batch = *args.device_batch;
  if (batch.rows == 0 || batch.num_sequences == 0) return absl::OkStatus();
  const CompressorParams params = ParamsOf(args);
  const dim3 entries(CeilDiv(batch.max_rows_per_sequence, args.ratio),
                     static_cast<unsigned>(batch.num_sequences));
  ISTHMUS_RETURN_IF_ERROR(Launch("InsertEntry",
                                 {.grid = entries,
                                  .block = dim3(kThreads),
                                  .shared_bytes = static_cast<size_t>(args.dim) * sizeof(float)},
                                 exec, InsertEntry, params));
  return Launch("KeepRows",
                {.grid = dim3(static_cast<unsigned>(batch.rows)), .block = dim3(kThreads)}, exec,
                KeepRows, params);
}

}  // namespace isthmus::kernels
