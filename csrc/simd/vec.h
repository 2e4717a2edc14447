// Sixteen floats at a time, on every instruction set: F16v is one register of AVX-512, two of AVX2,
// or an array that the compiler vectorises.  Only for *.isa.cpp.
//
// add, sub, mul round each result; fma rounds once where the machine can (all but portable).  Sums
// whose bits matter use mul and add.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/isa.h"

#ifdef HMT_AVX2
#include <immintrin.h>
#endif

// Builds with sanitizers check each access of each copy: with neither copies nor unrolled loops
// (HMT_UNROLL) they took 168 s of a core instead of 272.
#if defined(HMT_SANITIZED)
#define HMT_INLINE inline
#else
#define HMT_INLINE inline __attribute__((always_inline))
#endif

namespace hmt::HMT_ISA {

using std::size_t;

HMT_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
HMT_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
HMT_INLINE float bf16_to_float(uint16_t value) { return from_bits(uint32_t{value} << 16); }
// To the nearest, ties to even; NaN stays NaN.
HMT_INLINE uint16_t float_to_bf16(float value) {
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 64u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(HMT_AVX512)

struct F16v { __m512 v; };
struct I16v { __m512i v; };

HMT_INLINE F16v zero() { return {_mm512_setzero_ps()}; }
HMT_INLINE F16v set1(float x) { return {_mm512_set1_ps(x)}; }
HMT_INLINE F16v load(const float* p) { return {_mm512_loadu_ps(p)}; }
HMT_INLINE void store(float* p, F16v a) { _mm512_storeu_ps(p, a.v); }
HMT_INLINE F16v load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
HMT_INLINE F16v load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
HMT_INLINE void store_bf16(uint16_t* p, F16v a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
HMT_INLINE void store_f16(uint16_t* p, F16v a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, 0));
}
HMT_INLINE F16v add(F16v a, F16v b) { return {_mm512_add_ps(a.v, b.v)}; }
HMT_INLINE F16v sub(F16v a, F16v b) { return {_mm512_sub_ps(a.v, b.v)}; }
HMT_INLINE F16v mul(F16v a, F16v b) { return {_mm512_mul_ps(a.v, b.v)}; }
HMT_INLINE F16v div(F16v a, F16v b) { return {_mm512_div_ps(a.v, b.v)}; }
HMT_INLINE F16v max(F16v a, F16v b) { return {_mm512_max_ps(a.v, b.v)}; }
HMT_INLINE F16v min(F16v a, F16v b) { return {_mm512_min_ps(a.v, b.v)}; }
HMT_INLINE F16v fma(F16v a, F16v b, F16v c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
HMT_INLINE F16v abs(F16v a) { return {_mm512_abs_ps(a.v)}; }
HMT_INLINE F16v round_even(F16v a) { return {_mm512_roundscale_ps(a.v, 0)}; }
HMT_INLINE I16v to_int(F16v a) { return {_mm512_cvtps_epi32(a.v)}; }  // ties to even
HMT_INLINE F16v to_float(I16v a) { return {_mm512_cvtepi32_ps(a.v)}; }
HMT_INLINE I16v load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
HMT_INLINE void store(int32_t* p, I16v a) { _mm512_storeu_si512(p, a.v); }
HMT_INLINE I16v set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
HMT_INLINE I16v add(I16v a, I16v b) { return {_mm512_add_epi32(a.v, b.v)}; }
HMT_INLINE I16v sub(I16v a, I16v b) { return {_mm512_sub_epi32(a.v, b.v)}; }
HMT_INLINE I16v mul(I16v a, I16v b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
HMT_INLINE I16v max(I16v a, I16v b) { return {_mm512_max_epi32(a.v, b.v)}; }
HMT_INLINE I16v bits(F16v a) { return {_mm512_castps_si512(a.v)}; }
// The lowest byte of each lane.
HMT_INLINE void store_bytes(int8_t* p, I16v a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
// 2^n for integral n in -126..127.
HMT_INLINE F16v power_of_two(I16v n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
// Each lane plus four products of unsigned bytes of `a` and signed bytes of `b`; never saturates.
HMT_INLINE I16v dot4_u8s8(I16v sum, const void* a, const void* b) {
  return {_mm512_dpbusd_epi32(sum.v, _mm512_loadu_si512(a), _mm512_loadu_si512(b))};
}

#elif defined(HMT_AVX2)

struct F16v { __m256 lo, hi; };
struct I16v { __m256i lo, hi; };

HMT_INLINE F16v zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HMT_INLINE F16v set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HMT_INLINE F16v load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HMT_INLINE void store(float* p, F16v a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
HMT_INLINE __m256 half_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
HMT_INLINE F16v load_bf16(const uint16_t* p) { return {half_bf16(p), half_bf16(p + 8)}; }
HMT_INLINE F16v load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
HMT_INLINE void store_bf16(uint16_t* p, F16v a) {
  float lanes[16];
  store(lanes, a);
  for (size_t i = 0; i < 16; ++i) p[i] = float_to_bf16(lanes[i]);
}
HMT_INLINE void store_f16(uint16_t* p, F16v a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, 0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, 0));
}
HMT_INLINE F16v add(F16v a, F16v b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
HMT_INLINE F16v sub(F16v a, F16v b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
HMT_INLINE F16v mul(F16v a, F16v b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
HMT_INLINE F16v div(F16v a, F16v b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
HMT_INLINE F16v max(F16v a, F16v b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
HMT_INLINE F16v min(F16v a, F16v b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
HMT_INLINE F16v fma(F16v a, F16v b, F16v c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
HMT_INLINE F16v abs(F16v a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
HMT_INLINE F16v round_even(F16v a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
HMT_INLINE I16v to_int(F16v a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
HMT_INLINE F16v to_float(I16v a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
HMT_INLINE I16v load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
HMT_INLINE void store(int32_t* p, I16v a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
HMT_INLINE I16v set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
HMT_INLINE I16v add(I16v a, I16v b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
HMT_INLINE I16v sub(I16v a, I16v b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
HMT_INLINE I16v mul(I16v a, I16v b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
HMT_INLINE I16v max(I16v a, I16v b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
HMT_INLINE I16v bits(F16v a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
HMT_INLINE void store_bytes(int8_t* p, I16v a) {
  const __m256i low = _mm256_set1_epi32(0xff);
  // Packing works on 128-bit halves: four lanes of lo, four of hi, then the others.
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(ordered),
                                    _mm256_extracti128_si256(ordered, 1)));
}
HMT_INLINE F16v power_of_two(I16v n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.lo, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.hi, bias), 23))};
}
// Through 16 bits, in even and odd bytes, so that two products never meet in a saturating sum.
HMT_INLINE __m256i dot4_half(__m256i sum, __m256i a, __m256i b) {
  const __m256i low = _mm256_set1_epi16(0xff);
  const __m256i a_even = _mm256_and_si256(a, low), a_odd = _mm256_srli_epi16(a, 8);
  const __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8);
  const __m256i b_odd = _mm256_srai_epi16(b, 8);
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(a_even, b_even),
                                                _mm256_madd_epi16(a_odd, b_odd)));
}
HMT_INLINE I16v dot4_u8s8(I16v sum, const void* a, const void* b) {
  const auto* x = static_cast<const __m256i*>(a);
  const auto* y = static_cast<const __m256i*>(b);
  return {dot4_half(sum.lo, _mm256_loadu_si256(x), _mm256_loadu_si256(y)),
          dot4_half(sum.hi, _mm256_loadu_si256(x + 1), _mm256_loadu_si256(y + 1))};
}

#else

struct F16v { float v[16]; };
struct I16v { int32_t v[16]; };

#define HMT_EACH(Type, expression)                       \
  Type out;                                              \
  for (size_t i = 0; i < 16; ++i) out.v[i] = expression; \
  return out

HMT_INLINE F16v zero() { return F16v{}; }
HMT_INLINE F16v set1(float x) { HMT_EACH(F16v, x); }
HMT_INLINE F16v load(const float* p) { HMT_EACH(F16v, p[i]); }
HMT_INLINE void store(float* p, F16v a) { std::memcpy(p, a.v, sizeof a.v); }
HMT_INLINE F16v load_bf16(const uint16_t* p) { HMT_EACH(F16v, bf16_to_float(p[i])); }
HMT_INLINE float f16_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // A denormal f16 is its mantissa times 2^-24, exactly.
  if (magnitude < 0x400u) {
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -value : value;
  }
  return from_bits(sign | ((magnitude << 13) + (112u << 23)));
}
HMT_INLINE uint16_t float_to_f16(float value) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Adding 2^-1 leaves a number whose last bit is 2^-24: the sum rounds as f16 would.
    const float shifted = from_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (to_bits(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | rounded >> 13);
}
HMT_INLINE F16v load_f16(const uint16_t* p) { HMT_EACH(F16v, f16_to_float(p[i])); }
HMT_INLINE void store_bf16(uint16_t* p, F16v a) {
  for (size_t i = 0; i < 16; ++i) p[i] = float_to_bf16(a.v[i]);
}
HMT_INLINE void store_f16(uint16_t* p, F16v a) {
  for (size_t i = 0; i < 16; ++i) p[i] = float_to_f16(a.v[i]);
}
HMT_INLINE F16v add(F16v a, F16v b) { HMT_EACH(F16v, a.v[i] + b.v[i]); }
HMT_INLINE F16v sub(F16v a, F16v b) { HMT_EACH(F16v, a.v[i] - b.v[i]); }
HMT_INLINE F16v mul(F16v a, F16v b) { HMT_EACH(F16v, a.v[i] * b.v[i]); }
HMT_INLINE F16v div(F16v a, F16v b) { HMT_EACH(F16v, a.v[i] / b.v[i]); }
HMT_INLINE F16v max(F16v a, F16v b) { HMT_EACH(F16v, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
HMT_INLINE F16v min(F16v a, F16v b) { HMT_EACH(F16v, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
HMT_INLINE F16v fma(F16v a, F16v b, F16v c) { HMT_EACH(F16v, a.v[i] * b.v[i] + c.v[i]); }
HMT_INLINE F16v abs(F16v a) { HMT_EACH(F16v, from_bits(to_bits(a.v[i]) & 0x7fffffffu)); }
HMT_INLINE F16v round_even(F16v a) { HMT_EACH(F16v, std::nearbyint(a.v[i])); }
HMT_INLINE I16v to_int(F16v a) { HMT_EACH(I16v, static_cast<int32_t>(std::nearbyint(a.v[i]))); }
HMT_INLINE F16v to_float(I16v a) { HMT_EACH(F16v, static_cast<float>(a.v[i])); }
HMT_INLINE I16v load(const int32_t* p) { HMT_EACH(I16v, p[i]); }
HMT_INLINE void store(int32_t* p, I16v a) { std::memcpy(p, a.v, sizeof a.v); }
HMT_INLINE I16v set1(int32_t x) { HMT_EACH(I16v, x); }
HMT_INLINE I16v add(I16v a, I16v b) { HMT_EACH(I16v, a.v[i] + b.v[i]); }
HMT_INLINE I16v sub(I16v a, I16v b) { HMT_EACH(I16v, a.v[i] - b.v[i]); }
HMT_INLINE I16v mul(I16v a, I16v b) { HMT_EACH(I16v, a.v[i] * b.v[i]); }
HMT_INLINE I16v max(I16v a, I16v b) { HMT_EACH(I16v, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
HMT_INLINE I16v bits(F16v a) { HMT_EACH(I16v, static_cast<int32_t>(to_bits(a.v[i]))); }
HMT_INLINE void store_bytes(int8_t* p, I16v a) {
  for (size_t i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}
HMT_INLINE F16v power_of_two(I16v n) {
  HMT_EACH(F16v, from_bits(static_cast<uint32_t>(n.v[i] + 127) << 23));
}
HMT_INLINE I16v dot4_u8s8(I16v sum, const void* a, const void* b) {
  const auto* x = static_cast<const uint8_t*>(a);
  const auto* y = static_cast<const int8_t*>(b);
  HMT_EACH(I16v, sum.v[i] + x[4 * i] * y[4 * i] + x[4 * i + 1] * y[4 * i + 1] +
                     x[4 * i + 2] * y[4 * i + 2] + x[4 * i + 3] * y[4 * i + 3]);
}
#undef HMT_EACH

#endif

// Adds lane i + 8 to lane i, then 4, 2, 1: the same bits on every instruction set.
HMT_INLINE float sum(F16v a) {
  float lanes[16];
  store(lanes, a);
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}
HMT_INLINE float largest(F16v a) {
  float lanes[16];
  store(lanes, a);
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  }
  return lanes[0];
}

// e^x within 2 ulp for x <= 88; 0 below -87 (so also for -infinity).  Reduction x = n ln 2 + r and
// Cephes' polynomial for e^r (S. L. Moshier, expf).
HMT_INLINE F16v exp(F16v x) {
  const F16v clamped = max(min(x, set1(88.0f)), set1(-87.3f));
  const F16v n = round_even(mul(clamped, set1(1.44269504f)));
  F16v r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F16v p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  const F16v value = mul(p, power_of_two(to_int(n)));
  float lanes[16], in[16];
  store(lanes, value);
  store(in, x);
  for (size_t i = 0; i < 16; ++i) lanes[i] = in[i] < -87.3f ? 0.0f : lanes[i];
  return load(lanes);
}

HMT_INLINE F16v load_as(const float* p) { return load(p); }
HMT_INLINE F16v load_as(const uint16_t* p) { return load_bf16(p); }

}  // namespace hmt::HMT_ISA
