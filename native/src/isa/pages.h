// Rows that lie in pages.
#pragma once

#include "common/types.h"

#include <cstring>

namespace milepost {
namespace MP_ISA {

// Entries of one head, one position after the other.
class Entries {
 public:
  Entries(const AttentionArgs& a, const Pages& pages, int64_t sequence, int64_t kv_head, int64_t position)
      : table_(a.table + a.table_starts[sequence] + position / a.match_unit), unit_(a.match_unit),
        offset_(position % a.match_unit), item_(item_bytes(a.type)), page_step_(pages.page_stride * item_),
        step_(pages.entry_stride * item_), start_(pages.data + kv_head * pages.head_stride * item_) {
    find();
  }
  const char* next() {
    if (offset_ == unit_) {
      offset_ = 0;
      table_++;
      find();
    }
    const char* entry = at_;
    offset_++;
    at_ += step_;
    return entry;
  }

 private:
  void find() { at_ = start_ + *table_ * page_step_ + offset_ * step_; }

  const int64_t* table_;
  int64_t unit_, offset_, item_, page_step_, step_;
  const char *start_, *at_;
};

// A row of `bytes`, and zeros up to `padded`, which is a multiple of 64.
MP_INLINE void copy_row(char* target, const char* source, int64_t bytes, int64_t padded) {
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64) std::memcpy(target + at, source + at, 64);
  if (at == padded) return;
  std::memcpy(target + at, source + at, size_t(bytes - at));
  std::memset(target + bytes, 0, size_t(padded - bytes));
}

}  // namespace MP_ISA
}  // namespace milepost
