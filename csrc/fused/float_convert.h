// Numbers of any type, sixteen at a time, widened to f32 and rounded back.  Only for *.isa.cpp.
#pragma once

#include "base/dtype.h"
#include "simd/vec.h"

namespace hmt::HMT_ISA {

// To the nearest bf16, ties to even, as f32; NaN stays NaN, also when its low half is dropped.
HMT_INLINE F16v round_bf16(F16v a) {
#if defined(HMT_AVX512)
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i rounded = _mm512_and_si512(up, _mm512_set1_epi32(-0x10000));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_set1_epi32(0x400000);
  return {_mm512_castsi512_ps(_mm512_mask_or_epi32(rounded, nan, bits, quiet))};
#elif defined(HMT_AVX2)
  const auto half = [](__m256 v) __attribute__((always_inline)) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i rounded = _mm256_and_si256(up, _mm256_set1_epi32(-0x10000));
    const __m256 quiet = _mm256_or_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
    return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet,
                            _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  };
  return {half(a.lo), half(a.hi)};
#else
  F16v out;
  for (size_t i = 0; i < 16; ++i) out.v[i] = bf16_to_float(float_to_bf16(a.v[i]));
  return out;
#endif
}

// What round_bf16 returned, in memory.
HMT_INLINE void store_rounded_bf16(uint16_t* p, F16v a) {
#if defined(HMT_AVX512)
  const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(a.v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
#elif defined(HMT_AVX2)
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(a.lo), 16);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(a.hi), 16);
  // Packs within halves of 128 bits: quarters 0, 2, 1, 3.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
#else
  for (size_t i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(to_bits(a.v[i]) >> 16);
#endif
}

HMT_INLINE F16v round_f16(F16v a) {
#if defined(HMT_AVX512)
  return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, 0))};
#elif defined(HMT_AVX2)
  return {_mm256_cvtph_ps(_mm256_cvtps_ph(a.lo, 0)), _mm256_cvtph_ps(_mm256_cvtps_ph(a.hi, 0))};
#else
  F16v out;
  for (size_t i = 0; i < 16; ++i) out.v[i] = f16_to_float(float_to_f16(a.v[i]));
  return out;
#endif
}

// How numbers of a type are read, rounded and written; `write` takes what `round` returned.
struct F32Numbers {
  using Type = float;
  static HMT_INLINE F16v read(const float* p) { return load(p); }
  static HMT_INLINE void write(float* p, F16v a) { store(p, a); }
  static HMT_INLINE F16v round(F16v a) { return a; }
};
struct BF16Numbers {
  using Type = uint16_t;
  static HMT_INLINE F16v read(const uint16_t* p) { return load_bf16(p); }
  static HMT_INLINE void write(uint16_t* p, F16v a) { store_rounded_bf16(p, a); }
  static HMT_INLINE F16v round(F16v a) { return round_bf16(a); }
};
struct F16Numbers {
  using Type = uint16_t;
  static HMT_INLINE F16v read(const uint16_t* p) { return load_f16(p); }
  static HMT_INLINE void write(uint16_t* p, F16v a) { store_f16(p, a); }
  static HMT_INLINE F16v round(F16v a) { return round_f16(a); }
};

// Up to sixteen numbers at p[0..count); lanes beyond are zero, memory beyond is not touched.
template <typename Numbers>
HMT_INLINE F16v read(const typename Numbers::Type* p, size_t count) {
  if (count >= 16) return Numbers::read(p);
  typename Numbers::Type lanes[16] = {};
  std::memcpy(lanes, p, count * sizeof *p);
  return Numbers::read(lanes);
}
template <typename Numbers>
HMT_INLINE void write(typename Numbers::Type* p, size_t count, F16v a) {
  if (count >= 16) return Numbers::write(p, a);
  typename Numbers::Type lanes[16];
  Numbers::write(lanes, a);
  std::memcpy(p, lanes, count * sizeof *p);
}

// call(F32Numbers{}) and so on, by type.
template <typename Call>
HMT_INLINE void with_numbers(DType type, Call call) {
  switch (type) {
    case DType::kF32:
      return call(F32Numbers{});
    case DType::kBF16:
      return call(BF16Numbers{});
    case DType::kF16:
      return call(F16Numbers{});
  }
}

}  // namespace hmt::HMT_ISA
