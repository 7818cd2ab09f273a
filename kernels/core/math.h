// SPDX-License-Identifier: Apache-2.0
// exp, log1p, sigmoid, sqrt(softplus), sin and cos from one implementation of ours: the same bits
// on every machine and SIMD target, never libm. The vectorised forms in simd-inl.h give the same
// bits as the scalar f32 forms here, lane by lane.
#pragma once

namespace isthmus::kernels {

// f32 e^x within 2 ulp; 0 below about -104, +infinity above about 88.8; NaN stays NaN.
float Exp(float x);
// 1 / (1 + e^-x), f32.
float Sigmoid(float x);
// sqrt(log(1 + e^x)), safe for every x (specification 5.1); computed in f64, rounded to f32.
float SqrtSoftplus(float x);
// sin and cos of an f32 angle with full range reduction, computed in f64, rounded to f32.
// |angle| < 2^31.
void SinCos(float angle, float* sin, float* cos);

// f64 e^x and log x within a few ulp, for tables that are built once (RoPE frequencies) and for the
// functions above. ExpF64: 0 below about -745, +infinity above about 709.8. LogF64: log 0 is
// -infinity, log of a negative number NaN.
double ExpF64(double x);
double LogF64(double x);

}  // namespace isthmus::kernels
