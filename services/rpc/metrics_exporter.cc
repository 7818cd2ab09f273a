// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/metrics_exporter.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <map>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/log.h"
#include "services/base/version.h"
#include "services/rpc/channel.h"

namespace isthmus::rpc {
namespace {

prometheus::Labels NamedLabels(const MetricSpec& spec, std::initializer_list<std::string> values) {
  ISTHMUS_CHECK(values.size() == spec.labels.size());
  prometheus::Labels labels;
  size_t i = 0;
  for (const std::string& value : values) labels[std::string(spec.labels[i++])] = value;
  return labels;
}

}  // namespace

struct MetricsExporter::State {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  std::map<const MetricSpec*, prometheus::Family<prometheus::Counter>*> counters;
  std::map<const MetricSpec*, prometheus::Family<prometheus::Gauge>*> gauges;
  std::map<const MetricSpec*, prometheus::Family<prometheus::Histogram>*> histograms;
  std::unique_ptr<prometheus::Exposer> exposer;

  void Build(const MetricSpec& spec) {
    const std::string name(spec.name);
    const std::string help(spec.help);
    const bool is_plain = spec.labels.empty();
    if (spec.kind == MetricKind::kCounter) {
      counters[&spec] = &prometheus::BuildCounter().Name(name).Help(help).Register(*registry);
      if (is_plain) counters[&spec]->Add({});
    } else if (spec.kind == MetricKind::kGauge) {
      gauges[&spec] = &prometheus::BuildGauge().Name(name).Help(help).Register(*registry);
      if (is_plain) gauges[&spec]->Add({});
    } else {
      histograms[&spec] = &prometheus::BuildHistogram().Name(name).Help(help).Register(*registry);
      if (is_plain) histograms[&spec]->Add({}, Buckets(spec));
    }
  }

  static prometheus::Histogram::BucketBoundaries Buckets(const MetricSpec& spec) {
    return {spec.buckets.begin(), spec.buckets.end()};
  }
};

MetricsExporter::MetricsExporter(absl::string_view process,
                                 std::span<const MetricSpec* const> specs)
    : state_(std::make_unique<State>()) {
  for (const MetricSpec* spec : specs) state_->Build(*spec);
  prometheus::BuildGauge()
      .Name("isthmus_build_info")
      .Help("Always 1; the labels say which build this process is.")
      .Register(*state_->registry)
      .Add({{"process", std::string(process)},
            {"version", std::string(SemanticVersion())},
            {"commit", std::string(GitCommit())}})
      .Set(1);
}

MetricsExporter::~MetricsExporter() = default;

void MetricsExporter::Add(const MetricSpec& spec, double value,
                          std::initializer_list<std::string> labels) {
  if (spec.kind == MetricKind::kGauge) {
    const auto gauge = state_->gauges.find(&spec);
    ISTHMUS_CHECK(gauge != state_->gauges.end());
    gauge->second->Add(NamedLabels(spec, labels)).Increment(value);
    return;
  }
  const auto found = state_->counters.find(&spec);
  ISTHMUS_CHECK(found != state_->counters.end());
  found->second->Add(NamedLabels(spec, labels)).Increment(value);
}

void MetricsExporter::Set(const MetricSpec& spec, double value,
                          std::initializer_list<std::string> labels) {
  const auto found = state_->gauges.find(&spec);
  ISTHMUS_CHECK(found != state_->gauges.end());
  found->second->Add(NamedLabels(spec, labels)).Set(value);
}

void MetricsExporter::Observe(const MetricSpec& spec, double value,
                              std::initializer_list<std::string> labels) {
  const auto found = state_->histograms.find(&spec);
  ISTHMUS_CHECK(found != state_->histograms.end());
  found->second->Add(NamedLabels(spec, labels), State::Buckets(spec)).Observe(value);
}

absl::StatusOr<std::string> MetricsExporter::Listen(const std::string& address) {
  try {
    // Two threads: one accepts, one answers; a scrape is rare.
    state_->exposer = std::make_unique<prometheus::Exposer>(address, 2);
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on ", address, ": ", error.what()));
  }
  state_->exposer->RegisterCollectable(state_->registry);
  std::string bound = WithPort(address, state_->exposer->GetListeningPorts().front());
  if (!IsLoopback(address)) {
    LogWarning("other machines can read the metrics, and there is no TLS", {{"address", bound}});
  }
  return bound;
}

}  // namespace isthmus::rpc
