// SPDX-License-Identifier: Apache-2.0
// isthmus-diag bench all-reduce.
#include "services/diag/all_reduce_bench.h"

#include <algorithm>
#include <barrier>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/all_reduce/all_reduce.h"
#include "kernels/all_reduce/nccl_group.h"
#include "kernels/core/peer_group.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"
#include "services/base/thread.h"
#include "services/diag/device_timing.h"
#include "services/model/device_context.h"

namespace isthmus::diag {
namespace {

using nlohmann::ordered_json;

// One way to add up rows, as every rank does it.
struct Path {
  std::string name;
  int64_t rows = 0;
  PatchSet patches = {};
  std::vector<std::vector<double>> us = {};  // Per call, [rank][replay].
};

class AllReduceBench {
 public:
  static absl::StatusOr<std::unique_ptr<AllReduceBench>> Create(const AllReduceBenchFlags& flags);
  absl::StatusOr<ordered_json> Run();

 private:
  explicit AllReduceBench(const AllReduceBenchFlags& flags)
      : flags_(flags), together_(flags.ranks) {}
  absl::Status RunRank(int rank);

  const AllReduceBenchFlags flags_;
  std::barrier<> together_;
  std::vector<int> devices_;
  std::unique_ptr<kernels::PeerGroup> group_;
  std::unique_ptr<kernels::NcclGroup> nccl_;
  std::vector<Path> paths_;
  std::string device_name_;
};

absl::StatusOr<std::unique_ptr<AllReduceBench>> AllReduceBench::Create(
    const AllReduceBenchFlags& flags) {
  std::unique_ptr<AllReduceBench> out(new AllReduceBench(flags));
  const bool is_real = kernels::IsRealDevice();
  if (is_real && kernels::NumDevices() < flags.ranks) {
    return absl::NotFoundError(
        absl::StrCat("all-reduce of ", flags.ranks, " ranks, GPUs: ", kernels::NumDevices()));
  }
  const int64_t most_rows = *std::max_element(flags.rows.begin(), flags.rows.end());
  const int64_t slot_bytes = (4 * most_rows * flags.hidden + 255) / 256 * 256;
  for (int r = 0; r < flags.ranks; ++r) out->devices_.push_back(is_real ? r : 0);
  ISTHMUS_ASSIGN_OR_RETURN(out->group_, kernels::PeerGroup::Create({.ranks = flags.ranks,
                                                                    .devices = out->devices_,
                                                                    .slot_bytes = slot_bytes,
                                                                    .timeout = absl::Seconds(30)}));
  if (kernels::NcclGroup::IsBuiltIn() && is_real) {
    ISTHMUS_ASSIGN_OR_RETURN(out->nccl_, kernels::NcclGroup::Create(out->devices_));
    for (int r = 0; r < flags.ranks; ++r) out->group_->communicator(r).nccl = out->nccl_->handle(r);
  }
  for (const int64_t rows : flags.rows) {
    for (const bool is_patched : {false, true}) {
      std::map<std::string, bool> config;
      for (const Patch* patch : kernels::AllReducePatches()) {
        config[std::string(patch->name)] = is_patched;
      }
      Path path = {.name = is_patched              ? "all_reduce.one_shot"
                           : out->nccl_ != nullptr ? "nccl"
                                                   : "plain kernels",
                   .rows = rows};
      ISTHMUS_ASSIGN_OR_RETURN(path.patches,
                               PatchSet::Resolve(kernels::AllReducePatches(), config));
      path.us.resize(static_cast<size_t>(flags.ranks));
      out->paths_.push_back(std::move(path));
    }
  }
  return out;
}

// What every rank does at the same time as the others.
absl::Status AllReduceBench::RunRank(int rank) {
  const auto own = static_cast<size_t>(rank);
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<model::DeviceContext> device,
                           model::DeviceContext::Open(devices_[own]));
  if (rank == 0) device_name_ = device->properties().name;
  kernels::Exec exec = device->exec();
  exec.phase = kPhaseDecode;
  exec.communicator = &group_->communicator(rank);
  std::vector<kernels::DeviceBuffer> buffers;
  std::vector<kernels::DeviceGraph> graphs;
  for (const Path& path : paths_) {
    ISTHMUS_ASSIGN_OR_RETURN(kernels::DeviceBuffer buffer,
                             kernels::DeviceBuffer::Allocate(4 * path.rows * flags_.hidden));
    ISTHMUS_RETURN_IF_ERROR(
        kernels::FillDevice(buffer.data(), 0, buffer.bytes(), device->stream().get()));
    const kernels::MatrixView x = kernels::F32Matrix(buffer.as<float>(), path.rows, flags_.hidden);
    buffers.push_back(std::move(buffer));
    exec.patches = &path.patches;
    const auto chain = [&]() -> absl::Status {
      for (int i = 0; i < flags_.calls; ++i) {
        ISTHMUS_RETURN_IF_ERROR(kernels::AllReduce(
            {.x = x, .out = x, .wire = kernels::DType::kBf16, .round_output = true}, exec));
      }
      return absl::OkStatus();
    };
    together_.arrive_and_wait();
    ISTHMUS_ASSIGN_OR_RETURN(kernels::DeviceGraph graph, CaptureGraph(chain, device->stream()));
    graphs.push_back(std::move(graph));
  }
  for (int round = 0; round < flags_.rounds; ++round) {
    for (size_t p = 0; p < paths_.size(); ++p) {
      for (int replay = 0; replay <= flags_.replays; ++replay) {
        together_.arrive_and_wait();
        ISTHMUS_ASSIGN_OR_RETURN(const double ms, TimeReplay(graphs[p], exec, device->stream()));
        if (replay > 0) paths_[p].us[own].push_back(ms * 1e3 / flags_.calls);
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ordered_json> AllReduceBench::Run() {
  std::vector<absl::Status> results(static_cast<size_t>(flags_.ranks));
  {
    std::vector<Thread> threads;
    threads.reserve(results.size());
    for (int r = 0; r < flags_.ranks; ++r) {
      threads.emplace_back(RealClock(), [this, r, &results] {
        results[static_cast<size_t>(r)] = RunRank(r);
        if (!results[static_cast<size_t>(r)].ok()) together_.arrive_and_drop();
      });
    }
    for (Thread& thread : threads) thread.Join();
  }
  for (const absl::Status& result : results) ISTHMUS_RETURN_IF_ERROR(result);
  ordered_json sizes = ordered_json::array();
  for (const Path& path : paths_) {
    std::vector<double> shortest;  // The rank that came last waited for nobody.
    for (size_t i = 0; i < path.us[0].size(); ++i) {
      double least = path.us[0][i];
      for (const std::vector<double>& of_rank : path.us) least = std::min(least, of_rank[i]);
      shortest.push_back(least);
    }
    const double us = MedianOf(shortest);
    const int64_t bytes = 2 * path.rows * flags_.hidden;
    std::cout << absl::StreamFormat("%7d bytes %-22s %8.2f us a call\n", bytes, path.name, us);
    std::cout.flush();
    sizes.push_back({{"bytes", bytes}, {"path", path.name}, {"us", us}});
  }
  return ordered_json{{"bench", "all_reduce"},
                      {"device", device_name_},
                      {"ranks", flags_.ranks},
                      {"wire", "bf16"},
                      {"method", absl::StrCat("chain of ", flags_.calls, " calls in one graph")},
                      {"sizes", std::move(sizes)}};
}

}  // namespace

absl::StatusOr<ordered_json> RunAllReduceBench(const AllReduceBenchFlags& flags) {
  if (flags.ranks < 2 || flags.ranks > kernels::kMaxRanks || flags.rows.empty() ||
      *std::min_element(flags.rows.begin(), flags.rows.end()) < 1 || flags.calls < 1 ||
      flags.rounds < 1 || flags.replays < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks ", flags.ranks, " (2 to ", kernels::kMaxRanks, "), ", flags.rows.size(),
                     " numbers of rows, calls ", flags.calls, ", rounds ", flags.rounds,
                     ", replays ", flags.replays, ": one is out of range"));
  }
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<AllReduceBench> bench,
                           AllReduceBench::Create(flags));
  return bench->Run();
}

}  // namespace isthmus::diag
