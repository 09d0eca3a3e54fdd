// Inputs of the self-check: the same bits on every machine, and memory that tells what was left unwritten.
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "common/types.h"

namespace milepost::check {

// Numbers from integers alone: no library function decides a bit.
class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed * 2654435761u + 12345u) {}
  uint32_t next() {
    state_ = state_ * 1664525u + 1013904223u;
    return state_ ^ (state_ >> 15);
  }
  // Any sign and fraction, magnitudes from 2^-7 to 2.
  float value() {
    const float unit = float(int32_t(next())) * (1.0f / 2147483648.0f);
    const float scales[] = {0.03125f, 0.125f, 0.5f, 1.0f, 2.0f};
    return unit * scales[next() % 5];
  }

 private:
  uint32_t state_;
};

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// [rows, width] values in rows of `stride`; what nobody wrote, gaps between rows included, is NaN.
class Array {
 public:
  Array(int64_t rows, int64_t width, Type type = Type::f32, int64_t gap = 0)
      : rows_(rows), width_(width), stride_(width + gap), type_(type),
        // One element in front: no row starts at an address a vector would like.
        bytes_(size_t((rows * stride_ + 1) * item_bytes(type)), char(0xFF)) {}

  static Array random(int64_t rows, int64_t width, uint32_t seed, Type type = Type::f32, float scale = 1.0f,
                      float shift = 0.0f, int64_t gap = 0) {
    Array a(rows, width, type, gap);
    Random random(seed);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t column = 0; column < width; column++) a.set(row, column, random.value() * scale + shift);
    return a;
  }

  void set(int64_t row, int64_t column, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (type_ == Type::f32) {
      std::memcpy(view().at(row, column), &bits, 4);
    } else {
      const uint16_t high = uint16_t(bits >> 16);
      std::memcpy(view().at(row, column), &high, 2);
    }
  }
  Rows view() { return Rows{bytes_.data() + item_bytes(type_), type_, stride_}; }
  Rows from(int64_t row) {
    Rows rows = view();
    rows.data = rows.at(row);
    return rows;
  }
  float* floats() { return reinterpret_cast<float*>(view().data); }
  int64_t rows() const { return rows_; }

  // Values of rows [first, end), without the gaps.
  std::string values(int64_t first, int64_t end) {
    std::string text;
    for (int64_t row = first; row < end; row++) text.append(view().at(row), size_t(width_ * item_bytes(type_)));
    return text;
  }
  std::string values() { return values(0, rows_); }

 private:
  int64_t rows_, width_, stride_;
  Type type_;
  std::vector<char> bytes_;
};

inline bool is_finite(const std::string& values, Type type) {
  const size_t item = size_t(item_bytes(type));
  for (size_t i = 0; i + item <= values.size(); i += item) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + (4 - item), values.data() + i, item);
    if ((bits & 0x7F800000u) == 0x7F800000u) return false;
  }
  return true;
}

// FNV-1a.
inline uint32_t hash_of(const std::string& values) {
  uint32_t hash = 2166136261u;
  for (unsigned char c : values) hash = (hash ^ c) * 16777619u;
  return hash;
}

}  // namespace milepost::check
