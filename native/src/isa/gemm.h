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

template <Type type>
inline Vec panel_vec(const char* panel, int64_t k, int half) {
  if (type == Type::f32) return load(reinterpret_cast<const float*>(panel) + k * kPanel + half * kLanes);
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(panel) + k * kLanes;
  return half == 0 ? pair_low(pairs) : pair_high(pairs);
}

// c[r][p * 32 + j] (+)= sum over k of x[k * x_step + r] * panel_p[k][j], for ROWS rows and PANELS panels.
template <Type type, int ROWS, int PANELS, int VECS>
inline void multiply(const float* x, int64_t x_step, const char* panels, int64_t panel_bytes, int64_t depth,
                     float* c, int64_t c_step, bool accumulate, int first_half) {
  Vec acc[ROWS][PANELS * VECS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < PANELS * VECS; v++)
      acc[r][v] = accumulate ? load(c + r * c_step + v / VECS * kPanel + (first_half + v % VECS) * kLanes) : zero();
  for (int64_t k = 0; k < depth; k++) {
    Vec w[PANELS * VECS];
    for (int v = 0; v < PANELS * VECS; v++)
      w[v] = panel_vec<type>(panels + v / VECS * panel_bytes, k, first_half + v % VECS);
    for (int r = 0; r < ROWS; r++) {
      const Vec xr = set1(x[k * x_step + r]);
      for (int v = 0; v < PANELS * VECS; v++) acc[r][v] = fma(xr, w[v], acc[r][v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < PANELS * VECS; v++)
      store(c + r * c_step + v / VECS * kPanel + (first_half + v % VECS) * kLanes, acc[r][v]);
}

template <Type type, int ROWS>
void multiply_panel(const float* x, int64_t x_step, const char* panel, int64_t depth, float* c, int64_t c_step,
                    bool accumulate) {
  if (kTileVecs == 2) {
    multiply<type, ROWS, 1, 2>(x, x_step, panel, 0, depth, c, c_step, accumulate, 0);
  } else {
    multiply<type, ROWS, 1, 1>(x, x_step, panel, 0, depth, c, c_step, accumulate, 0);
    multiply<type, ROWS, 1, 1>(x, x_step, panel, 0, depth, c, c_step, accumulate, 1);
  }
}

using PanelFunction = void (*)(const float*, int64_t, const char*, int64_t, float*, int64_t, bool);
template <Type type>
inline PanelFunction panel_function(int64_t rows) {
  static const PanelFunction functions[] = {
      multiply_panel<type, 1>,
#define MP_ROWS(n) multiply_panel<type, (n <= kTileRows ? n : 1)>
      MP_ROWS(2), MP_ROWS(3), MP_ROWS(4), MP_ROWS(5), MP_ROWS(6), MP_ROWS(7), MP_ROWS(8), MP_ROWS(9),
      MP_ROWS(10), MP_ROWS(11), MP_ROWS(12)
#undef MP_ROWS
  };
  return functions[rows - 1];
}
// One panel for `rows` <= kTileRows rows.
inline void multiply_rows(Type type, int64_t rows, const float* x, int64_t x_step, const char* panel, int64_t depth,
                          float* c, int64_t c_step, bool accumulate) {
  if (rows <= 0) return;
  (type == Type::f32 ? panel_function<Type::f32>(rows) : panel_function<Type::bf16>(rows))(
      x, x_step, panel, depth, c, c_step, accumulate);
}
template <Type type>
inline void multiply_wide(int64_t rows, const float* x, const char* panels, int64_t panel_bytes, int64_t depth,
                          float* c, int64_t c_step) {
  if (rows == 1) multiply<type, 1, 2, 2>(x, 1, panels, panel_bytes, depth, c, c_step, false, 0);
  else if (kWideRows >= 2) multiply<type, 2, 2, 2>(x, 2, panels, panel_bytes, depth, c, c_step, false, 0);
}

// Rows [first, first + count) as fp32 [k][count].
inline void pack_rows(const LinearArgs& a, int64_t group, int64_t first, int64_t count, float* target) {
  for (int64_t r = 0; r < count; r++) {
    const int64_t row = a.x_rows == nullptr ? first + r : a.x_rows[first + r];
    const char* source = a.x.at(row, group * a.x_group);
    for (int64_t k = 0; k < a.weight.k; k += kLanes) {
      const int64_t n = a.weight.k - k < kLanes ? a.weight.k - k : kLanes;
      const Vec x = load_part(source + k * item_bytes(a.x.type), a.x.type, n);
      float lanes[kLanes];
      if (count == 1) {
        store_part(reinterpret_cast<char*>(target + k), Type::f32, x, n);
        continue;
      }
      store(lanes, x);
      for (int64_t i = 0; i < n; i++) target[(k + i) * count + r] = lanes[i];
    }
  }
}

// From fp32 sums to what is stored: rounding, SiLU(gate) * up, residual.
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
      if (a.weight.paired) value = mul(silu(rounded(value, type)), rounded(load(sums + kLanes), type));
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

inline void pack_item(const void* job_pointer, int64_t item) {
  const LinearJob& job = *static_cast<const LinearJob*>(job_pointer);
  const LinearArgs& a = *job.args;
  const int64_t group = item / job.tiles, tile = item % job.tiles;
  pack_rows(a, group, tile * kTileRows, tile_rows(a, tile),
            job.rows + (group * a.rows + tile * kTileRows) * a.weight.k);
}

template <Type type>
inline void linear_item(const void* job_pointer, int64_t item) {
  const LinearJob& job = *static_cast<const LinearJob*>(job_pointer);
  const LinearArgs& a = *job.args;
  const Packed& w = a.weight;
  const int64_t first_panel = item % job.panel_items * job.panels_per_item;
  const int64_t block = item / job.panel_items % job.blocks;
  const int64_t group = item / job.panel_items / job.blocks;
  const int64_t end_panel = first_panel + job.panels_per_item < w.panels() ? first_panel + job.panels_per_item : w.panels();
  const char* weights = static_cast<const char*>(w.data) + group * w.panels() * w.panel_bytes();
  const float* packed = job.rows + group * a.rows * w.k;
  const int64_t first_tile = block * job.tiles_per_block;
  const int64_t end_tile = first_tile + job.tiles_per_block < job.tiles ? first_tile + job.tiles_per_block : job.tiles;
  alignas(64) float c[kTileRows * kPanel * 2];
  int64_t panel = first_panel;
  if (a.rows <= kWideRows) {
    for (; panel + 1 < end_panel; panel += 2) {
      multiply_wide<type>(a.rows, packed, weights + panel * w.panel_bytes(), w.panel_bytes(), w.k, c, 2 * kPanel);
      finish_rows(a, group, panel, 0, a.rows, c, 2 * kPanel);
      finish_rows(a, group, panel + 1, 0, a.rows, c + kPanel, 2 * kPanel);
    }
  }
  for (; panel < end_panel; panel++) {
    for (int64_t tile = first_tile; tile < end_tile; tile++) {
      const int64_t rows = tile_rows(a, tile), first = tile * kTileRows;
      panel_function<type>(rows)(packed + first * w.k, rows, weights + panel * w.panel_bytes(), w.k, c, kPanel, false);
      finish_rows(a, group, panel, first, rows, c, kPanel);
    }
  }
}

inline void linear(const LinearArgs& a) {
  const Packed& w = a.weight;
  if (a.rows == 0 || w.n == 0) return;
  LinearJob job{};
  job.args = &a;
  job.rows = scratch_of<float>(kPackedRows, w.groups * a.rows * w.k + kLanes);
  job.tiles = (a.rows + kTileRows - 1) / kTileRows;
  // Rows of a block stay in the second-level cache while the panels pass by.
  const int64_t rows_in_cache = (384 << 10) / (w.k * 4 + 1);
  job.tiles_per_block = rows_in_cache / kTileRows < 4 ? 4 : rows_in_cache / kTileRows;
  job.blocks = (job.tiles + job.tiles_per_block - 1) / job.tiles_per_block;
  job.panels_per_item = 8;
  job.panel_items = (w.panels() + job.panels_per_item - 1) / job.panels_per_item;
  const bool parallel = w.groups * w.n * w.k * (a.rows + 8) > (1 << 20);
  run_items(w.groups * job.tiles, pack_item, &job, parallel && a.rows > 32);
  run_items(w.groups * job.blocks * job.panel_items, w.type == Type::f32 ? linear_item<Type::f32> : linear_item<Type::bf16>,
            &job, parallel);
}

// Column `column` of the product is row `source_row` of the weights; -1: padding.
inline int64_t source_row(const Packed& w, int64_t panel, int64_t column) {
  if (!w.paired) {
    const int64_t row = panel * kPanel + column;
    return row < w.n ? row : -1;
  }
  const int64_t row = panel * kLanes + column % kLanes;
  if (row >= w.n) return -1;
  return column < kLanes ? row : w.n + row;
}

inline float value_at(const PackArgs& a, int64_t group, int64_t row, int64_t k) {
  const char* p = a.source.at(row, group * a.group + k * a.column);
  if (a.source.type == Type::f32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

inline void pack_panel(const void* args, int64_t item) {
  const PackArgs& a = *static_cast<const PackArgs*>(args);
  const Packed& w = a.target;
  const int64_t group = item / w.panels(), panel = item % w.panels();
  char* target = static_cast<char*>(w.data) + item * w.panel_bytes();
  for (int64_t column = 0; column < kPanel; column++) {
    const int64_t row = source_row(w, panel, column);
    for (int64_t k = 0; k < w.k; k++) {
      const float x = row < 0 ? 0.0f : value_at(a, group, row, k);
      if (w.type == Type::f32) {
        reinterpret_cast<float*>(target)[k * kPanel + column] = x;
      } else {
        // The value is a bf16 already: its upper half is all of it.
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        const int64_t at = k * kPanel + column % kLanes * 2 + column / kLanes;
        reinterpret_cast<uint16_t*>(target)[at] = uint16_t(bits >> 16);
      }
    }
  }
}

inline void pack(const PackArgs& a) { run_items(a.target.groups * a.target.panels(), pack_panel, &a, true); }

}  // namespace MP_ISA
}  // namespace milepost
