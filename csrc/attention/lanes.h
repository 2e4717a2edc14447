// What attention does with sixteen lanes beyond simd/vec.h.  Only for *.isa.cpp.
#pragma once

#include "simd/vec.h"

namespace hmt::HMT_ISA {

constexpr float kNone = -__builtin_inff();  // the score of what is not seen

// Sixteen words as they lie in memory.
HMT_INLINE I16v load_words(const void* p) {
  I16v words;
#if defined(HMT_AVX512)
  words.v = _mm512_loadu_si512(p);
#elif defined(HMT_AVX2)
  const auto* halves = static_cast<const __m256i*>(p);
  words.lo = _mm256_loadu_si256(halves);
  words.hi = _mm256_loadu_si256(halves + 1);
#else
  std::memcpy(words.v, p, sizeof words.v);
#endif
  return words;
}

// The same word sixteen times.
HMT_INLINE F16v broadcast_word(const uint32_t* p) {
  float word;
  std::memcpy(&word, p, sizeof word);
  return set1(word);
}

#if defined(HMT_AVX512)

HMT_INLINE F16v as_float(I16v a) { return {_mm512_castsi512_ps(a.v)}; }
HMT_INLINE I16v shift_left(I16v a, int n) {
  return {_mm512_slli_epi32(a.v, static_cast<unsigned>(n))};
}
HMT_INLINE I16v shift_right(I16v a, int n) {
  return {_mm512_srai_epi32(a.v, static_cast<unsigned>(n))};
}
HMT_INLINE I16v bits_and(I16v a, int32_t bits) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi32(bits))};
}
HMT_INLINE float greatest(F16v a) { return _mm512_reduce_max_ps(a.v); }
// Lanes [first, end) of x, -infinity in the others.
HMT_INLINE F16v keep_lanes(F16v x, size_t first, size_t end) {
  const auto mask = static_cast<__mmask16>(((1u << end) - 1) & ~((1u << first) - 1));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(kNone), mask, x.v)};
}
// p * 2^n, 0 where that is too small
HMT_INLINE F16v scale_by_power(F16v p, F16v n) { return {_mm512_scalef_ps(p.v, n.v)}; }
constexpr float kLeastExponent = -105.0f;

#elif defined(HMT_AVX2)

HMT_INLINE F16v as_float(I16v a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
HMT_INLINE I16v shift_left(I16v a, int n) {
  return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)};
}
HMT_INLINE I16v shift_right(I16v a, int n) {
  return {_mm256_srai_epi32(a.lo, n), _mm256_srai_epi32(a.hi, n)};
}
HMT_INLINE I16v bits_and(I16v a, int32_t bits) {
  const __m256i mask = _mm256_set1_epi32(bits);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
HMT_INLINE float greatest(F16v a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

#else

HMT_INLINE F16v as_float(I16v a) {
  F16v out;
  std::memcpy(out.v, a.v, sizeof out.v);
  return out;
}
HMT_INLINE I16v shift_left(I16v a, int n) {
  for (int32_t& x : a.v) x = static_cast<int32_t>(static_cast<uint32_t>(x) << n);
  return a;
}
HMT_INLINE I16v shift_right(I16v a, int n) {
  for (int32_t& x : a.v) x >>= n;
  return a;
}
HMT_INLINE I16v bits_and(I16v a, int32_t bits) {
  for (int32_t& x : a.v) x &= bits;
  return a;
}
HMT_INLINE float greatest(F16v a) { return largest(a); }

#endif

#if !defined(HMT_AVX512)
HMT_INLINE F16v keep_lanes(F16v x, size_t first, size_t end) {
  float lanes[16];
  store(lanes, x);
  for (size_t i = 0; i < 16; ++i) lanes[i] = i < first || i >= end ? kNone : lanes[i];
  return load(lanes);
}
HMT_INLINE F16v scale_by_power(F16v p, F16v n) { return mul(p, power_of_two(to_int(n))); }
// Where 2^n is a normal number; beyond it the result is 0 by `weight_of`.
constexpr float kLeastExponent = -87.3f;
#endif

// e^x for x <= 0, within 2 ulp: 0 for -infinity and below -105 (or -87.3), NaN for NaN.  See
// simd/vec.h for the polynomial.
HMT_INLINE F16v weight_of(F16v x) {
  // Which operand comes first decides what becomes of a NaN.
  const F16v reach = max(set1(kLeastExponent), x);
  const F16v n = round_even(mul(max(x, set1(kLeastExponent)), set1(1.44269504f)));
  F16v r = fma(n, set1(-0.693359375f), reach);
  r = fma(n, set1(2.12194440e-4f), r);
  F16v p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  p = scale_by_power(p, n);
#if defined(HMT_AVX512)
  return p;
#elif defined(HMT_AVX2)
  const __m256 least = _mm256_set1_ps(kLeastExponent);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, least, _CMP_LT_OQ), p.lo),
          _mm256_andnot_ps(_mm256_cmp_ps(x.hi, least, _CMP_LT_OQ), p.hi)};
#else
  for (size_t i = 0; i < 16; ++i) p.v[i] = x.v[i] < kLeastExponent ? 0.0f : p.v[i];
  return p;
#endif
}

HMT_INLINE float weight_of(float x) {
  float lanes[16];
  store(lanes, weight_of(set1(x)));
  return lanes[0];
}

// tanh(x) = (1 - e) / (1 + e) of |x|, with e = exp(-2 |x|); absolute error below 2e-7.
HMT_INLINE F16v tanh_of(F16v x) {
  const F16v e = weight_of(mul(abs(x), set1(-2.0f)));
  const F16v t = div(sub(set1(1.0f), e), add(set1(1.0f), e));
  // The sign of x without a comparison: x / |x|, made safe at 0.
  return mul(t, max(set1(-1.0f), min(set1(1.0f), mul(x, set1(1e30f)))));
}

// Numbers in a row, any type, to f32.
HMT_INLINE F16v load_number(const void* row, int type, size_t i) {
  if (type == 0) return load(static_cast<const float*>(row) + i);
  const auto* halves = static_cast<const uint16_t*>(row) + i;
  return type == 1 ? load_bf16(halves) : load_f16(halves);
}

inline void widen_row(const void* row, int type, size_t count, float* out) {
  const size_t width = type == 0 ? 4 : 2;
  size_t i = 0;
  for (; i + 16 <= count; i += 16) store(out + i, load_number(row, type, i));
  if (i == count) return;
  alignas(64) uint8_t rest[64] = {};
  float lanes[16];
  std::memcpy(rest, static_cast<const uint8_t*>(row) + i * width, (count - i) * width);
  store(lanes, load_number(rest, type, 0));
  std::memcpy(out + i, lanes, (count - i) * sizeof(float));
}

HMT_INLINE void store_number(void* row, int type, size_t i, F16v x) {
  if (type == 0) return store(static_cast<float*>(row) + i, x);
  auto* halves = static_cast<uint16_t*>(row) + i;
  if (type == 1) store_bf16(halves, x);
  else store_f16(halves, x);
}

// `x` has room for a multiple of 16 numbers, `row` has not.
inline void narrow_row(const float* x, size_t count, void* row, int type) {
  const size_t width = type == 0 ? 4 : 2;
  size_t i = 0;
  for (; i + 16 <= count; i += 16) store_number(row, type, i, load(x + i));
  if (i == count) return;
  alignas(64) uint8_t rest[64];
  store_number(rest, type, 0, load(x + i));
  std::memcpy(static_cast<uint8_t*>(row) + i * width, rest, (count - i) * width);
}

}  // namespace hmt::HMT_ISA
