// SPDX-License-Identifier: Apache-2.0
#include "services/diag/curve.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace isthmus::diag {
namespace {

constexpr double kWidth = 720;
constexpr double kHeight = 420;
constexpr double kLeft = 70;
constexpr double kRight = 20;
constexpr double kTop = 40;
constexpr double kBottom = 55;
constexpr double kLegendLine = 18;
constexpr std::array<const char*, 6> kColours = {"#1f5fa8", "#c0392b", "#2e8b57",
                                                 "#8e5ea2", "#d68910", "#555555"};

// A round step that cuts [0, most] into at most eight parts.
double TickStep(double most) {
  double step = std::pow(10.0, std::floor(std::log10(most)));
  if (most / step > 8) return 2 * step;
  while (most / step < 4) step /= 2;
  return step;
}

struct Axis {
  double most = 1.0;
  double step = 1.0;
};

Axis AxisOf(const Curve& curve, bool is_x) {
  double most = 0.0;
  for (const CurveSeries& series : curve.series) {
    for (const auto& [x, y] : series.points) most = std::max(most, is_x ? x : y);
  }
  Axis axis;
  if (most <= 0.0) return axis;
  axis.step = TickStep(most);
  axis.most = std::ceil(most / axis.step) * axis.step;
  return axis;
}

std::string Escaped(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

std::string Text(double x, double y, const char* anchor, const std::string& text,
                 const char* more = "") {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>%s</text>\n", x, y,
                         anchor, more, Escaped(text));
}

std::string Line(double x1, double y1, double x2, double y2, const char* colour) {
  return absl::StrFormat("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n",
                         x1, y1, x2, y2, colour);
}

}  // namespace

std::string CurveSvg(const Curve& curve) {
  const Axis x_axis = AxisOf(curve, true);
  const Axis y_axis = AxisOf(curve, false);
  const auto at_x = [&](double x) { return kLeft + x / x_axis.most * (kWidth - kLeft - kRight); };
  const auto at_y = [&](double y) {
    return kHeight - kBottom - y / y_axis.most * (kHeight - kTop - kBottom);
  };
  std::string out = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      kWidth, kHeight);
  absl::StrAppend(&out, Text(kWidth / 2, 22, "middle", curve.title, " font-size=\"14\""));
  for (int tick = 0; tick * x_axis.step <= x_axis.most * 1.0001; ++tick) {
    const double x = tick * x_axis.step;
    absl::StrAppend(&out, Line(at_x(x), at_y(0), at_x(x), kTop, tick == 0 ? "#333" : "#ddd"),
                    Text(at_x(x), kHeight - kBottom + 18, "middle", absl::StrCat(x)));
  }
  for (int tick = 0; tick * y_axis.step <= y_axis.most * 1.0001; ++tick) {
    const double y = tick * y_axis.step;
    absl::StrAppend(&out,
                    Line(kLeft, at_y(y), kWidth - kRight, at_y(y), tick == 0 ? "#333" : "#ddd"),
                    Text(kLeft - 6, at_y(y) + 4, "end", absl::StrCat(y)));
  }
  absl::StrAppend(&out, Text((kLeft + kWidth - kRight) / 2, kHeight - 12, "middle", curve.x_label),
                  Text(16, kHeight / 2, "middle", curve.y_label,
                       absl::StrFormat(" transform=\"rotate(-90 16 %.0f)\"", kHeight / 2).c_str()));
  for (size_t s = 0; s < curve.series.size(); ++s) {
    const CurveSeries& series = curve.series[s];
    const char* colour = kColours[s % kColours.size()];
    std::string points;
    std::string dots;
    for (const auto& [x, y] : series.points) {
      absl::StrAppendFormat(&points, "%.1f,%.1f ", at_x(x), at_y(y));
      absl::StrAppendFormat(&dots, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\" fill=\"%s\"/>\n",
                            at_x(x), at_y(y), colour);
    }
    absl::StrAppendFormat(&out, "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\"/>\n", points,
                          colour);
    const double legend = kTop + 14 + kLegendLine * static_cast<double>(s);
    absl::StrAppend(&out, dots, Line(kLeft + 12, legend - 4, kLeft + 36, legend - 4, colour),
                    Text(kLeft + 42, legend, "start", series.name));
  }
  return out + "</svg>\n";
}

}  // namespace isthmus::diag
