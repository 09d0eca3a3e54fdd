// Products with packed weights. Each output is one chain of multiply-adds over k in ascending order,
// so a row's bits depend on that row and the weights alone: not on the number of rows, on the tile a row
// falls into, or on the thread.
#pragma once

#include "common/threads.h"
#include "common/types.h"
#include "isa/math.h"

namespace milepost {
namespace MP_ISA {

inline Vec load_any(const char* p, Type type) {
  return type == Type::f32 ? load(reinterpret_cast<const float*>(p))
                           : load_bf16(reinterpret_cast<const uint16_t*>(p));
}
inline void store_any(char* p, Type type, Vec x) {
  if (type == Type::f32) store(reinterpret_cast<float*>(p), x);
  else store_bf16(reinterpret_cast<uint16_t*>(p), x);
}
// `count` <= 16 values, zeros behind them.
inline Vec load_part(const char* p, Type type, int64_t count) {
  if (count >= kLanes) return load_any(p, type);
  alignas(64) char lanes[64] = {};
  if (count > 0) std::memcpy(lanes, p, size_t(count * item_bytes(type)));
  return load_any(lanes, type);
}
inline void store_part(char* p, Type type, Vec x, int64_t count) {
  if (count >= kLanes) return store_any(p, type, x);
  alignas(64) char lanes[64];
  store_any(lanes, type, x);
  if (count > 0) std::memcpy(p, lanes, size_t(count * item_bytes(type)));
}
// To the precision of `type` and back.
inline Vec rounded(Vec x, Type type) {
  if (type == Type::f32) return x;
  uint16_t lanes[kLanes];
  store_bf16(lanes, x);
  return load_bf16(lanes);
}

// Sums must become registers, so every loop over them has to disappear.
#define MP_UNROLL _Pragma("GCC unroll 16")

// Weights are read once and in order, one panel after the other: two side by side are read an eighth slower.
constexpr int64_t kPrefetchBytes = 4096;
MP_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// To the second-level cache, which waits for more lines at a time than the first.
MP_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
// Hardware prefetchers stop at every page of 4 KiB, and products of several rows compute too long between two lines for
// the CPU to look that far ahead itself. One row does not; distances were measured, see docs/kernels.md.
template <int ROWS>
MP_INLINE void prefetch_weights(const char* line) {
  if (ROWS >= 6) prefetch_far(line + 4 * kPrefetchBytes);
  else if (ROWS > 1) prefetch(line + kPrefetchBytes);
}

// How 16-bit weights share a 32-bit lane.
enum class Panel {
  wide,          // fp32: [k][32]
  column_pairs,  // bf16: [k][16] lanes of columns i and i + 16
  depth_pairs,   // bf16: [k / 2][32] lanes of k and k + 1
};

template <Panel kind, int ROWS, int VECS>
struct Accumulators {
  Vec acc[ROWS][VECS];

  // c[r][j]
  static MP_INLINE float* at(float* c, int64_t c_step, int first_half, int r, int v) {
    return c + r * c_step + (first_half + v) * kLanes;
  }
  MP_INLINE void begin(float* c, int64_t c_step, int first_half, bool accumulate) {
    MP_UNROLL
    for (int r = 0; r < ROWS; r++)
      MP_UNROLL
      for (int v = 0; v < VECS; v++) acc[r][v] = accumulate ? load(at(c, c_step, first_half, r, v)) : zero();
  }
  MP_INLINE void end(float* c, int64_t c_step, int first_half) const {
    MP_UNROLL
    for (int r = 0; r < ROWS; r++)
      MP_UNROLL
      for (int v = 0; v < VECS; v++) store(at(c, c_step, first_half, r, v), acc[r][v]);
  }
  // c = scale * sums + c, with a scale per column; c counts as zero if `first`.
  MP_INLINE void end_scaled(float* c, int64_t c_step, int first_half, const uint16_t* scales, bool first) const {
    MP_UNROLL
    for (int v = 0; v < VECS; v++) {
      const Vec scale = load_bf16(scales + (first_half + v) * kLanes);
      MP_UNROLL
      for (int r = 0; r < ROWS; r++) {
        float* total = at(c, c_step, first_half, r, v);
        store(total, fma(scale, acc[r][v], first ? zero() : load(total)));
      }
    }
  }
  MP_INLINE void step(const float* x, const Vec* w) {
    MP_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const Vec xr = set1(x[r]);
      MP_UNROLL
      for (int v = 0; v < VECS; v++) acc[r][v] = fma(xr, w[v], acc[r][v]);
    }
  }
};

// sums += x[k * x_step + r] * panel[k][j] for ROWS rows, k ascending.
// depth_pairs: depth and the rows behind it are even.
template <Panel kind, int ROWS, int VECS>
MP_INLINE void multiply_onto(Accumulators<kind, ROWS, VECS>& sums, const float* x, int64_t x_step,
                             const char* panel, int64_t depth, int first_half) {
  if (kind == Panel::depth_pairs) {
    for (int64_t pair = 0; pair < depth / 2; pair++, x += 2 * x_step) {
      const uint32_t* lanes[VECS];
      Vec w[VECS];
      MP_UNROLL
      for (int v = 0; v < VECS; v++)
        lanes[v] = reinterpret_cast<const uint32_t*>(panel) + pair * kPanel + (first_half + v) * kLanes;
      MP_UNROLL
      for (int v = 0; v < VECS; v++) w[v] = pair_low(lanes[v]);
      sums.step(x, w);
      MP_UNROLL
      for (int v = 0; v < VECS; v++) w[v] = pair_high(lanes[v]);
      sums.step(x + x_step, w);
    }
  } else {
    for (int64_t k = 0; k < depth; k++, x += x_step) {
      Vec w[VECS];
      MP_UNROLL
      for (int v = 0; v < VECS; v++) {
        const int half = first_half + v;
        if (kind == Panel::wide) {
          w[v] = load(reinterpret_cast<const float*>(panel) + k * kPanel + half * kLanes);
        } else {
          const uint32_t* pairs = reinterpret_cast<const uint32_t*>(panel) + k * kLanes;
          w[v] = half == 0 ? pair_low(pairs) : pair_high(pairs);
        }
      }
      sums.step(x, w);
    }
  }
}

// c[r][j] (+)= the same.
template <Panel kind, int ROWS, int VECS>
inline void multiply(const float* x, int64_t x_step, const char* panel, int64_t depth,
                     float* c, int64_t c_step, bool accumulate, int first_half) {
  Accumulators<kind, ROWS, VECS> sums;
  sums.begin(c, c_step, first_half, accumulate);
  multiply_onto(sums, x, x_step, panel, depth, first_half);
  sums.end(c, c_step, first_half);
}

#if defined(MP_DOT)
// The same for rows and weights that are both bf16 pairs: x[pair * x_step + r] as 32-bit lanes.
template <int ROWS>
MP_INLINE void multiply_dot_onto(Accumulators<Panel::depth_pairs, ROWS, 2>& sums, const uint32_t* x,
                                 int64_t x_step, const char* panel, int64_t pairs) {
  for (int64_t pair = 0; pair < pairs; pair++, x += x_step) {
    __m512bh w[2];
    MP_UNROLL
    for (int v = 0; v < 2; v++) {
      const char* line = panel + (pair * kPanel + v * kLanes) * 4;
      w[v] = (__m512bh)_mm512_loadu_si512(line);
      prefetch_weights<ROWS>(line);
    }
    MP_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const __m512bh xr = (__m512bh)_mm512_set1_epi32(int(x[r]));
      MP_UNROLL
      for (int v = 0; v < 2; v++) sums.acc[r][v].v = _mm512_dpbf16_ps(sums.acc[r][v].v, xr, w[v]);
    }
  }
}
template <int ROWS>
inline void multiply_dot(const uint32_t* x, int64_t x_step, const char* panel, int64_t pairs,
                         float* c, int64_t c_step, bool accumulate) {
  Accumulators<Panel::depth_pairs, ROWS, 2> sums;
  sums.begin(c, c_step, 0, accumulate);
  multiply_dot_onto(sums, x, x_step, panel, pairs);
  sums.end(c, c_step, 0);
}
template <int ROWS>
void multiply_dot_panel(const float* x, int64_t x_step, const char* panel, int64_t depth, float* c, int64_t c_step,
                        bool accumulate) {
  multiply_dot<ROWS>(reinterpret_cast<const uint32_t*>(x), x_step, panel, depth / 2, c, c_step, accumulate);
}
#endif

template <Panel kind, int ROWS>
void multiply_panel(const float* x, int64_t x_step, const char* panel, int64_t depth, float* c, int64_t c_step,
                    bool accumulate) {
  if (ROWS <= kWholeRows) {
    multiply<kind, ROWS, 2>(x, x_step, panel, depth, c, c_step, accumulate, 0);
  } else {
    multiply<kind, ROWS, 1>(x, x_step, panel, depth, c, c_step, accumulate, 0);
    multiply<kind, ROWS, 1>(x, x_step, panel, depth, c, c_step, accumulate, 1);
  }
}

using PanelFunction = void (*)(const float*, int64_t, const char*, int64_t, float*, int64_t, bool);
#define MP_ROW_FUNCTIONS(f)                                                                                   \
  { f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12) }
template <Panel kind>
inline PanelFunction panel_function(int64_t rows) {
#define MP_PANEL(n) multiply_panel<kind, (n <= kTileRows ? n : 1)>
  static const PanelFunction functions[] = MP_ROW_FUNCTIONS(MP_PANEL);
#undef MP_PANEL
  return functions[rows - 1];
}
#if defined(MP_DOT)
inline PanelFunction dot_function(int64_t rows) {
#define MP_PANEL(n) multiply_dot_panel<n>
  static const PanelFunction functions[] = MP_ROW_FUNCTIONS(MP_PANEL);
#undef MP_PANEL
  return functions[rows - 1];
}
// c (+)= pairs of rows times one panel of pairs, for `rows` <= kTileRows rows.
inline void multiply_pairs(int64_t rows, const uint32_t* x, int64_t x_step, const uint32_t* panel, int64_t pairs,
                           float* c, int64_t c_step) {
  dot_function(rows)(reinterpret_cast<const float*>(x), x_step, reinterpret_cast<const char*>(panel), pairs * 2, c, c_step,
                     true);
}
#endif

// One panel of an attention tile for `rows` <= kTileRows rows.
inline void multiply_rows(Type type, int64_t rows, const float* x, int64_t x_step, const char* panel, int64_t depth,
                          float* c, int64_t c_step, bool accumulate) {
  if (rows <= 0) return;
  (type == Type::f32 ? panel_function<Panel::wide>(rows) : panel_function<Panel::column_pairs>(rows))(
      x, x_step, panel, depth, c, c_step, accumulate);
}

// How a linear multiplies: fp32 weights, bf16 weights with fp32 rows, or pairs with pairs.
enum class Form { wide, mixed, dot };
MP_INLINE Form form_of(const LinearArgs& a) {
  if (a.weight.type == Type::f32) return Form::wide;
#if defined(MP_DOT)
  if (a.x.type == Type::bf16) return Form::dot;
#endif
  return Form::mixed;
}

template <Form form>
inline PanelFunction product_function(int64_t rows) {
#if defined(MP_DOT)
  if (form == Form::dot) return dot_function(rows);
#endif
  return form == Form::wide ? panel_function<Panel::wide>(rows) : panel_function<Panel::depth_pairs>(rows);
}

// Rows [first, first + count) as fp32 [k][count], zeros behind an odd k; or, for dot, as pairs [k / 2][count].
inline void pack_rows(const LinearArgs& a, int64_t group, int64_t first, int64_t count, float* target) {
  const bool dot = form_of(a) == Form::dot;
  for (int64_t r = 0; r < count; r++) {
    const int64_t row = a.x_rows == nullptr ? first + r : a.x_rows[first + r];
    const char* source = a.x.at(row, group * a.x_group);
    for (int64_t k = 0; k < a.weight.depth(); k += kLanes) {
      const int64_t left = a.weight.depth() - k, n = left < kLanes ? left : kLanes;
      const int64_t rest = a.weight.k - k < n ? a.weight.k - k : n, given = rest < 0 ? 0 : rest;
      if (dot) {
        uint32_t pairs[kLanes / 2] = {};
        if (given > 0) std::memcpy(pairs, source + k * 2, size_t(given) * 2);
        for (int64_t i = 0; i < n / 2; i++)
          reinterpret_cast<uint32_t*>(target)[(k / 2 + i) * count + r] = pairs[i];
        continue;
      }
      const Vec x = load_part(source + k * item_bytes(a.x.type), a.x.type, given);
      if (count == 1) {
        store_part(reinterpret_cast<char*>(target + k), Type::f32, x, n);
        continue;
      }
      float lanes[kLanes];
      store(lanes, x);
      for (int64_t i = 0; i < n; i++) target[(k + i) * count + r] = lanes[i];
    }
  }
}

// From fp32 sums to what is stored: rounding, gate and up, residual.
inline void finish_rows(const LinearArgs& a, int64_t group, int64_t panel, int64_t first, int64_t count,
                        const float* c, int64_t c_step) {
  const Type type = a.y.type;
  const int64_t column = panel * a.weight.columns_per_panel();
  const int64_t left = a.weight.n - column;
  for (int64_t r = 0; r < count; r++) {
    const float* sums = c + r * c_step;
    char* y = a.y.at(first + r, group * a.y_group + column);
    const char* extra = a.residual.data == nullptr ? nullptr : a.residual.at(first + r, column);
    for (int half = 0; half < (a.weight.paired ? 1 : 2); half++) {
      const int64_t n = left - half * kLanes < kLanes ? left - half * kLanes : kLanes;
      if (n <= 0) break;
      const int64_t offset = half * kLanes * item_bytes(type);
      Vec value = load(sums + half * kLanes);
      if (a.weight.paired) value = gated(a.glu, rounded(value, type), rounded(load(sums + kLanes), type));
      if (extra != nullptr) value = add(load_part(extra + offset, type, n), rounded(value, type));
      store_part(y + offset, type, value, n);
    }
  }
}

struct LinearJob {
  const LinearArgs* args;
  float* rows;  // packed x of all groups: [group][tile][k][rows of the tile]
  int64_t tiles, tiles_per_block, blocks, panels_per_item, panel_items;
};

inline int64_t tile_rows(const LinearArgs& a, int64_t tile) {
  const int64_t left = a.rows - tile * kTileRows;
  return left < kTileRows ? left : kTileRows;
}

inline void pack_rows_item(const void* job_pointer, int64_t item) {
  const LinearJob& job = *static_cast<const LinearJob*>(job_pointer);
  const LinearArgs& a = *job.args;
  const int64_t group = item / job.tiles, tile = item % job.tiles;
  pack_rows(a, group, tile * kTileRows, tile_rows(a, tile),
            job.rows + (group * a.rows + tile * kTileRows) * a.weight.depth());
}

template <Form form>
inline void linear_item(const void* job_pointer, int64_t item) {
  const LinearJob& job = *static_cast<const LinearJob*>(job_pointer);
  const LinearArgs& a = *job.args;
  const Packed& w = a.weight;
  const int64_t first_panel = item % job.panel_items * job.panels_per_item;
  const int64_t block = item / job.panel_items % job.blocks;
  const int64_t group = item / job.panel_items / job.blocks;
  const int64_t end_panel = first_panel + job.panels_per_item < w.panels() ? first_panel + job.panels_per_item : w.panels();
  const char* weights = static_cast<const char*>(w.data) + group * w.panels() * w.panel_bytes();
  const float* packed = job.rows + group * a.rows * w.depth();
  const int64_t first_tile = block * job.tiles_per_block;
  const int64_t end_tile = first_tile + job.tiles_per_block < job.tiles ? first_tile + job.tiles_per_block : job.tiles;
  alignas(64) float c[kTileRows * kPanel];
  for (int64_t panel = first_panel; panel < end_panel; panel++) {
    for (int64_t tile = first_tile; tile < end_tile; tile++) {
      const int64_t rows = tile_rows(a, tile), first = tile * kTileRows;
      product_function<form>(rows)(packed + first * w.depth(), rows, weights + panel * w.panel_bytes(), w.depth(), c,
                                   kPanel, false);
      finish_rows(a, group, panel, first, rows, c, kPanel);
    }
  }
}

// Coded weights have products of their own: coded.h.
inline ItemFunction function_of(const LinearArgs& a);

inline void linear(const LinearArgs& a) {
  const Packed& w = a.weight;
  if (a.rows == 0 || w.n == 0) return;
  LinearJob job{};
  job.args = &a;
  job.rows = scratch_of<float>(kPackedRows, w.groups * a.rows * w.depth() + kLanes);
  job.tiles = (a.rows + kTileRows - 1) / kTileRows;
  // Rows of a block stay in the second-level cache while the panels pass by.
  const int64_t rows_in_cache = (384 << 10) / (w.k * 4 + 1);
  job.tiles_per_block = rows_in_cache / kTileRows < 4 ? 4 : rows_in_cache / kTileRows;
  job.blocks = (job.tiles + job.tiles_per_block - 1) / job.tiles_per_block;
  job.panels_per_item = 8;
  job.panel_items = (w.panels() + job.panels_per_item - 1) / job.panels_per_item;
  const bool parallel = !a.serial && w.groups * w.n * w.k * (a.rows + 8) > (1 << 20);
  run_items(w.groups * job.tiles, pack_rows_item, &job, parallel && a.rows > 32);
  run_items(w.groups * job.blocks * job.panel_items, function_of(a), &job, parallel);
}

}  // namespace MP_ISA
}  // namespace milepost
