// SPDX-License-Identifier: Apache-2.0
// A curve of measurements as an SVG picture: axes from zero, a line and dots per series.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace isthmus::diag {

struct CurveSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // Finite, not negative, x ascending.
};

struct Curve {
  std::string title;
  std::string x_label;  // With the unit.
  std::string y_label;
  std::vector<CurveSeries> series;
};

// The same text for the same curve. Series beyond the sixth repeat colours.
std::string CurveSvg(const Curve& curve);

}  // namespace isthmus::diag
