// Output gates, and residuals over depth.
#pragma once

#include "isa/gemm.h"

namespace milepost {
namespace MP_ISA {

inline void gate_item(const void* args, int64_t item) {
  const GateArgs& a = *static_cast<const GateArgs*>(args);
  for (int64_t row = item * 16; row < a.rows && row < item * 16 + 16; row++)
    for (int64_t i = 0; i < a.width; i += kLanes) {
      const int64_t left = a.width - i;
      const Vec x = load_part(a.x.at(row, i), a.x.type, left);
      store_part(a.y.at(row, i), a.y.type, mul(x, sigmoid(load_part(a.gate.at(row, i), a.gate.type, left))), left);
    }
}

inline void gate(const GateArgs& a) {
  run_items((a.rows + 15) / 16, gate_item, &a, a.rows * a.width > (1 << 16));
}

// rms_norm(x) . query of one row.
inline float source_logit(const MixArgs& a, const Rows& source, int64_t row) {
  Vec products = zero(), squares = zero();
  for (int64_t i = 0; i < a.width; i += kLanes) {
    const Vec x = load_part(source.at(row, i), source.type, a.width - i);
    products = fma(x, load_part(reinterpret_cast<const char*>(a.query + i), Type::f32, a.width - i), products);
    squares = fma(x, x, squares);
  }
  return sum(products) * inverse_root(sum(squares) / float(a.width) + a.eps);
}

inline void mix_row(const MixArgs& a, int64_t row) {
  float weights[kMaxSources];
  for (int64_t s = 0; s < a.count; s++) weights[s] = source_logit(a, a.sources[s], row);
  float largest = weights[0];
  for (int64_t s = 1; s < a.count; s++)
    if (weights[s] > largest) largest = weights[s];
  float total = 0.0f;
  for (int64_t s = 0; s < a.count; s++) total += weights[s] = exp(weights[s] - largest);
  for (int64_t s = 0; s < a.count; s++) weights[s] = weights[s] / total;
  for (int64_t i = 0; i < a.width; i += kLanes) {
    const int64_t left = a.width - i;
    Vec mixed = zero();
    for (int64_t s = 0; s < a.count; s++)
      mixed = fma(load_part(a.sources[s].at(row, i), a.sources[s].type, left), set1(weights[s]), mixed);
    store_part(a.y.at(row, i), a.y.type, mixed, left);
  }
}

inline void mix_item(const void* args, int64_t item) {
  const MixArgs& a = *static_cast<const MixArgs*>(args);
  for (int64_t row = item * 16; row < a.rows && row < item * 16 + 16; row++) mix_row(a, row);
}

inline void mix(const MixArgs& a) {
  run_items((a.rows + 15) / 16, mix_item, &a, a.rows * a.width * a.count > (1 << 16));
}

}  // namespace MP_ISA
}  // namespace milepost
