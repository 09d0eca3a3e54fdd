// Root mean square norms, and the latents' way into their pages.
#pragma once

#include "isa/gemm.h"

namespace milepost {
namespace MP_ISA {

// x / sqrt(mean(x^2) + eps) * weight for one row.
inline void norm_row(const char* x, Type type, char* y, const float* weight, int64_t width, float eps) {
  Vec squares = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec v = load_part(x + i * item_bytes(type), type, width - i);
    squares = fma(v, v, squares);
  }
  const Vec scale = set1(inverse_root(sum(squares) / float(width) + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec v = load_part(x + i * item_bytes(type), type, width - i);
    const Vec w = load_part(reinterpret_cast<const char*>(weight + i), Type::f32, width - i);
    store_part(y + i * item_bytes(type), type, mul(mul(v, scale), w), width - i);
  }
}

inline void norm_item(const void* args, int64_t item) {
  const NormArgs& a = *static_cast<const NormArgs*>(args);
  for (int64_t row = item * 16; row < a.rows && row < item * 16 + 16; row++)
    norm_row(a.x.at(row), a.x.type, a.y.at(row), a.weight, a.width, a.eps);
}

inline void rms_norm(const NormArgs& a) {
  run_items((a.rows + 15) / 16, norm_item, &a, a.rows * a.width > (1 << 16));
}

inline void store_latent_item(const void* args, int64_t item) {
  const StoreLatentsArgs& a = *static_cast<const StoreLatentsArgs*>(args);
  const int64_t bytes = item_bytes(a.x.type);
  for (int64_t row = item * 16; row < a.rows && row < item * 16 + 16; row++) {
    char* entry = a.pages + (a.write_pages[row] * a.page_stride + a.write_offsets[row] * a.entry_stride) * bytes;
    norm_row(a.x.at(row), a.x.type, entry, a.weight, a.normed, a.eps);
    std::memcpy(entry + a.normed * bytes, a.x.at(row, a.normed), size_t((a.width - a.normed) * bytes));
  }
}

inline void store_latents(const StoreLatentsArgs& a) {
  run_items((a.rows + 15) / 16, store_latent_item, &a, a.rows * a.width > (1 << 16));
}

}  // namespace MP_ISA
}  // namespace milepost
