// Elementary functions on sixteen lanes. Our own polynomials, so that a value never depends on a
// library version, on the position of an element in its array, or on how many elements there are.
#pragma once

#include "common/types.h"
#include "isa/simd.h"

namespace milepost {
namespace MP_ISA {

// exp(x); exactly 0 below -87.33, at most exp(88). NaN stays NaN. exp(0) is exactly 1.
inline Vec exp(Vec x) {
  const Vec bounded = max(set1(-87.33f), min(set1(88.0f), x));
  const Vec shifted = add(mul(bounded, set1(1.44269504f)), set1(12582912.0f));
  const Vec n = sub(shifted, set1(12582912.0f));
  Vec r = fma(n, set1(-0.693359375f), bounded);
  r = fma(n, set1(2.12194440e-4f), r);
  // Taylor-like coefficients of (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 (Cephes, expf).
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  return less_select(x, set1(-87.33f), zero(), mul(p, power_of_two(shifted)));
}

// Natural logarithm of normal x > 0 (Cephes, logf).
inline Vec log(Vec x) {
  Vec m;
  Vec e = exponent_of(x, &m);
  const Vec root_half = set1(0.707106781f);
  e = less_select(m, root_half, sub(e, set1(1.0f)), e);
  m = less_select(m, root_half, add(m, m), m);
  const Vec r = sub(m, set1(1.0f));
  const Vec square = mul(r, r);
  Vec p = set1(7.0376836292e-2f);
  p = fma(p, r, set1(-1.1514610310e-1f));
  p = fma(p, r, set1(1.1676998740e-1f));
  p = fma(p, r, set1(-1.2420140846e-1f));
  p = fma(p, r, set1(1.4249322787e-1f));
  p = fma(p, r, set1(-1.6668057665e-1f));
  p = fma(p, r, set1(2.0000714765e-1f));
  p = fma(p, r, set1(-2.4999993993e-1f));
  p = fma(p, r, set1(3.3333331174e-1f));
  Vec y = mul(mul(p, r), square);
  y = fma(e, set1(-2.12194440e-4f), y);
  y = fma(square, set1(-0.5f), y);
  return fma(e, set1(0.693359375f), add(r, y));
}

// log(1 + u) for u in [0, 1], exact to rounding also where 1 + u rounds to 1.
inline Vec log1p(Vec u) {
  const Vec w = add(set1(1.0f), u);
  const Vec rounded = sub(w, set1(1.0f));
  const Vec y = mul(log(w), div(u, max(rounded, set1(1e-30f))));
  return less_select(rounded, set1(1e-30f), u, y);
}

inline Vec sigmoid(Vec x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }
inline Vec silu(Vec x) { return mul(x, sigmoid(x)); }
// Odd; small values keep their relative precision (Cephes, tanhf). NaN stays NaN.
inline Vec tanh(Vec x) {
  const Vec magnitude = max(sub(zero(), x), x), square = mul(x, x);
  Vec p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  const Vec small = fma(mul(p, square), x, x);
  const Vec large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(magnitude, magnitude)), set1(1.0f))));
  return less_select(magnitude, set1(0.625f), small, less_select(x, zero(), sub(zero(), large), large));
}
inline Vec gated(const Glu& glu, Vec gate, Vec up) {
  if (glu.beta == 0.0f) return mul(silu(gate), up);
  const Vec beta = set1(glu.beta), linear = set1(glu.linear_beta);
  if (glu.linear_beta != 0.0f) up = mul(linear, tanh(div(up, linear)));
  return mul(mul(mul(beta, tanh(div(gate, beta))), sigmoid(gate)), up);
}
// log(1 + exp(x)) without overflow.
inline Vec softplus(Vec x) {
  const Vec negative = sub(zero(), x);
  return add(max(zero(), x), log1p(exp(min(x, negative))));
}

inline float sigmoid(float x) {
  float lanes[kLanes];
  store(lanes, sigmoid(set1(x)));
  return lanes[0];
}
inline float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}
// Square root and division are correctly rounded everywhere.
inline float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

}  // namespace MP_ISA
}  // namespace milepost
