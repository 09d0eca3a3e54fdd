// What grouped-query attention does before and behind the attention itself: per-head norms, rotary
// positions, page writes; and the output gate. And rotary positions alone.
#pragma once

#include "isa/gemm.h"

namespace milepost {
namespace MP_ISA {

// first[i] and second[i], by the angles of a row.
MP_INLINE void rotate_pairs(float* first, float* second, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const auto part = [left](const float* p) { return load_part(reinterpret_cast<const char*>(p), Type::f32, left); };
    const Vec cosine = part(cosines + i), sine = part(sines + i), x = part(first + i), y = part(second + i);
    store_part(reinterpret_cast<char*>(first + i), Type::f32, sub(mul(x, cosine), mul(y, sine)), left);
    store_part(reinterpret_cast<char*>(second + i), Type::f32, add(mul(y, cosine), mul(x, sine)), left);
  }
}

// rms_norm(x) * weight in fp32, then entry i of the first half of the rotary part is rotated with entry i of
// the second half.
inline void norm_and_rotate(const GqaArgs& a, const char* x, Type type, const float* weight, int64_t row, float* out) {
  Vec squares = zero();
  for (int64_t i = 0; i < a.head_dim; i += kLanes) {
    const Vec v = load_part(x + i * item_bytes(type), type, a.head_dim - i);
    squares = fma(v, v, squares);
  }
  const Vec scale = set1(inverse_root(sum(squares) / float(a.head_dim) + a.eps));
  for (int64_t i = 0; i < a.head_dim; i += kLanes) {
    const int64_t left = a.head_dim - i;
    const Vec v = load_part(x + i * item_bytes(type), type, left);
    const Vec w = load_part(reinterpret_cast<const char*>(weight + i), Type::f32, left);
    store_part(reinterpret_cast<char*>(out + i), Type::f32, mul(mul(v, scale), w), left);
  }
  const int64_t half = a.half_rotary;
  rotate_pairs(out, out + half, a.cosines + row * half, a.sines + row * half, half);
}

inline void gqa_begin_item(const void* args, int64_t item) {
  const GqaArgs& a = *static_cast<const GqaArgs*>(args);
  const int64_t bytes = item_bytes(a.key.type);
  float* rotated = scratch_of<float>(kMoeInner, a.head_dim + kLanes);
  for (int64_t row = item * 16; row < a.rows && row < item * 16 + 16; row++) {
    for (int64_t head = 0; head < a.heads; head++)
      norm_and_rotate(a, a.query_gate.at(row, (a.gated ? 2 : 1) * head * a.head_dim), a.query_gate.type, a.query_norm, row,
                      a.query + (row * a.heads + head) * a.head_dim);
    const auto entry = [&](const Pages& pages, int64_t head) {
      const int64_t at = a.write_pages[row] * pages.page_stride + a.write_offsets[row] * pages.entry_stride;
      return const_cast<char*>(pages.data) + (at + head * pages.head_stride) * bytes;
    };
    for (int64_t head = 0; head < a.kv_heads; head++) {
      norm_and_rotate(a, a.key.at(row, head * a.head_dim), a.key.type, a.key_norm, row, rotated);
      char* target = entry(a.keys, head);
      for (int64_t i = 0; i < a.head_dim; i += kLanes)
        store_part(target + i * bytes, a.key.type,
                   load_part(reinterpret_cast<const char*>(rotated + i), Type::f32, a.head_dim - i), a.head_dim - i);
      std::memcpy(entry(a.values, head), a.value.at(row, head * a.head_dim), size_t(a.head_dim * bytes));
    }
  }
}

inline void gqa_end_item(const void* args, int64_t item) {
  const GqaArgs& a = *static_cast<const GqaArgs*>(args);
  for (int64_t row = item * 16; row < a.rows && row < item * 16 + 16; row++)
    for (int64_t head = 0; head < a.heads; head++)
      for (int64_t i = 0; i < a.head_dim; i += kLanes) {
        const int64_t left = a.head_dim - i;
        const float* mixed = a.mixed + (row * a.heads + head) * a.head_dim + i;
        Vec x = load_part(reinterpret_cast<const char*>(mixed), Type::f32, left);
        if (a.gated) {
          const char* gate = a.query_gate.at(row, (2 * head + 1) * a.head_dim + i);
          x = mul(x, sigmoid(load_part(gate, a.query_gate.type, left)));
        }
        store_part(a.out.at(row, head * a.head_dim + i), a.out.type, x, left);
      }
}

// The rotary part of one head; `work` holds 4 * half values.
inline void rotate_head(const RotateArgs& a, int64_t row, const char* x, char* y, float* work) {
  const int64_t half = a.half, bytes = item_bytes(a.x.type);
  float *pairs = work, *first = work + 2 * half, *second = first + half;
  const auto part = [](float* p) { return reinterpret_cast<char*>(p); };
  for (int64_t i = 0; i < 2 * half; i += kLanes) {
    const int64_t left = 2 * half - i;
    store_part(part(pairs + i), Type::f32, mul(load_part(x + i * bytes, a.x.type, left), set1(a.amplitude)), left);
  }
  for (int64_t i = 0; i < half; i++) {
    first[i] = pairs[a.interleaved ? 2 * i : i];
    second[i] = pairs[a.interleaved ? 2 * i + 1 : half + i];
  }
  rotate_pairs(first, second, a.cosines + row * half, a.sines + row * half, half);
  for (int64_t i = 0; i < half; i++) {
    pairs[a.interleaved ? 2 * i : i] = first[i];
    pairs[a.interleaved ? 2 * i + 1 : half + i] = second[i];
  }
  for (int64_t i = 0; i < 2 * half; i += kLanes)
    store_part(y + i * bytes, a.y.type, load_part(part(pairs + i), Type::f32, 2 * half - i), 2 * half - i);
}

inline void rotate_item(const void* args, int64_t item) {
  const RotateArgs& a = *static_cast<const RotateArgs*>(args);
  float* work = scratch_of<float>(kMoeInner, 4 * a.half + kLanes);
  const int64_t kept = a.width - 2 * a.half;
  for (int64_t row = item * 16; row < a.rows && row < item * 16 + 16; row++)
    for (int64_t head = 0; head < a.heads; head++) {
      std::memcpy(a.y.at(row, head * a.width), a.x.at(row, head * a.width), size_t(kept * item_bytes(a.x.type)));
      rotate_head(a, row, a.x.at(row, head * a.width + kept), a.y.at(row, head * a.width + kept), work);
    }
}

inline void rotate(const RotateArgs& a) { run_items((a.rows + 15) / 16, rotate_item, &a, a.rows > 32); }

inline void gqa_begin(const GqaArgs& a) { run_items((a.rows + 15) / 16, gqa_begin_item, &a, a.rows > 32); }
inline void gqa_end(const GqaArgs& a) { run_items((a.rows + 15) / 16, gqa_end_item, &a, a.rows > 32); }

}  // namespace MP_ISA
}  // namespace milepost
