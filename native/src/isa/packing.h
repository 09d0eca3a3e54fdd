// Weights from rows into panels, once, at load.
#pragma once

#include "isa/gemm.h"

namespace milepost {
namespace MP_ISA {

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

// The part that holds row `row`, which then counts within the part.
inline int64_t part_of(const PackArgs& a, int64_t* row) {
  int64_t part = 0;
  for (; *row >= a.parts[part].rows; part++) *row -= a.parts[part].rows;
  return part;
}

inline const char* row_start(const PackArgs& a, int64_t group, int64_t row) {
  const PackPart& part = a.parts[part_of(a, &row)];
  return part.data + (row * part.stride + group * a.group) * item_bytes(a.target.type);
}

// A panel without padding columns whose rows have no gaps: a block of 16 columns by 16 fp32, or by 16 pairs of
// bf16, at a time, so that every line of memory is read once. False if it is not such a panel.
inline bool pack_blocks(const PackArgs& a, int64_t group, int64_t panel, char* target) {
  const Packed& w = a.target;
  const bool pairs = w.type == Type::bf16;
  if (a.column != 1 || (pairs && w.k % 2)) return false;
  const char* rows[kPanel];
  for (int64_t column = 0; column < kPanel; column++) {
    const int64_t row = source_row(w, panel, column);
    if (row < 0) return false;
    rows[column] = row_start(a, group, row);
  }
  const int64_t units = pairs ? w.k / 2 : w.k;
  int64_t unit = 0;
  for (; unit + kLanes <= units; unit += kLanes)
    for (int half = 0; half < kPanel; half += kLanes)
      transpose_of(reinterpret_cast<uint32_t*>(target) + unit * kPanel + half, kPanel,
                   [&](int i) { return rows[half + i] + unit * 4; });
  for (; unit < units; unit++)
    for (int64_t column = 0; column < kPanel; column++)
      std::memcpy(target + (unit * kPanel + column) * 4, rows[column] + unit * 4, 4);
  std::memset(target + units * kPanel * 4, 0, size_t(w.panel_bytes() - units * kPanel * 4));  // behind an odd k
  return true;
}

// Value by value: any strides, padding, an odd k.
inline void pack_values(const PackArgs& a, int64_t group, int64_t panel, char* target) {
  const Packed& w = a.target;
  const int64_t bytes = item_bytes(w.type);
  for (int64_t column = 0; column < kPanel; column++) {
    const int64_t row = source_row(w, panel, column);
    const char* source = row < 0 ? nullptr : row_start(a, group, row);
    for (int64_t k = 0; k < w.depth(); k++) {
      const int64_t place = w.type == Type::f32 ? k * kPanel + column : (k / 2 * kPanel + column) * 2 + k % 2;
      if (source == nullptr || k >= w.k) std::memset(target + place * bytes, 0, size_t(bytes));
      else std::memcpy(target + place * bytes, source + k * a.column * bytes, size_t(bytes));
    }
  }
}

// Whether there is a NaN or an infinity among the values of a panel, the last of which may be short.
inline bool has_not_finite(const char* panel, int64_t bytes, Type type) {
  if (type == Type::f32) {
    int32_t largest = 0;
    for (int64_t i = 0; i < bytes; i += 4) {
      int32_t bits;
      std::memcpy(&bits, panel + i, 4);
      bits &= 0x7FFFFFFF;
      largest = bits > largest ? bits : largest;
    }
    return largest >= 0x7F800000;
  }
  int16_t largest = 0;
  for (int64_t i = 0; i < bytes; i += 2) {
    int16_t bits;
    std::memcpy(&bits, panel + i, 2);
    bits = int16_t(bits & 0x7FFF);
    largest = bits > largest ? bits : largest;
  }
  return largest >= 0x7F80;
}

// The first part among the rows of a panel that holds a value that is not finite.
inline int64_t first_not_finite(const PackArgs& a, int64_t group, int64_t panel) {
  const int64_t bytes = item_bytes(a.target.type);
  int64_t first = a.num_parts;
  for (int64_t column = 0; column < kPanel; column++) {
    int64_t row = source_row(a.target, panel, column);
    if (row < 0) continue;
    const char* source = row_start(a, group, row);
    const int64_t part = part_of(a, &row);
    for (int64_t k = 0; k < a.target.k && part < first; k++)
      if (has_not_finite(source + k * a.column * bytes, bytes, a.target.type)) first = part;
  }
  return first;
}

struct PackJob {
  const PackArgs* args;
  int64_t panels_per_item;
  int64_t* first_not_finite;  // the smallest of all panels
};

inline void pack_item(const void* job_pointer, int64_t item) {
  const PackJob& job = *static_cast<const PackJob*>(job_pointer);
  const PackArgs& a = *job.args;
  const Packed& w = a.target;
  const int64_t panels = w.groups * w.panels(), first = item * job.panels_per_item;
  const int64_t end = first + job.panels_per_item < panels ? first + job.panels_per_item : panels;
  for (int64_t at = first; at < end; at++) {
    const int64_t group = at / w.panels(), panel = at % w.panels();
    char* target = static_cast<char*>(w.data) + at * w.panel_bytes();
    if (!pack_blocks(a, group, panel, target)) pack_values(a, group, panel, target);
    if (!has_not_finite(target, w.panel_bytes(), w.type)) continue;
    const int64_t part = first_not_finite(a, group, panel);
    int64_t known = __atomic_load_n(job.first_not_finite, __ATOMIC_RELAXED);
    while (part < known && !__atomic_compare_exchange_n(job.first_not_finite, &known, part, false, __ATOMIC_RELAXED,
                                                         __ATOMIC_RELAXED)) {
    }
  }
}

// Threads take neighbouring panels of at least two large pages, so that not all of them wait for the same page.
constexpr int64_t kPackItemBytes = 4 << 20;

inline int64_t pack(const PackArgs& a) {
  const Packed& w = a.target;
  const int64_t panels = w.groups * w.panels(), rounds = w.bytes() / (a.threads * kPackItemBytes);
  const int64_t items = w.bytes() < kPackItemBytes / 2 ? 1 : a.threads * (rounds < 1 ? 1 : rounds);
  int64_t first = a.num_parts;
  PackJob job{&a, (panels + items - 1) / items, &first};
  run_items_once((panels + job.panels_per_item - 1) / job.panels_per_item, pack_item, &job, a.threads);
  return first < a.num_parts ? first : -1;
}

}  // namespace MP_ISA
}  // namespace milepost
