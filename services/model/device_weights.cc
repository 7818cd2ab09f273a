// SPDX-License-Identifier: Apache-2.0
#include "services/model/device_weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/weight_tiles.h"
#include "services/base/status_macros.h"
#include "services/model/layer_tensors.h"
#include "services/model/sharded_weights.h"
#include "services/model/weight_packing.h"

namespace isthmus::model {
namespace {

using kernels::WeightLayout;
using kernels::WeightView;

constexpr int64_t kStagingBytes = int64_t{32} << 20;
// Every so many-th input of the rows read back is compared.
constexpr int64_t kSampleStep = 37;

// Bytes of one row of tiles.
int64_t TileRowBytes(const WeightView& w) {
  return kernels::TilesInRow(w) * kernels::TileBytes(w.format);
}

// A lossless cast as the MXFP4 that it is; anything else as it is. `scales` keeps what is made.
WeightView AsStored(const WeightView& w, std::vector<uint8_t>* scales) {
  if (!w.is_mxfp4_cast || !InspectScales(w, /*only_sample=*/false).is_mxfp4_cast) return w;
  scales->resize(static_cast<size_t>(w.rows * (w.cols / 32)));
  WeightView out = RebuildMxfp4(w, scales->data());
  out.is_mxfp4_cast = false;
  return out;
}

// Two pinned buffers that take turns: one is filled while the other is copied.
class Staging {
 public:
  absl::Status Open() {
    ISTHMUS_ASSIGN_OR_RETURN(stream_, kernels::DeviceStream::Create());
    for (Half& half : halves_) {
      ISTHMUS_ASSIGN_OR_RETURN(half.buffer, kernels::PinnedBuffer::Allocate(kStagingBytes));
      ISTHMUS_ASSIGN_OR_RETURN(half.is_free, kernels::DeviceEvent::Create());
      ISTHMUS_RETURN_IF_ERROR(half.is_free.Record(stream_.get()));
    }
    return absl::OkStatus();
  }

  // kStagingBytes that no copy reads any more.
  absl::StatusOr<std::byte*> Next() {
    turn_ = 1 - turn_;
    while (true) {
      ISTHMUS_ASSIGN_OR_RETURN(const bool is_free, halves_[turn_].is_free.HasPassed());
      if (is_free) return halves_[turn_].buffer.data();
      std::this_thread::yield();
    }
  }
  // Copies the first `bytes` of it.
  absl::Status Send(std::byte* to, int64_t bytes) {
    ISTHMUS_RETURN_IF_ERROR(
        kernels::CopyToDevice(to, halves_[turn_].buffer.data(), bytes, stream_.get()));
    return halves_[turn_].is_free.Record(stream_.get());
  }
  absl::Status SendBytes(std::byte* to, const void* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kStagingBytes) {
      const int64_t count = std::min(kStagingBytes, bytes - at);
      ISTHMUS_ASSIGN_OR_RETURN(std::byte* const buffer, Next());
      std::memcpy(buffer, static_cast<const std::byte*>(from) + at, static_cast<size_t>(count));
      ISTHMUS_RETURN_IF_ERROR(Send(to + at, count));
    }
    return absl::OkStatus();
  }
  absl::Status ReadBack(std::vector<std::byte>* out, const std::byte* from, int64_t bytes) {
    out->resize(static_cast<size_t>(bytes));
    ISTHMUS_RETURN_IF_ERROR(kernels::CopyToHost(out->data(), from, bytes, stream_.get()));
    return stream_.Synchronise();
  }
  absl::Status Finish() { return stream_.Synchronise(); }

 private:
  struct Half {
    kernels::PinnedBuffer buffer;
    kernels::DeviceEvent is_free;
  };
  kernels::DeviceStream stream_;
  std::array<Half, 2> halves_;
  size_t turn_ = 0;
};

// Counts what Upload places.
class Counter {
 public:
  void Matrix(WeightView& w) {
    // A cast may need less, but its scales say so only once they are read.
    place_.Take(kernels::TiledBytes(w));
    place_.Take(BlockScaleBytes(w));
  }
  void Vector(kernels::VectorView& v) { place_.Take(4 * v.size); }
  void Floats(const float*&, int64_t n) { place_.Take(4 * n); }
  void Ids(std::span<const int64_t>& ids) { place_.Take(8 * static_cast<int64_t>(ids.size())); }
  void Experts(LayerWeights& w) {
    place_.Take(static_cast<int64_t>(w.experts.size() * sizeof(kernels::ExpertWeights)));
  }
  int64_t bytes() const { return place_.used(); }

 private:
  Placement place_;
};

// Copies tensors to the device and makes the views point there. Errors stay in status().
class Uploader {
 public:
  Uploader(std::byte* base, int arch, Staging* staging, ThreadPool* threads)
      : place_(base), arch_(arch), staging_(staging), threads_(threads) {}

  void Matrix(WeightView& w) {
    if (!status_.ok()) return;
    status_ = UploadMatrix(w);
  }
  void Vector(kernels::VectorView& v) { v.data = Copy(v.data, 4 * v.size); }
  void Floats(const float*& p, int64_t n) { p = reinterpret_cast<const float*>(Copy(p, 4 * n)); }
  void Ids(std::span<const int64_t>& ids) {
    ids = {reinterpret_cast<const int64_t*>(Copy(ids.data(), static_cast<int64_t>(ids.size()) * 8)),
           ids.size()};
  }
  void Experts(LayerWeights& w) {
    const auto bytes = static_cast<int64_t>(w.experts.size() * sizeof(kernels::ExpertWeights));
    w.device_experts =
        reinterpret_cast<const kernels::ExpertWeights*>(Copy(w.experts.data(), bytes));
  }
  // The embedding: rows as they are.
  void Rows(WeightView& w) { w.elements = Copy(w.elements, w.rows * w.cols * 2); }
  const absl::Status& status() const { return status_; }

 private:
  std::byte* Copy(const void* from, int64_t bytes) {
    std::byte* const to = place_.Take(bytes);
    if (status_.ok()) status_ = staging_->SendBytes(to, from, bytes);
    return to;
  }

  absl::Status UploadMatrix(WeightView& w) {
    if (w.layout != WeightLayout::kRowMajor) {
      return absl::InvalidArgumentError(
          "device weights: a matrix is packed for the CPU; load the checkpoint mapped");
    }
    std::vector<uint8_t> made_scales;
    const WeightView from = AsStored(w, &made_scales);
    std::byte* const to = place_.Take(kernels::TiledBytes(w));
    const int64_t row_bytes = TileRowBytes(from);
    const int64_t tile_rows = (from.rows + kernels::kPanelRows - 1) / kernels::kPanelRows;
    const int64_t step = std::max<int64_t>(1, kStagingBytes / row_bytes);
    for (int64_t first = 0; first < tile_rows; first += step) {
      const int64_t count = std::min(step, tile_rows - first);
      ISTHMUS_ASSIGN_OR_RETURN(std::byte* const buffer, staging_->Next());
      Tile(from, first, count, buffer);
      ISTHMUS_RETURN_IF_ERROR(staging_->Send(to + first * row_bytes, count * row_bytes));
    }
    w = from;
    w.layout = kernels::TileLayout(from.format, arch_);
    w.elements = to;
    w.scales = nullptr;
    if (const int64_t bytes = BlockScaleBytes(from); bytes > 0) {
      w.scales = reinterpret_cast<const uint8_t*>(Copy(from.scales, bytes));
    }
    ISTHMUS_RETURN_IF_ERROR(status_);
    return CompareSample(from, w, tile_rows / 2);
  }

  // Rows of tiles [first, first + count) into `out`.
  void Tile(const WeightView& w, int64_t first, int64_t count, std::byte* out) {
    const int64_t row_bytes = TileRowBytes(w);
    const auto tile = [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = (first + i) * kernels::kPanelRows;
        kernels::TileWeight(kernels::RowSlice(w, row, std::min(kernels::kPanelRows, w.rows - row)),
                            out + i * row_bytes, kernels::TileLayout(w.format, arch_));
      }
    };
    if (threads_ != nullptr) {
      threads_->ParallelFor(count, 1, tile);
    } else {
      tile(0, count, 0);
    }
  }

  // Reads one row of tiles back and unpacks some of its elements.
  absl::Status CompareSample(const WeightView& from, const WeightView& to, int64_t tile_row) {
    if (from.rows * from.cols == 0) return absl::OkStatus();
    const int64_t first = tile_row * kernels::kPanelRows;
    const WeightView rows =
        kernels::RowSlice(from, first, std::min(kernels::kPanelRows, from.rows - first));
    WeightView read = rows;
    read.layout = to.layout;
    std::vector<std::byte> tiles;
    const int64_t bytes = TileRowBytes(from);
    ISTHMUS_RETURN_IF_ERROR(staging_->ReadBack(
        &tiles, static_cast<const std::byte*>(to.elements) + tile_row * bytes, bytes));
    read.elements = tiles.data();
    for (int64_t n = 0; n < rows.rows; ++n) {
      for (int64_t k = n; k < rows.cols; k += kSampleStep) {
        const float wanted = kernels::WeightElement(rows, n, k);
        const float found = kernels::WeightElement(read, n, k);
        if (std::memcmp(&wanted, &found, sizeof(float)) == 0 &&
            kernels::WeightScale(rows, n, k) == kernels::WeightScale(read, n, k)) {
          continue;
        }
        return absl::DataLossError(absl::StrCat("device weights: element (", first + n, ", ", k,
                                                ") was ", wanted, " and came back as ", found));
      }
    }
    return absl::OkStatus();
  }

  Placement place_;
  const int arch_;
  Staging* staging_;
  ThreadPool* threads_;
  absl::Status status_;
};

// One rank's layer, its copies in `storage`; the layer as it is without a plan.
absl::StatusOr<LayerWeights> ShareOf(const Weights& whole, int layer, const ShardPlan* plan,
                                     WeightStorage* storage) {
  if (plan == nullptr) return whole.layer(layer);
  return ShardLayer(whole.config(), whole.layer(layer), *plan, storage);
}

}  // namespace

int64_t DeviceWeights::bytes() const {
  int64_t sum = 0;
  for (const kernels::DeviceBuffer& buffer : buffers_) sum += buffer.bytes();
  return sum;
}

absl::StatusOr<std::unique_ptr<DeviceWeights>> DeviceWeights::Upload(const Weights& whole,
                                                                     const ShardPlan* plan,
                                                                     ThreadPool* threads) {
  std::unique_ptr<DeviceWeights> out(new DeviceWeights());
  out->config_ = std::make_unique<ModelConfig>(whole.config());
  ISTHMUS_ASSIGN_OR_RETURN(const int current, kernels::CurrentDevice());
  ISTHMUS_ASSIGN_OR_RETURN(const kernels::DeviceProperties device, kernels::PropertiesOf(current));
  Staging staging;
  ISTHMUS_RETURN_IF_ERROR(staging.Open());
  for (int i = 0; i < out->config_->num_hidden_layers; ++i) {
    WeightStorage storage;  // Dropped once the layer is on the device.
    ISTHMUS_ASSIGN_OR_RETURN(LayerWeights layer, ShareOf(whole, i, plan, &storage));
    Counter counter;
    VisitLayer(layer, counter);
    ISTHMUS_ASSIGN_OR_RETURN(kernels::DeviceBuffer buffer,
                             kernels::DeviceBuffer::Allocate(counter.bytes()));
    Uploader uploader(buffer.data(), device.arch, &staging, threads);
    VisitLayer(layer, uploader);
    ISTHMUS_RETURN_IF_ERROR(uploader.status());
    ISTHMUS_RETURN_IF_ERROR(staging.Finish());
    out->layers_.push_back(std::move(layer));
    out->buffers_.push_back(std::move(buffer));
  }
  ModelViews& views = out->views_;
  views = whole.views();
  WeightStorage storage;
  if (plan != nullptr) {
    ISTHMUS_ASSIGN_OR_RETURN(views.head, ShardHead(whole.head(), *plan, &storage));
  }
  Counter counter;
  VisitHyperConnection(views.hc_head, counter);
  counter.Matrix(views.head);
  counter.Vector(views.norm);
  const int64_t embed_bytes = views.embed.rows * views.embed.cols * 2;
  ISTHMUS_ASSIGN_OR_RETURN(
      kernels::DeviceBuffer buffer,
      kernels::DeviceBuffer::Allocate(counter.bytes() + embed_bytes + Placement::kAlign));
  Uploader uploader(buffer.data(), device.arch, &staging, threads);
  VisitHyperConnection(views.hc_head, uploader);
  uploader.Matrix(views.head);
  uploader.Vector(views.norm);
  uploader.Rows(views.embed);
  ISTHMUS_RETURN_IF_ERROR(uploader.status());
  ISTHMUS_RETURN_IF_ERROR(staging.Finish());
  out->buffers_.push_back(std::move(buffer));
  views.config = out->config_.get();
  views.layers = out->layers_;
  views.on_device = true;
  return out;
}

}  // namespace isthmus::model
