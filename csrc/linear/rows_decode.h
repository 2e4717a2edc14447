// Codes of row-major weights as numbers.  Only for rows.isa.cpp.
#pragma once

#include "linear/weight.h"
#include "simd/vec.h"

// In front of a loop of a few rounds over registers.  Where there are none, unrolling only makes
// sanitized builds take minutes.
#if !defined(HMT_AVX2) || defined(HMT_SANITIZED)
#define HMT_UNROLL
#elif defined(__clang__)
#define HMT_UNROLL _Pragma("unroll")
#else
#define HMT_UNROLL _Pragma("GCC unroll 16")
#endif

// Kernels that compilers would otherwise join into one function that takes minutes to compile.
#define HMT_KERNEL __attribute__((noinline))

namespace hmt::HMT_ISA {
namespace {

constexpr size_t bytes_of(Code code) {
  if (code == Code::kF32) return 4;
  return code == Code::kBF16 || code == Code::kF16 ? 2 : 1;
}

// `load_codes` yields codes divided by this.  e4m3 becomes f16 by moving its bits, which divides it
// by 2^8; whoever has a scale to multiply with puts the 2^8 there.
constexpr float unit_of(Code code) { return code == Code::kFp8 ? 256.0f : 1.0f; }

// Sixteen e4m3 as f16, divided by 2^8: sign, then 4 bits of exponent and 3 of mantissa where f16
// has the lower 4 of its exponent and the upper 3 of its mantissa.  Denormals stay denormals, and
// converting f16 to f32 never flushes them, whatever the process asked for.
#if defined(HMT_AVX2)
HMT_INLINE __m256i e4m3_as_f16(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7),
                          _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
}
#endif

#if defined(HMT_AVX512)
HMT_INLINE F16v load_e4m3(const uint8_t* p) { return {_mm512_cvtph_ps(e4m3_as_f16(p))}; }
HMT_INLINE F16v load_int8(const int8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
}
#elif defined(HMT_AVX2)
HMT_INLINE F16v load_e4m3(const uint8_t* p) {
  const __m256i halves = e4m3_as_f16(p);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
HMT_INLINE F16v load_int8(const int8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
}
#else
// Mantissa times a power of two, so that no denormal occurs.
HMT_INLINE F16v load_e4m3(const uint8_t* p) {
  F16v out;
  for (size_t i = 0; i < 16; ++i) {
    const uint32_t exponent = (p[i] >> 3) & 15u, normal = exponent != 0;
    const auto mantissa = static_cast<int32_t>((p[i] & 7u) + 8u * normal);
    const uint32_t sign = static_cast<uint32_t>(p[i] & 128u) << 24;
    out.v[i] = static_cast<float>(mantissa) * from_bits(sign | (exponent + 110u - normal) << 23);
  }
  return out;
}
HMT_INLINE F16v load_int8(const int8_t* p) {
  F16v out;
  for (size_t i = 0; i < 16; ++i) out.v[i] = static_cast<float>(p[i]);
  return out;
}
#endif

#if defined(HMT_AVX512_BF16)
// Each lane plus two products of bf16.
HMT_INLINE F16v dot2_bf16(F16v sum, __m512i a, __m512i b) {
  return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b))};
}

// 64 e4m3 as bf16.  The upper byte of a bf16 follows from the upper 4 bits of the
// code, the lower byte is its lower 4 bits; those below 2^-6 have no hidden bit, so for them (and
// only them, as VPSHUFB yields 0 where an index has its highest bit) both bytes are corrected.
// In each 128 bits, columns 0 to 7 go to `low` and 8 to 15 to `high`.
HMT_INLINE void e4m3_as_bf16(__m512i codes, __m512i& low, __m512i& high) {
  const __m512i upper = _mm512_broadcast_i32x4(
      _mm_setr_epi8(60, 61, 62, 63, 64, 65, 66, 67, -68, -67, -66, -65, -64, -63, -62, -61));
  // 0, 1, 2, 3, 4, 5, 6, 7 times 2^-9 have upper bytes 0, 59, 59, 59, 60, 60, 60, 60.
  const __m512i upper_fix = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 60, 7, 7, 7, 0, 0, 0, 0));
  const __m512i lower_fix = _mm512_broadcast_i32x4(_mm_setr_epi8(
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, -0x60, -0x10, 0x40, 0x70, 0x20, 0x10));
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i fix = _mm512_add_epi8(_mm512_and_si512(codes, _mm512_set1_epi8(0x7f)),
                                      _mm512_set1_epi8(0x78));
  const __m512i signs = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
  const __m512i tops = _mm512_xor_si512(_mm512_shuffle_epi8(upper, signs),
                                        _mm512_shuffle_epi8(upper_fix, fix));
  // (codes << 4 & 0xf0) ^ fix
  const __m512i bottoms = _mm512_ternarylogic_epi32(
      _mm512_slli_epi16(codes, 4), nibble, _mm512_shuffle_epi8(lower_fix, fix), 0x9a);
  low = _mm512_unpacklo_epi8(bottoms, tops);
  high = _mm512_unpackhi_epi8(bottoms, tops);
}
#endif

// Sixteen codes as f32, divided by unit_of(kCode).  `p` may have any alignment of bytes.
template <Code kCode>
HMT_INLINE F16v load_codes(const uint8_t* p) {
  if constexpr (kCode == Code::kF32) return load(reinterpret_cast<const float*>(p));
  if constexpr (kCode == Code::kBF16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
  if constexpr (kCode == Code::kF16) return load_f16(reinterpret_cast<const uint16_t*>(p));
  if constexpr (kCode == Code::kFp8) return load_e4m3(p);
  if constexpr (kCode == Code::kInt8) return load_int8(reinterpret_cast<const int8_t*>(p));
}

// visit(numbers, i, n) for columns [i, i + n), n <= 16, of a run of `count`; reads nothing beyond.
template <Code kCode, typename Visit>
HMT_INLINE void each_16(const uint8_t* codes, size_t count, Visit visit) {
  constexpr size_t kBytes = bytes_of(kCode);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) visit(load_codes<kCode>(codes + i * kBytes), i, size_t{16});
  if (i < count) {
    alignas(64) uint8_t rest[64] = {};
    std::memcpy(rest, codes + i * kBytes, (count - i) * kBytes);
    visit(load_codes<kCode>(rest), i, count - i);
  }
}

// Calls call(integral constant of the code).
template <Code kCode>
struct CodeIs {
  static constexpr Code value = kCode;
};
template <typename Call>
HMT_INLINE void with_code(Code code, Call call) {
  switch (code) {
    case Code::kF32:
      return call(CodeIs<Code::kF32>());
    case Code::kBF16:
      return call(CodeIs<Code::kBF16>());
    case Code::kF16:
      return call(CodeIs<Code::kF16>());
    case Code::kFp8:
      return call(CodeIs<Code::kFp8>());
    default:
      return call(CodeIs<Code::kInt8>());
  }
}

HMT_INLINE float total_of(F16v a) {
#if defined(HMT_AVX512)
  return _mm512_reduce_add_ps(a.v);
#else
  return sum(a);
#endif
}

HMT_INLINE const uint8_t* address_of(const Weight& w, size_t row, size_t column) {
  return static_cast<const uint8_t*>(w.data) + (row * w.columns + column) * bytes_of(w.code);
}

// Columns that share a scale.
HMT_INLINE size_t segment_width(const Weight& w) {
  const bool whole = w.scale_type == Scales::kNone || w.tile_columns > w.columns;
  return whole ? w.columns : w.tile_columns;
}

// Scales of one row, with the weight's factor.
class RowScales {
 public:
  RowScales() = default;
  RowScales(const Weight& w, size_t row) : factor_(w.factor) {
    if (w.scale_type == Scales::kNone) return;
    const size_t width = segment_width(w), segments = (w.columns + width - 1) / width;
    scales_ = static_cast<const float*>(w.scales) + row / w.tile_rows * segments;
  }
  HMT_INLINE float operator[](size_t segment) const {
    return scales_ == nullptr ? factor_ : scales_[segment] * factor_;
  }
  const float* numbers() const { return scales_; }  // without the factor, null without scales
  float factor() const { return factor_; }

 private:
  const float* scales_ = nullptr;
  float factor_ = 1.0f;
};

}  // namespace
}  // namespace hmt::HMT_ISA
