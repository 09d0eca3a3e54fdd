// Sixteen fp32 lanes, whatever the instruction set.
//
// The numerics contract lives here: a value is a function of its sixteen-lane program, so paths with
// the same `kFused` give the same bits. AVX2 and AVX-512 fuse multiply and add; the baseline rounds
// twice, because a fused product without the instruction would be a library call.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(MP_AVX2) || defined(MP_AVX512)
#include <immintrin.h>
#endif

namespace milepost {
namespace MP_ISA {

constexpr int kLanes = 16;

// Values of four-bit codes: two's complement integers, and E2M1 floats.
alignas(64) constexpr float kInt4Values[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
alignas(64) constexpr float kE2m1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

#if defined(MP_AVX512)

constexpr bool kFused = true;
constexpr int kTileRows = 12;  // accumulators: 12 rows x 2 vectors
constexpr int kTileVecs = 2;
constexpr int kWholeRows = 12;  // up to this many rows both halves of a panel run side by side,
constexpr int kWholeCodedRows = 12;  // and so many where codes are decoded on the way
constexpr int kStateVecs = 4;

struct Vec { __m512 v; };
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Both return the second operand if one is NaN.
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
// a where x < y, else b (also for NaN).
inline Vec less_select(Vec x, Vec y, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), b.v, a.v)};
}
// 2^n for the integers n in [-126, 127] held by `shifted` = n + 1.5 * 2^23.
inline Vec power_of_two(Vec shifted) {
  __m512i n = _mm512_sub_epi32(_mm512_castps_si512(shifted.v), _mm512_set1_epi32(0x4B400000 - 127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(n, 23))};
}
inline Vec exponent_of(Vec x, Vec* mantissa) {  // x > 0 and normal; mantissa in [0.5, 1)
  __m512i bits = _mm512_castps_si512(x.v);
  __m512i e = _mm512_sub_epi32(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(126));
  bits = _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(0x007FFFFF)), _mm512_set1_epi32(0x3F000000));
  mantissa->v = _mm512_castsi512_ps(bits);
  return {_mm512_cvtepi32_ps(e)};
}
inline Vec load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// Rounds to nearest even; NaN stays NaN.
inline void store_bf16(uint16_t* p, Vec a) {
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
// Pairs of bf16 in 32-bit lanes: the low halves, and the high halves.
inline Vec pair_low(const uint32_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
inline Vec pair_high(const uint32_t* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xFFFF0000u))))};
}
// The other way: two vectors of values that are bf16 already.
inline __m512i pair_bits(Vec low, Vec high) {
  return _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(_mm512_castps_si512(low.v), 16),
                                 _mm512_castps_si512(high.v));
}
inline void store_pairs(uint32_t* p, Vec low, Vec high) { _mm512_storeu_si512(p, pair_bits(low, high)); }
// Sixteen codes; those of four bits from bit SHIFT of each lane.
inline Vec load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
template <int SHIFT>
inline Vec nibbles(const uint32_t* p, const float* table) {
  const __m512i lanes = _mm512_loadu_si512(p), index = SHIFT == 0 ? lanes : _mm512_srli_epi32(lanes, SHIFT);
  // A permutation reads the lowest four bits of its index.
  return {_mm512_permutexvar_ps(index, _mm512_loadu_ps(table))};
}
template <int SHIFT>
inline Vec load_i4(const uint32_t* p) { return nibbles<SHIFT>(p, kInt4Values); }
template <int SHIFT>
inline Vec load_e2m1(const uint32_t* p) { return nibbles<SHIFT>(p, kE2m1Values); }
// 2^(code - 127); code 1 to 254.
inline Vec load_e8m0(const uint8_t* p) {
  __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 23))};
}
inline float sum_of_eight(__m256 x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
// Lane i + lane i+8, then i+4, i+2, i+1.
inline float sum(Vec a) {
  return sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)));
}
// block[j * out_step + i] = lane j of row i, where row(i) is an address of any alignment.
template <class Row>
inline __attribute__((always_inline)) void transpose_of(uint32_t* block, int64_t out_step, Row row) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(row(i));
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; i++) {
    _mm512_storeu_si512(block + (i + 0) * out_step, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(block + (i + 8) * out_step, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD));
    _mm512_storeu_si512(block + (i + 4) * out_step, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(block + (i + 12) * out_step, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD));
  }
}

#elif defined(MP_AVX2)

constexpr bool kFused = true;
constexpr int kTileRows = 6;  // accumulators: 6 rows x 1 vector of two registers
constexpr int kTileVecs = 1;
constexpr int kWholeRows = 2;
constexpr int kWholeCodedRows = 1;
constexpr int kStateVecs = 1;

struct Vec { __m256 a, b; };
#define MP_EACH(expr_a, expr_b) return Vec{expr_a, expr_b}
inline Vec zero() { MP_EACH(_mm256_setzero_ps(), _mm256_setzero_ps()); }
inline Vec set1(float x) { MP_EACH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
inline Vec load(const float* p) { MP_EACH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline Vec add(Vec x, Vec y) { MP_EACH(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
inline Vec sub(Vec x, Vec y) { MP_EACH(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
inline Vec mul(Vec x, Vec y) { MP_EACH(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
inline Vec div(Vec x, Vec y) { MP_EACH(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
inline Vec fma(Vec x, Vec y, Vec z) { MP_EACH(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
inline Vec max(Vec x, Vec y) { MP_EACH(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
inline Vec min(Vec x, Vec y) { MP_EACH(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
inline Vec less_select(Vec x, Vec y, Vec p, Vec q) {
  MP_EACH(_mm256_blendv_ps(q.a, p.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(q.b, p.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)));
}
inline __m256 power_of_two(__m256 shifted) {
  __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4B400000 - 127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
inline Vec power_of_two(Vec shifted) { MP_EACH(power_of_two(shifted.a), power_of_two(shifted.b)); }
inline __m256 exponent_of(__m256 x, __m256* mantissa) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i e = _mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(126));
  bits = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x007FFFFF)), _mm256_set1_epi32(0x3F000000));
  *mantissa = _mm256_castsi256_ps(bits);
  return _mm256_cvtepi32_ps(e);
}
inline Vec exponent_of(Vec x, Vec* mantissa) {
  MP_EACH(exponent_of(x.a, &mantissa->a), exponent_of(x.b, &mantissa->b));
}
inline __m256 widen(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load_bf16(const uint16_t* p) { MP_EACH(widen(p), widen(p + 8)); }
inline __m256i bf16_bits(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
inline void store_bf16(uint16_t* p, Vec x) {
  __m256i packed = _mm256_packus_epi32(bf16_bits(x.a), bf16_bits(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}
inline __m256 low_halves(const uint32_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
}
inline __m256 high_halves(const uint32_t* p) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                              _mm256_set1_epi32(int(0xFFFF0000u))));
}
inline Vec pair_low(const uint32_t* p) { MP_EACH(low_halves(p), low_halves(p + 8)); }
inline Vec pair_high(const uint32_t* p) { MP_EACH(high_halves(p), high_halves(p + 8)); }
inline void store_pairs(uint32_t* p, __m256 low, __m256 high) {
  __m256i pairs = _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(low), 16), _mm256_castps_si256(high), 0xAA);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pairs);
}
inline void store_pairs(uint32_t* p, Vec low, Vec high) {
  store_pairs(p, low.a, high.a);
  store_pairs(p + 8, low.b, high.b);
}
inline __m256 eight_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_i8(const int8_t* p) { MP_EACH(eight_i8(p), eight_i8(p + 8)); }
template <int SHIFT>
inline __m256 eight_i4(const uint32_t* p) {
  __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(lanes, 28 - SHIFT), 28));
}
template <int SHIFT>
inline Vec load_i4(const uint32_t* p) { MP_EACH(eight_i4<SHIFT>(p), eight_i4<SHIFT>(p + 8)); }
template <int SHIFT>
inline __m256 eight_e2m1(const uint32_t* p) {
  __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  // A permutation reads the lowest three bits of its index: the magnitude. The fourth is the sign.
  __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kE2m1Values), _mm256_srli_epi32(lanes, SHIFT));
  __m256i sign = _mm256_and_si256(_mm256_slli_epi32(lanes, 28 - SHIFT), _mm256_set1_epi32(int(0x80000000u)));
  return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
}
template <int SHIFT>
inline Vec load_e2m1(const uint32_t* p) { MP_EACH(eight_e2m1<SHIFT>(p), eight_e2m1<SHIFT>(p + 8)); }
inline __m256 eight_e8m0(const uint8_t* p) {
  __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 23));
}
inline Vec load_e8m0(const uint8_t* p) { MP_EACH(eight_e8m0(p), eight_e8m0(p + 8)); }
inline float sum(Vec a) {
  __m256 x = _mm256_add_ps(a.a, a.b);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
template <class Row>
inline __attribute__((always_inline)) void transpose_eight(uint32_t* block, int64_t out_step, int first, int lane, Row row) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(row(first + i) + 4 * lane));
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(reinterpret_cast<float*>(block + i * out_step), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(reinterpret_cast<float*>(block + (i + 4) * out_step),
                     _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
template <class Row>
inline __attribute__((always_inline)) void transpose_of(uint32_t* block, int64_t out_step, Row row) {
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 16; j += 8) transpose_eight(block + j * out_step + i, out_step, i, j, row);
}
#undef MP_EACH

#else

constexpr bool kFused = false;
constexpr int kTileRows = 2;
constexpr int kTileVecs = 1;
constexpr int kWholeRows = 1;
constexpr int kWholeCodedRows = 0;
constexpr int kStateVecs = 1;

typedef float Quad __attribute__((vector_size(16)));
struct Vec { Quad q[4]; };
template <class F>
inline Vec each(F f) {
  Vec r;
  for (int i = 0; i < 4; i++) r.q[i] = f(i);
  return r;
}
template <class F>
inline Vec each_lane(F f) {
  float lanes[16];
  for (int i = 0; i < 16; i++) lanes[i] = f(i);
  Vec r;
  std::memcpy(&r, lanes, 64);
  return r;
}
inline uint32_t lane_bits(const Vec& a, int i) {
  float x = a.q[i / 4][i % 4];
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline Vec set1(float x) { return each([=](int) { return Quad{x, x, x, x}; }); }
inline Vec zero() { return set1(0.0f); }
inline Vec load(const float* p) { Vec r; std::memcpy(&r, p, 64); return r; }
inline void store(float* p, Vec a) { std::memcpy(p, &a, 64); }
inline Vec add(Vec a, Vec b) { return each([&](int i) { return a.q[i] + b.q[i]; }); }
inline Vec sub(Vec a, Vec b) { return each([&](int i) { return a.q[i] - b.q[i]; }); }
inline Vec mul(Vec a, Vec b) { return each([&](int i) { return a.q[i] * b.q[i]; }); }
inline Vec div(Vec a, Vec b) { return each([&](int i) { return a.q[i] / b.q[i]; }); }
inline Vec fma(Vec a, Vec b, Vec c) { return each([&](int i) { return a.q[i] * b.q[i] + c.q[i]; }); }
inline Vec max(Vec a, Vec b) { return each([&](int i) { return a.q[i] > b.q[i] ? a.q[i] : b.q[i]; }); }
inline Vec min(Vec a, Vec b) { return each([&](int i) { return a.q[i] < b.q[i] ? a.q[i] : b.q[i]; }); }
inline Vec less_select(Vec x, Vec y, Vec p, Vec q) {
  return each([&](int i) { return x.q[i] < y.q[i] ? p.q[i] : q.q[i]; });
}
inline Vec power_of_two(Vec shifted) {
  return each_lane([&](int i) { return float_of((lane_bits(shifted, i) - (0x4B400000u - 127u)) << 23); });
}
inline Vec exponent_of(Vec x, Vec* mantissa) {
  *mantissa = each_lane([&](int i) { return float_of((lane_bits(x, i) & 0x007FFFFFu) | 0x3F000000u); });
  return each_lane([&](int i) { return float(int(lane_bits(x, i) >> 23) - 126); });
}
inline Vec load_bf16(const uint16_t* p) {
  return each_lane([&](int i) { return float_of(uint32_t(p[i]) << 16); });
}
inline void store_bf16(uint16_t* p, Vec a) {
  for (int i = 0; i < 16; i++) {
    uint32_t bits = lane_bits(a, i);
    bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    p[i] = uint16_t((nan ? bits | 0x00400000u : bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
}
inline Vec pair_low(const uint32_t* p) { return each_lane([&](int i) { return float_of(p[i] << 16); }); }
inline Vec pair_high(const uint32_t* p) { return each_lane([&](int i) { return float_of(p[i] & 0xFFFF0000u); }); }
inline void store_pairs(uint32_t* p, Vec low, Vec high) {
  for (int i = 0; i < 16; i++) p[i] = lane_bits(low, i) >> 16 | (lane_bits(high, i) & 0xFFFF0000u);
}
inline Vec load_i8(const int8_t* p) { return each_lane([&](int i) { return float(p[i]); }); }
template <int SHIFT>
inline Vec load_i4(const uint32_t* p) { return each_lane([&](int i) { return kInt4Values[p[i] >> SHIFT & 15]; }); }
template <int SHIFT>
inline Vec load_e2m1(const uint32_t* p) { return each_lane([&](int i) { return kE2m1Values[p[i] >> SHIFT & 15]; }); }
inline Vec load_e8m0(const uint8_t* p) { return each_lane([&](int i) { return float_of(uint32_t(p[i]) << 23); }); }
inline float sum(Vec a) {
  Quad x = a.q[0] + a.q[2], y = a.q[1] + a.q[3];
  Quad z = x + y;
  return (z[0] + z[2]) + (z[1] + z[3]);
}
template <class Row>
inline __attribute__((always_inline)) void transpose_of(uint32_t* block, int64_t out_step, Row row) {
  for (int i = 0; i < 16; i++) {
    const char* lanes = row(i);
    for (int j = 0; j < 16; j++) std::memcpy(block + j * out_step + i, lanes + 4 * j, 4);
  }
}

#endif

inline void transpose(uint32_t* block, const uint32_t* rows, int64_t row_step, int64_t out_step) {
  transpose_of(block, out_step, [=](int i) { return reinterpret_cast<const char*>(rows + i * row_step); });
}

}  // namespace MP_ISA
}  // namespace milepost
