// Products with coded weights (integers or 4-bit floats with scales): decoded in registers for the rows of one tile,
// panel by panel for more.
//
// int8, int4: per scale group one chain over its inputs, from zero, ascending; then total = scale * sum + total,
// groups ascending. mxfp4: decoded values are bf16, so the chain is the one of plain bf16 weights.
#pragma once

#include "isa/gemm.h"
#include "isa/packing.h"

namespace milepost {
namespace MP_ISA {

#if defined(MP_DOT)
// A permutation of 16-bit lanes reads the lowest five bits of its index: the table stands there twice.
alignas(64) constexpr uint16_t kInt4Pairs[32] = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
    0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0,
    0xC080, 0xC040, 0xC000, 0xBF80};
alignas(64) constexpr uint16_t kE2m1Pairs[32] = {
    0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040,
    0xC080, 0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0,
    0xC000, 0xC040, 0xC080, 0xC0C0};
template <int PAIR>
inline __m512i nibble_pairs(const char* chunk, int half, const uint16_t* table) {
  const __m512i codes = _mm512_loadu_si512(reinterpret_cast<const uint32_t*>(chunk) + half * kLanes);
  const __m512i index = PAIR == 0 ? codes : _mm512_srli_epi16(codes, 4 * PAIR);
  return _mm512_permutexvar_epi16(index, _mm512_loadu_si512(table));
}
#endif

// Per coding: the scales of half a block, and the two inputs of pair PAIR of a chunk for 16 columns.
struct Int8 {
  static constexpr bool kScalesSums = true;
  static constexpr int kScaleBytes = 2 * kPanel, kChunkBytes = kPanel * kChunk;
  static MP_INLINE Vec scale(const char* block, int half) {
    return load_bf16(reinterpret_cast<const uint16_t*>(block) + half * kLanes);
  }
  template <int PAIR>
  static MP_INLINE void decode(const char* chunk, int half, Vec, Vec* low, Vec* high) {
    const int8_t* codes = reinterpret_cast<const int8_t*>(chunk) + 2 * PAIR * kPanel + half * kLanes;
    *low = load_i8(codes);
    *high = load_i8(codes + kPanel);
  }
#if defined(MP_DOT)
  template <int PAIR>
  static MP_INLINE __m512i pairs(const char* chunk, int half, Vec none) {
    Vec low, high;
    decode<PAIR>(chunk, half, none, &low, &high);
    return pair_bits(low, high);
  }
#endif
};

struct Int4 {
  static constexpr bool kScalesSums = true;
  static constexpr int kScaleBytes = 2 * kPanel, kChunkBytes = kPanel * kChunk / 2;
  static MP_INLINE Vec scale(const char* block, int half) { return Int8::scale(block, half); }
  template <int PAIR>
  static MP_INLINE void decode(const char* chunk, int half, Vec, Vec* low, Vec* high) {
    const uint32_t* codes = reinterpret_cast<const uint32_t*>(chunk) + half * kLanes;
    *low = load_i4<4 * PAIR>(codes);
    *high = load_i4<4 * PAIR + 16>(codes);
  }
#if defined(MP_DOT)
  template <int PAIR>
  static MP_INLINE __m512i pairs(const char* chunk, int half, Vec) {
    return nibble_pairs<PAIR>(chunk, half, kInt4Pairs);
  }
#endif
};

struct Mxfp4 {
  static constexpr bool kScalesSums = false;
  static constexpr int kScaleBytes = kPanel, kChunkBytes = kPanel * kChunk / 2;
  static MP_INLINE Vec scale(const char* block, int half) {
    return load_e8m0(reinterpret_cast<const uint8_t*>(block) + half * kLanes);
  }
  // Exact: a power of two times a number of two bits, and no result is denormal or infinite (see pack_coded).
  template <int PAIR>
  static MP_INLINE void decode(const char* chunk, int half, Vec scale, Vec* low, Vec* high) {
    const uint32_t* codes = reinterpret_cast<const uint32_t*>(chunk) + half * kLanes;
    *low = mul(load_e2m1<4 * PAIR>(codes), scale);
    *high = mul(load_e2m1<4 * PAIR + 16>(codes), scale);
  }
#if defined(MP_DOT)
  // Adds to the exponents, where the value is not zero.
  template <int PAIR>
  static MP_INLINE __m512i pairs(const char* chunk, int half, Vec scale) {
    const __m512i exponent = _mm512_sub_epi32(_mm512_srli_epi32(_mm512_castps_si512(scale.v), 16), _mm512_set1_epi32(127 << 7));
    const __m512i both = _mm512_mask_blend_epi16(0xAAAAAAAAu, exponent, _mm512_slli_epi32(exponent, 16));
    const __m512i values = nibble_pairs<PAIR>(chunk, half, kE2m1Pairs);
    return _mm512_mask_add_epi16(values, _mm512_test_epi16_mask(values, _mm512_set1_epi16(0x7FFF)), values, both);
  }
#endif
};

// ROWS rows and VECS vectors of a panel: every code is decoded once, in registers, and meets all rows. Rows as
// `pack_rows` lays them out.
template <class Code, bool dot, int ROWS, int VECS>
struct CodedProduct {
  Vec sums[ROWS][VECS], scales[VECS];

  template <int PAIR>
  MP_INLINE void pair(const float* x, const char* chunk, int first_half) {
#if defined(MP_DOT)
    if (dot) {
      __m512bh w[VECS];
      MP_UNROLL
      for (int v = 0; v < VECS; v++)
        w[v] = (__m512bh)Code::template pairs<PAIR>(chunk, first_half + v, scales[v]);
      MP_UNROLL
      for (int r = 0; r < ROWS; r++) {
        int lane;
        std::memcpy(&lane, x + PAIR * ROWS + r, 4);
        const __m512bh xr = (__m512bh)_mm512_set1_epi32(lane);
        MP_UNROLL
        for (int v = 0; v < VECS; v++) sums[r][v].v = _mm512_dpbf16_ps(sums[r][v].v, xr, w[v]);
      }
      return;
    }
#endif
    Vec low[VECS], high[VECS];
    MP_UNROLL
    for (int v = 0; v < VECS; v++) Code::template decode<PAIR>(chunk, first_half + v, scales[v], &low[v], &high[v]);
    MP_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const Vec first = set1(x[2 * PAIR * ROWS + r]), second = set1(x[(2 * PAIR + 1) * ROWS + r]);
      MP_UNROLL
      for (int v = 0; v < VECS; v++) sums[r][v] = fma(second, high[v], fma(first, low[v], sums[r][v]));
    }
  }

  // c[r][j]; the totals of scaled sums live there from group to group.
  MP_INLINE void add_group(float* c, bool first, int first_half) const {
    MP_UNROLL
    for (int r = 0; r < ROWS; r++)
      MP_UNROLL
      for (int v = 0; v < VECS; v++) {
        float* total = c + r * kPanel + (first_half + v) * kLanes;
        store(total, Code::kScalesSums ? fma(scales[v], sums[r][v], first ? zero() : load(total)) : sums[r][v]);
      }
  }

  MP_INLINE void clear() {
    MP_UNROLL
    for (int r = 0; r < ROWS; r++)
      MP_UNROLL
      for (int v = 0; v < VECS; v++) sums[r][v] = zero();
  }

  MP_INLINE void run(const Packed& w, const float* x, const char* panel, float* c, int first_half) {
    const int64_t block_bytes = w.block_bytes(), num_groups = w.scale_groups();
    constexpr int kStep = (dot ? kChunk / 2 : kChunk) * ROWS;
    clear();
    for (int64_t g = 0; g < num_groups; g++, panel += block_bytes) {
      MP_UNROLL
      for (int v = 0; v < VECS; v++) scales[v] = Code::scale(panel, first_half + v);
      const char* chunk = panel + Code::kScaleBytes;
      for (int64_t i = 0; i < w.group / kChunk; i++, chunk += Code::kChunkBytes, x += kStep) {
        MP_UNROLL
        for (int line = 0; line < Code::kChunkBytes; line += 64) prefetch(chunk + line + kPrefetchBytes);
        pair<0>(x, chunk, first_half);
        pair<1>(x, chunk, first_half);
        pair<2>(x, chunk, first_half);
        pair<3>(x, chunk, first_half);
      }
      if (!Code::kScalesSums) continue;
      add_group(c, g == 0, first_half);
      clear();
    }
    if (!Code::kScalesSums) add_group(c, true, first_half);
  }
};

template <class Code, bool dot, int ROWS>
void multiply_coded(const Packed& w, const float* x, const char* panel, float* c) {
  constexpr int kVecs = ROWS <= kWholeCodedRows ? 2 : kTileVecs;
  MP_UNROLL
  for (int half = 0; half < 2; half += kVecs) {
    CodedProduct<Code, dot, ROWS, kVecs> product;
    product.run(w, x, panel, c, half);
  }
}

using CodedFunction = void (*)(const Packed&, const float*, const char*, float*);
// One panel, for the rows of one tile.
template <class Code, bool dot>
inline CodedFunction tile_function(int64_t rows) {
#define MP_CODED(n) multiply_coded<Code, dot, (n <= kTileRows ? n : 1)>
  static const CodedFunction functions[] = MP_ROW_FUNCTIONS(MP_CODED);
#undef MP_CODED
  return functions[rows - 1];
}

template <class Code, int PAIR>
MP_INLINE void decode_pair(const char* chunk, int half, Vec scale, uint32_t* pairs) {
  uint32_t* target = pairs + PAIR * kPanel + half * kLanes;
#if defined(MP_DOT)
  _mm512_storeu_si512(target, Code::template pairs<PAIR>(chunk, half, scale));
#else
  Vec low, high;
  Code::template decode<PAIR>(chunk, half, scale, &low, &high);
  store_pairs(target, low, high);
#endif
}

// A panel as bf16 pairs [k / 2][32]; integers without their scales.
template <class Code>
inline void decode_panel(const Packed& w, const char* panel, uint32_t* pairs) {
  for (int64_t g = 0; g < w.scale_groups(); g++, panel += w.block_bytes()) {
    const char* chunk = panel + Code::kScaleBytes;
    const Vec scales[2] = {Code::scale(panel, 0), Code::scale(panel, 1)};
    for (int64_t i = 0; i < w.group / kChunk; i++, chunk += Code::kChunkBytes, pairs += kChunk / 2 * kPanel) {
      MP_UNROLL
      for (int half = 0; half < 2; half++) {
        decode_pair<Code, 0>(chunk, half, scales[half], pairs);
        decode_pair<Code, 1>(chunk, half, scales[half], pairs);
        decode_pair<Code, 2>(chunk, half, scales[half], pairs);
        decode_pair<Code, 3>(chunk, half, scales[half], pairs);
      }
    }
  }
}

// ROWS rows times a decoded panel of integers: a sum per scale group, added to the total with the scale.
template <Form form, int ROWS>
void multiply_scaled(const Packed& w, const float* x, const char* panel, const uint32_t* pairs, float* c) {
  const int64_t x_step = (form == Form::dot ? w.group / 2 : w.group) * ROWS;
  for (int64_t g = 0; g < w.scale_groups(); g++, panel += w.block_bytes(), pairs += w.group / 2 * kPanel, x += x_step) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel);
    const char* weights = reinterpret_cast<const char*>(pairs);
#if defined(MP_DOT)
    if (form == Form::dot) {
      Accumulators<Panel::depth_pairs, ROWS, 2> sums;
      sums.begin(c, kPanel, 0, false);
      multiply_dot_onto(sums, reinterpret_cast<const uint32_t*>(x), ROWS, weights, w.group / 2);
      sums.end_scaled(c, kPanel, 0, scales, g == 0);
      continue;
    }
#endif
    MP_UNROLL
    for (int half = 0; half < 2; half += kTileVecs) {
      Accumulators<Panel::depth_pairs, ROWS, kTileVecs> sums;
      sums.begin(c, kPanel, half, false);
      multiply_onto(sums, x, ROWS, weights, w.group, half);
      sums.end_scaled(c, kPanel, half, scales, g == 0);
    }
  }
}

using ScaledFunction = void (*)(const Packed&, const float*, const char*, const uint32_t*, float*);
template <Form form>
inline ScaledFunction scaled_function(int64_t rows) {
#define MP_SCALED(n) multiply_scaled<form, (n <= kTileRows ? n : 1)>
  static const ScaledFunction functions[] = MP_ROW_FUNCTIONS(MP_SCALED);
#undef MP_SCALED
  return functions[rows - 1];
}
#undef MP_ROW_FUNCTIONS

// One tile times a decoded panel; `panel` has the scales.
template <class Code, Form form>
inline void multiply_decoded(const Packed& w, int64_t rows, const float* x, const char* panel, const uint32_t* pairs,
                             float* c) {
  if (Code::kScalesSums) return scaled_function<form>(rows)(w, x, panel, pairs, c);
  product_function<form>(rows)(x, rows, reinterpret_cast<const char*>(pairs), w.depth(), c, kPanel, false);
}

template <class Code, Form form>
inline void coded_item(const void* job_pointer, int64_t item) {
  constexpr bool dot = form == Form::dot;
  const LinearJob& job = *static_cast<const LinearJob*>(job_pointer);
  const LinearArgs& a = *job.args;
  const Packed& w = a.weight;
  const int64_t first_panel = item % job.panel_items * job.panels_per_item;
  const int64_t block = item / job.panel_items;
  const int64_t end_panel = first_panel + job.panels_per_item < w.panels() ? first_panel + job.panels_per_item : w.panels();
  const int64_t first_tile = block * job.tiles_per_block;
  const int64_t end_tile = first_tile + job.tiles_per_block < job.tiles ? first_tile + job.tiles_per_block : job.tiles;
  const char* weights = static_cast<const char*>(w.data);
  alignas(64) float c[kTileRows * kPanel];
  if (job.tiles == 1) {
    const CodedFunction product = tile_function<Code, dot>(a.rows);
    for (int64_t panel = first_panel; panel < end_panel; panel++) {
      product(w, job.rows, weights + panel * w.panel_bytes(), c);
      finish_rows(a, 0, panel, 0, a.rows, c, kPanel);
    }
    return;
  }
  // Several tiles share what was decoded.
  uint32_t* pairs = scratch_of<uint32_t>(kDecoded, w.depth() / 2 * kPanel);
  for (int64_t panel = first_panel; panel < end_panel; panel++) {
    decode_panel<Code>(w, weights + panel * w.panel_bytes(), pairs);
    for (int64_t tile = first_tile; tile < end_tile; tile++) {
      const int64_t rows = tile_rows(a, tile), first = tile * kTileRows;
      multiply_decoded<Code, form>(w, rows, job.rows + first * w.depth(), weights + panel * w.panel_bytes(), pairs, c);
      finish_rows(a, 0, panel, first, rows, c, kPanel);
    }
  }
}

template <class Code>
inline ItemFunction coded_function([[maybe_unused]] Form form) {
#if defined(MP_DOT)
  if (form == Form::dot) return coded_item<Code, Form::dot>;
#endif
  return coded_item<Code, Form::mixed>;
}

inline ItemFunction function_of(const LinearArgs& a) {
  const Form form = form_of(a);
  switch (a.weight.coding) {
    case Coding::int8: return coded_function<Int8>(form);
    case Coding::int4: return coded_function<Int4>(form);
    case Coding::mxfp4: return coded_function<Mxfp4>(form);
    case Coding::plain: break;
  }
#if defined(MP_DOT)
  if (form == Form::dot) return linear_item<Form::dot>;
#endif
  return form == Form::wide ? linear_item<Form::wide> : linear_item<Form::mixed>;
}

inline void pack_coded_panel(const void* args, int64_t panel) {
  const PackCodedArgs& a = *static_cast<const PackCodedArgs*>(args);
  const Packed& w = a.target;
  char* target = static_cast<char*>(w.data) + panel * w.panel_bytes();
  std::memset(target, 0, size_t(w.panel_bytes()));
  // Columns without a row: scale 2^0 for floats (a code of 0 would be a denormal), else 0.
  if (w.coding == Coding::mxfp4)
    for (int64_t g = 0; g < w.scale_groups(); g++) std::memset(target + g * w.block_bytes(), 127, kPanel);
  const int64_t scale_item = w.scale_bytes() / kPanel;
  for (int64_t column = 0; column < kPanel; column++) {
    const int64_t row = source_row(w, panel, column);
    if (row < 0) continue;
    const uint8_t* codes = a.codes + row * a.code_stride;
    for (int64_t g = 0; g < w.scale_groups(); g++) {
      char* block = target + g * w.block_bytes();
      std::memcpy(block + column * scale_item, a.scales + row * a.scale_stride + g * scale_item, size_t(scale_item));
      for (int64_t i = 0; i < w.group && g * w.group + i < w.k; i++) {
        const int64_t k = g * w.group + i;
        char* chunk = block + w.scale_bytes() + i / kChunk * w.chunk_bytes();
        if (w.coding == Coding::int8) {
          chunk[i % kChunk * kPanel + column] = char(codes[k]);
          continue;
        }
        const uint32_t nibble = w.coding == Coding::int4 ? codes[k] & 15u : codes[k / 2] >> k % 2 * 4 & 15u;
        uint32_t lane;
        std::memcpy(&lane, chunk + column * 4, 4);
        lane |= nibble << (i % kChunk / 2 * 4 + i % 2 * 16);
        std::memcpy(chunk + column * 4, &lane, 4);
      }
    }
  }
}

inline void pack_coded(const PackCodedArgs& a) { run_items(a.target.panels(), pack_coded_panel, &a, true); }

}  // namespace MP_ISA
}  // namespace milepost
