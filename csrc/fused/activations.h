// Exponential and activations over the whole range of f32.  Only for *.isa.cpp.
#pragma once

#include "simd/vec.h"

namespace hmt::HMT_ISA {

// e^x within 2 ulp, down to denormal results and up to infinity; for NaN it is infinity.  The
// reduction and polynomial are those of `exp`; 2^n is applied in two steps, because it may lie
// beyond what a float holds.
HMT_INLINE F16v exp_full(F16v x) {
  const F16v clamped = max(min(x, set1(89.0f)), set1(-104.0f));
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
  const F16v n_half = round_even(mul(n, set1(0.5f)));
  return mul(mul(p, power_of_two(to_int(n_half))), power_of_two(to_int(sub(n, n_half))));
}

// Where the sign bit of `x` is set `a`, elsewhere `b`.
HMT_INLINE F16v where_negative(F16v x, F16v a, F16v b) {
#if defined(HMT_AVX512)
  return {_mm512_mask_mov_ps(b.v, _mm512_movepi32_mask(_mm512_castps_si512(x.v)), a.v)};
#elif defined(HMT_AVX2)
  return {_mm256_blendv_ps(b.lo, a.lo, x.lo), _mm256_blendv_ps(b.hi, a.hi, x.hi)};
#else
  F16v out;
  for (size_t i = 0; i < 16; ++i) out.v[i] = to_bits(x.v[i]) >> 31 ? a.v[i] : b.v[i];
  return out;
#endif
}

HMT_INLINE F16v silu(F16v x) {
  return div(x, add(set1(1.0f), exp_full(sub(zero(), x))));
}

HMT_INLINE F16v sigmoid(F16v x) {
  const F16v y = min(set1(104.0f), max(set1(-104.0f), x));  // in this order NaN stays
  return div(fma(y, zero(), set1(1.0f)), add(set1(1.0f), exp_full(sub(zero(), y))));
}

HMT_INLINE F16v relu(F16v x) { return max(zero(), x); }  // in this order NaN stays

// gpt-oss: what it does to a gate, and to what goes through the gate.
HMT_INLINE F16v clamped_swish(F16v x) {
  const F16v y = min(set1(7.0f), x);  // in this order NaN stays
  return div(y, add(set1(1.0f), exp_full(mul(y, set1(-1.702f)))));
}
HMT_INLINE F16v clamped_plus_one(F16v x) {
  return add(set1(1.0f), max(set1(-7.0f), min(set1(7.0f), x)));
}

// DeepSeek-V4: the same, at most 10.
HMT_INLINE F16v clamped_silu(F16v x) { return silu(min(set1(10.0f), x)); }
HMT_INLINE F16v clamped(F16v x) { return max(set1(-10.0f), min(set1(10.0f), x)); }

// x sigmoid(2 u) instead of x / 2 (1 + tanh u): nothing cancels where u is very negative.
HMT_INLINE F16v gelu_tanh(F16v x) {
  const F16v cubic = fma(mul(x, x), set1(0.0713548163f), set1(1.59576912f));  // of 2 u / x
  return div(x, add(set1(1.0f), exp_full(sub(zero(), mul(x, cubic)))));
}

// x erfc(-x / sqrt 2) / 2, where nothing cancels either.  erfc is the Chebyshev fit of W. H. Press
// et al., Numerical Recipes, "erfcc": within 1.2e-7 of itself everywhere.
HMT_INLINE F16v gelu(F16v x) {
  const F16v one = set1(1.0f);
  const F16v z = min(mul(abs(x), set1(0.707106781f)), set1(10.2f));
  const F16v t = div(one, fma(set1(0.5f), z, one));
  F16v p = set1(0.17087277f);
  p = fma(p, t, set1(-0.82215223f));
  p = fma(p, t, set1(1.48851587f));
  p = fma(p, t, set1(-1.13520398f));
  p = fma(p, t, set1(0.27886807f));
  p = fma(p, t, set1(-0.18628806f));
  p = fma(p, t, set1(0.09678418f));
  p = fma(p, t, set1(0.37409196f));
  p = fma(p, t, set1(1.00002368f));
  p = fma(p, t, set1(-1.26551223f));
  // What rounding took off the exponent p - z^2, which e^x would multiply by up to a hundred.
  const F16v square = mul(z, z);
  const F16v exponent = sub(p, square);
  const F16v lost = sub(sub(p, add(exponent, square)), fma(z, z, sub(zero(), square)));
  const F16v tail = mul(mul(t, exp_full(exponent)), mul(set1(0.5f), add(one, lost)));
  return mul(x, where_negative(x, tail, sub(one, tail)));
}

}  // namespace hmt::HMT_ISA
