// SPDX-License-Identifier: Apache-2.0
// isthmus-diag bench sampling.
#include "services/diag/sampling_bench.h"

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/core/workspace.h"
#include "kernels/random_fill/random_fill.h"
#include "kernels/sampling/sampling.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"
#include "services/base/thread_pool.h"
#include "services/diag/device_timing.h"
#include "services/model/device_context.h"

namespace isthmus::diag {
namespace {

using nlohmann::ordered_json;

// How all rows of a batch are drawn.
struct Draw {
  const char* name;
  float temperature;
  float top_p;
};
constexpr Draw kDraws[] = {{"greedy", 0.0f, 1.0f},
                           {"temperature 1", 1.0f, 1.0f},
                           {"temperature 1, top_p 0.95", 1.0f, 0.95f}};

// Of the device: the trusted path, and the patch in front of it.
constexpr const char* kPaths[] = {"trusted", "sampling.buckets"};

// Rows of random logits on a device, their draws there, and room for both on the host.
class DrawnRows {
 public:
  static absl::StatusOr<std::unique_ptr<DrawnRows>> Create(const model::DeviceContext& device,
                                                           int64_t rows, int64_t vocabulary,
                                                           const Draw& draw);

  absl::Status DrawOnDevice(const kernels::Exec& exec) const {
    return kernels::SampleBatch(args_, exec);
  }
  absl::Status CopyTokens(const kernels::Exec& exec) const {
    return kernels::CopyToHost(host_tokens_.data(), args_.tokens, 4 * rows(), exec.stream);
  }
  absl::Status CopyLogits(const kernels::Exec& exec) const {
    return kernels::CopyToHost(host_logits_.data(), logits_.data(), 4 * rows() * args_.logits.cols,
                               exec.stream);
  }
  // A row at a time on each thread, as an engine draws.
  absl::StatusOr<std::vector<int32_t>> DrawOnHost(ThreadPool& threads);

  int64_t rows() const { return args_.logits.rows; }
  const int32_t* tokens() const { return host_tokens_.as<int32_t>(); }

 private:
  explicit DrawnRows(const Draw& draw) : draw_(draw) {}

  const Draw draw_;
  kernels::DeviceBuffer logits_;
  kernels::DeviceBuffer parameters_;  // Seeds, counters, then four lists of four bytes each.
  kernels::DeviceBuffer tokens_;
  kernels::PinnedBuffer host_logits_;
  kernels::PinnedBuffer host_tokens_;
  kernels::SamplingBatchArgs args_;
  std::vector<kernels::Workspace> workspaces_;  // One per thread.
};

absl::StatusOr<std::unique_ptr<DrawnRows>> DrawnRows::Create(const model::DeviceContext& device,
                                                             int64_t rows, int64_t vocabulary,
                                                             const Draw& draw) {
  std::unique_ptr<DrawnRows> out(new DrawnRows(draw));
  const int64_t logit_bytes = 4 * rows * vocabulary;
  const int64_t parameter_bytes = 32 * rows;
  ISTHMUS_ASSIGN_OR_RETURN(out->logits_, kernels::DeviceBuffer::Allocate(logit_bytes));
  ISTHMUS_ASSIGN_OR_RETURN(out->parameters_, kernels::DeviceBuffer::Allocate(parameter_bytes));
  ISTHMUS_ASSIGN_OR_RETURN(out->tokens_, kernels::DeviceBuffer::Allocate(4 * rows));
  ISTHMUS_ASSIGN_OR_RETURN(out->host_logits_, kernels::PinnedBuffer::Allocate(logit_bytes));
  ISTHMUS_ASSIGN_OR_RETURN(out->host_tokens_, kernels::PinnedBuffer::Allocate(4 * rows));
  ISTHMUS_RETURN_IF_ERROR(
      kernels::RandomFill({.to = out->logits_.data(),
                           .records = rows * vocabulary,
                           .first = {.kind = kernels::RandomKind::kF32, .bytes = 4, .limit = 8.0f},
                           .seed = 11},
                          device.exec()));
  ISTHMUS_ASSIGN_OR_RETURN(const kernels::PinnedBuffer staged,
                           kernels::PinnedBuffer::Allocate(parameter_bytes));
  const auto count = static_cast<size_t>(rows);
  std::fill_n(staged.as<uint64_t>(), 2 * count, uint64_t{0});
  for (size_t r = 0; r < count; ++r) staged.as<uint64_t>()[r] = r + 1;
  float* const lists = staged.as<float>() + 4 * count;
  std::fill_n(lists, count, draw.temperature);
  std::fill_n(lists + count, count, draw.top_p);
  std::fill_n(lists + 2 * count, 2 * count, 0.0f);  // No top_k, no min_p.
  ISTHMUS_RETURN_IF_ERROR(kernels::CopyToDevice(out->parameters_.data(), staged.data(),
                                                parameter_bytes, device.exec().stream));
  ISTHMUS_RETURN_IF_ERROR(device.stream().Synchronise());
  const auto* const seeds = out->parameters_.as<uint64_t>();
  const auto* const floats = out->parameters_.as<float>() + 4 * count;
  out->args_ = {.logits = kernels::F32Matrix(out->logits_.as<float>(), rows, vocabulary),
                .temperature = floats,
                .top_p = floats + count,
                .top_k = out->parameters_.as<int32_t>() + 6 * count,
                .min_p = floats + 3 * count,
                .seed = seeds,
                .counter = seeds + count,
                .tokens = out->tokens_.as<int32_t>()};
  return out;
}

absl::StatusOr<std::vector<int32_t>> DrawnRows::DrawOnHost(ThreadPool& threads) {
  if (workspaces_.empty()) workspaces_.resize(static_cast<size_t>(threads.num_threads()));
  std::vector<absl::StatusOr<int32_t>> drawn(static_cast<size_t>(rows()), 0);
  const auto draw = [&](int64_t begin, int64_t end, int thread) {
    kernels::Exec exec;
    exec.workspace = &workspaces_[static_cast<size_t>(thread)];
    for (int64_t r = begin; r < end; ++r) {
      const float* const row = host_logits_.as<float>() + r * args_.logits.cols;
      drawn[static_cast<size_t>(r)] =
          kernels::Sample({.logits = kernels::F32Vector(row, args_.logits.cols),
                           .temperature = draw_.temperature,
                           .top_p = draw_.top_p,
                           .seed = static_cast<uint64_t>(r + 1)},
                          exec);
    }
  };
  threads.ParallelFor(rows(), 1, draw);
  std::vector<int32_t> tokens;
  for (const absl::StatusOr<int32_t>& token : drawn) {
    ISTHMUS_RETURN_IF_ERROR(token.status());
    tokens.push_back(*token);
  }
  return tokens;
}

double MicrosecondsSince(absl::Time start) {
  return absl::ToDoubleMicroseconds(RealClock().Now() - start);
}

// The median of all but the first, which uploads a graph or grows scratch memory.
double SteadyMedian(std::vector<double> times) {
  times.erase(times.begin());
  return MedianOf(std::move(times));
}

// The kernel of one path, and the wait of an engine for its tokens.
absl::StatusOr<ordered_json> TimeDevice(const model::DeviceContext& device, const DrawnRows& rows,
                                        absl::string_view path, int rounds) {
  std::map<std::string, bool> config;
  for (const Patch* patch : kernels::SamplingPatches()) {
    config[std::string(patch->name)] = patch->name == path;
  }
  ISTHMUS_ASSIGN_OR_RETURN(const PatchSet patches,
                           PatchSet::Resolve(kernels::SamplingPatches(), config));
  kernels::Exec exec = device.exec();
  exec.phase = kPhaseDecode;
  exec.patches = &patches;
  const auto work = [&] { return rows.DrawOnDevice(exec); };
  ISTHMUS_ASSIGN_OR_RETURN(const kernels::DeviceGraph graph, CaptureGraph(work, device.stream()));
  std::vector<double> kernel_us;
  std::vector<double> wait_us;
  for (int round = 0; round <= rounds; ++round) {
    ISTHMUS_ASSIGN_OR_RETURN(const double ms, TimeReplay(graph, exec, device.stream()));
    kernel_us.push_back(ms * 1e3);
    const absl::Time start = RealClock().Now();
    ISTHMUS_RETURN_IF_ERROR(graph.Replay(exec.stream));
    ISTHMUS_RETURN_IF_ERROR(rows.CopyTokens(exec));
    ISTHMUS_RETURN_IF_ERROR(device.stream().Synchronise());
    wait_us.push_back(MicrosecondsSince(start));
  }
  return ordered_json{{"path", std::string(path)},
                      {"kernel_us", SteadyMedian(std::move(kernel_us))},
                      {"device_us", SteadyMedian(std::move(wait_us))}};
}

// The copy of the rows, and their draws.
absl::StatusOr<ordered_json> TimeHost(const model::DeviceContext& device, DrawnRows& rows,
                                      ThreadPool& threads, int rounds,
                                      std::vector<int32_t>* tokens) {
  std::vector<double> copy_us;
  std::vector<double> draw_us;
  for (int round = 0; round <= rounds; ++round) {
    absl::Time start = RealClock().Now();
    ISTHMUS_RETURN_IF_ERROR(rows.CopyLogits(device.exec()));
    ISTHMUS_RETURN_IF_ERROR(device.stream().Synchronise());
    copy_us.push_back(MicrosecondsSince(start));
    start = RealClock().Now();
    ISTHMUS_ASSIGN_OR_RETURN(*tokens, rows.DrawOnHost(threads));
    draw_us.push_back(MicrosecondsSince(start));
  }
  return ordered_json{{"copy_us", SteadyMedian(std::move(copy_us))},
                      {"draw_us", SteadyMedian(std::move(draw_us))}};
}

absl::StatusOr<ordered_json> TimeDraw(const model::DeviceContext& device, ThreadPool& threads,
                                      const SamplingBenchFlags& flags, int64_t num_rows,
                                      const Draw& draw) {
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<DrawnRows> rows,
                           DrawnRows::Create(device, num_rows, flags.vocabulary, draw));
  std::vector<int32_t> tokens;
  ISTHMUS_ASSIGN_OR_RETURN(ordered_json result,
                           TimeHost(device, *rows, threads, flags.rounds, &tokens));
  result["rows"] = num_rows;
  result["draw"] = draw.name;
  std::cout << absl::StreamFormat("%4d rows, %-26s host: copy %8.1f us, draws %9.1f us", num_rows,
                                  draw.name, result["copy_us"].get<double>(),
                                  result["draw_us"].get<double>());
  ordered_json paths = ordered_json::array();
  for (const char* const path : kPaths) {
    ISTHMUS_ASSIGN_OR_RETURN(ordered_json one, TimeDevice(device, *rows, path, flags.rounds));
    const int64_t num_alike = std::inner_product(tokens.begin(), tokens.end(), rows->tokens(),
                                                 int64_t{0}, std::plus<>(), std::equal_to<>());
    if (draw.temperature == 0.0f && num_alike != num_rows) {
      return absl::InternalError(
          absl::StrCat(path, ": of ", num_rows, " greedy tokens ", num_alike, " are the host's"));
    }
    one["tokens_alike"] = num_alike;
    std::cout << absl::StreamFormat("; %s: %9.1f us (kernel %9.1f), %d alike", path,
                                    one["device_us"].get<double>(), one["kernel_us"].get<double>(),
                                    num_alike);
    paths.push_back(std::move(one));
  }
  std::cout << "\n";
  std::cout.flush();
  result["paths"] = std::move(paths);
  return result;
}

}  // namespace

absl::StatusOr<ordered_json> RunSamplingBench(const SamplingBenchFlags& flags) {
  if (flags.rows.empty() || *std::ranges::min_element(flags.rows) < 1 || flags.vocabulary < 1 ||
      flags.rounds < 1 || flags.threads < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.rows.size(), " numbers of rows (each from 1), vocabulary ",
                     flags.vocabulary, " (from 1), rounds ", flags.rounds, " (from 1), threads ",
                     flags.threads, " (from 0): one is out of range"));
  }
  ISTHMUS_ASSIGN_OR_RETURN(const int number, model::ParseDevice(flags.device));
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<model::DeviceContext> device,
                           model::DeviceContext::Open(number));
  const int processors = static_cast<int>(std::thread::hardware_concurrency());
  ThreadPool threads(flags.threads > 0 ? flags.threads : std::clamp(processors, 1, 64));
  ordered_json results = ordered_json::array();
  for (const int64_t rows : flags.rows) {
    for (const Draw& draw : kDraws) {
      ISTHMUS_ASSIGN_OR_RETURN(ordered_json result, TimeDraw(*device, threads, flags, rows, draw));
      results.push_back(std::move(result));
    }
  }
  return ordered_json{{"bench", "sampling"},
                      {"device", device->properties().name},
                      {"vocabulary", flags.vocabulary},
                      {"threads", threads.num_threads()},
                      {"results", std::move(results)}};
}

}  // namespace isthmus::diag
