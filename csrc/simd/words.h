// Sixteen 32-bit words at a time, one per row of a panel: bits, bytes and products of bytes.  Only for
// *.isa.cpp.
#pragma once

#include "simd/vec.h"

namespace hmt::HMT_ISA {

// Loops whose arrays are registers; not where they are memory.
#if defined(HMT_AVX2) && !defined(HMT_SANITIZED)
#define HMT_PRAGMA(text) _Pragma(#text)
#define HMT_UNROLL(n) HMT_PRAGMA(GCC unroll n)
#else
#define HMT_UNROLL(n)
#endif

// True where products of bytes above 127 would saturate, so that such codes are signed instead.
#if defined(HMT_AVX2) && !defined(HMT_AVX512)
constexpr bool kSignedBytes = true;
#else
constexpr bool kSignedBytes = false;
#endif

// Not as copies of I16v: GCC makes those of AVX2 in four pieces through the stack, and loading two of
// them at once waits until they are written.
#if defined(HMT_AVX512)
HMT_INLINE I16v load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
HMT_INLINE void store_words(uint8_t* p, I16v a) { _mm512_storeu_si512(p, a.v); }
#elif defined(HMT_AVX2)
HMT_INLINE I16v load_words(const uint8_t* p) {
  const auto* halves = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
HMT_INLINE void store_words(uint8_t* p, I16v a) {
  auto* halves = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(halves, a.lo);
  _mm256_storeu_si256(halves + 1, a.hi);
}
#else
HMT_INLINE I16v load_words(const uint8_t* p) {
  I16v out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
HMT_INLINE void store_words(uint8_t* p, I16v a) { std::memcpy(p, &a, sizeof a); }
#endif
HMT_INLINE int32_t word_at(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

#if defined(HMT_AVX512)

HMT_INLINE I16v shl(I16v a, int n) { return {_mm512_slli_epi32(a.v, static_cast<unsigned>(n))}; }
HMT_INLINE I16v shr(I16v a, int n) { return {_mm512_srli_epi32(a.v, static_cast<unsigned>(n))}; }
HMT_INLINE I16v sar(I16v a, int n) { return {_mm512_srai_epi32(a.v, static_cast<unsigned>(n))}; }
HMT_INLINE I16v both(I16v a, I16v b) { return {_mm512_and_si512(a.v, b.v)}; }
HMT_INLINE I16v either(I16v a, I16v b) { return {_mm512_or_si512(a.v, b.v)}; }
HMT_INLINE I16v differ(I16v a, I16v b) { return {_mm512_xor_si512(a.v, b.v)}; }
// Bits of `a` where `mask` has ones, of `b` elsewhere.
HMT_INLINE I16v choose(I16v mask, I16v a, I16v b) {
  return {_mm512_ternarylogic_epi32(mask.v, a.v, b.v, 0xca)};
}
// Bytes 0..15 as what a table of sixteen bytes has for them.
HMT_INLINE I16v look_up(const void* table, I16v bytes) {
  const __m128i entries = _mm_loadu_si128(static_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), bytes.v)};
}
HMT_INLINE I16v gather(const uint32_t* table, I16v index) {
  return {_mm512_i32gather_epi32(index.v, table, 4)};
}
// Minus byte k of each lane where bit k of the lane of `bits` is set.
HMT_INLINE I16v negate_where(I16v bytes, I16v bits) {
  const __m512i first = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  const __mmask64 negative = _mm512_test_epi8_mask(_mm512_shuffle_epi8(bits.v, first),
                                                   _mm512_set1_epi32(0x08040201));
  return {_mm512_mask_sub_epi8(bytes.v, negative, _mm512_setzero_si512(), bytes.v)};
}
// Each lane plus four products of its unsigned bytes and the signed bytes of `x`.
HMT_INLINE I16v dot_bytes(I16v sum, I16v codes, int32_t x) {
  return {_mm512_dpbusd_epi32(sum.v, codes.v, _mm512_set1_epi32(x))};
}
// Each lane plus two products of 16-bit integers.
HMT_INLINE I16v dot_pairs(I16v sum, I16v a, int32_t b) {
  return {_mm512_dpwssd_epi32(sum.v, a.v, _mm512_set1_epi32(b))};
}
HMT_INLINE I16v dot_pairs(I16v sum, I16v a, I16v b) {
  return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)};
}
// The f16 in the low half of each lane.
HMT_INLINE F16v low_half(I16v a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v))}; }

#elif defined(HMT_AVX2)

HMT_INLINE I16v shl(I16v a, int n) {
  return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)};
}
HMT_INLINE I16v shr(I16v a, int n) {
  return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)};
}
HMT_INLINE I16v sar(I16v a, int n) {
  return {_mm256_srai_epi32(a.lo, n), _mm256_srai_epi32(a.hi, n)};
}
HMT_INLINE I16v both(I16v a, I16v b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
HMT_INLINE I16v either(I16v a, I16v b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
HMT_INLINE I16v differ(I16v a, I16v b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
HMT_INLINE I16v choose(I16v mask, I16v a, I16v b) {
  return {_mm256_or_si256(_mm256_and_si256(mask.lo, a.lo), _mm256_andnot_si256(mask.lo, b.lo)),
          _mm256_or_si256(_mm256_and_si256(mask.hi, a.hi), _mm256_andnot_si256(mask.hi, b.hi))};
}
HMT_INLINE I16v look_up(const void* table, I16v bytes) {
  const __m256i entries =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(entries, bytes.lo), _mm256_shuffle_epi8(entries, bytes.hi)};
}
HMT_INLINE I16v gather(const uint32_t* table, I16v index) {
  const auto* entries = reinterpret_cast<const int*>(table);
  return {_mm256_i32gather_epi32(entries, index.lo, 4),
          _mm256_i32gather_epi32(entries, index.hi, 4)};
}
HMT_INLINE __m256i negate_where(__m256i bytes, __m256i bits) {
  const __m128i lanes = _mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  const __m256i each = _mm256_set1_epi32(0x08040201);
  const __m256i first = _mm256_shuffle_epi8(bits, _mm256_broadcastsi128_si256(lanes));
  const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(first, each), each);
  return _mm256_sub_epi8(_mm256_xor_si256(bytes, negative), negative);
}
HMT_INLINE I16v negate_where(I16v bytes, I16v bits) {
  return {negate_where(bytes.lo, bits.lo), negate_where(bytes.hi, bits.hi)};
}
HMT_INLINE __m256i four_products(__m256i sum, __m256i codes, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(codes, x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// Codes are at most 127 here, and x at least -127: two products stay below 2^15.
HMT_INLINE I16v dot_bytes(I16v sum, I16v codes, int32_t x) {
  const __m256i four = _mm256_set1_epi32(x);
  return {four_products(sum.lo, codes.lo, four), four_products(sum.hi, codes.hi, four)};
}
// The same of signed codes.  That of -128 has 128 as its magnitude, an unsigned byte.
HMT_INLINE I16v dot_signed_bytes(I16v sum, I16v codes, int32_t x) {
  const __m256i four = _mm256_set1_epi32(x);
  return {four_products(sum.lo, _mm256_abs_epi8(codes.lo), _mm256_sign_epi8(four, codes.lo)),
          four_products(sum.hi, _mm256_abs_epi8(codes.hi), _mm256_sign_epi8(four, codes.hi))};
}
HMT_INLINE I16v dot_pairs(I16v sum, I16v a, I16v b) {
  return add(sum, {_mm256_madd_epi16(a.lo, b.lo), _mm256_madd_epi16(a.hi, b.hi)});
}
HMT_INLINE I16v dot_pairs(I16v sum, I16v a, int32_t b) { return dot_pairs(sum, a, set1(b)); }
HMT_INLINE F16v low_half(I16v a) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  // Packing works on 128-bit halves: four lanes of lo, four of hi, then the others.
  const __m256i words =
      _mm256_packus_epi32(_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(ordered)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(ordered, 1))};
}

#else

#define HMT_EACH_WORD(expression)                                                      \
  I16v out;                                                                            \
  for (size_t i = 0; i < 16; ++i) out.v[i] = static_cast<int32_t>(expression);         \
  return out

HMT_INLINE uint32_t bits_of(int32_t a) { return static_cast<uint32_t>(a); }
HMT_INLINE I16v shl(I16v a, int n) { HMT_EACH_WORD(bits_of(a.v[i]) << n); }
HMT_INLINE I16v shr(I16v a, int n) { HMT_EACH_WORD(bits_of(a.v[i]) >> n); }
HMT_INLINE I16v sar(I16v a, int n) { HMT_EACH_WORD(a.v[i] >> n); }
HMT_INLINE I16v both(I16v a, I16v b) { HMT_EACH_WORD(a.v[i] & b.v[i]); }
HMT_INLINE I16v either(I16v a, I16v b) { HMT_EACH_WORD(a.v[i] | b.v[i]); }
HMT_INLINE I16v differ(I16v a, I16v b) { HMT_EACH_WORD(a.v[i] ^ b.v[i]); }
HMT_INLINE I16v choose(I16v mask, I16v a, I16v b) {
  HMT_EACH_WORD((mask.v[i] & a.v[i]) | (~mask.v[i] & b.v[i]));
}
HMT_INLINE I16v look_up(const void* table, I16v bytes) {
  const auto* entries = static_cast<const uint8_t*>(table);
  uint8_t codes[64];
  std::memcpy(codes, bytes.v, sizeof codes);
  for (uint8_t& code : codes) code = entries[code];
  return load_words(codes);
}
HMT_INLINE I16v negate_where(I16v bytes, I16v bits) {
  uint8_t out[64];
  std::memcpy(out, bytes.v, sizeof out);
  for (size_t i = 0; i < sizeof out; ++i) {
    if ((bits.v[i / 4] >> i % 4 & 1) != 0) out[i] = static_cast<uint8_t>(-out[i]);
  }
  return load_words(out);
}
HMT_INLINE I16v gather(const uint32_t* table, I16v index) { HMT_EACH_WORD(table[index.v[i]]); }
// Not inlined: a block has many of them.
__attribute__((noinline)) inline I16v dot_bytes(const I16v& sum, const I16v& codes, int32_t x) {
  I16v out = sum;
  for (int byte = 0; byte < 4; ++byte) {
    const int32_t number = static_cast<int8_t>(bits_of(x) >> 8 * byte);
    for (size_t i = 0; i < 16; ++i) {
      out.v[i] += static_cast<int32_t>(bits_of(codes.v[i]) >> 8 * byte & 255) * number;
    }
  }
  return out;
}
HMT_INLINE I16v dot_pairs(I16v sum, I16v a, I16v b) {
  HMT_EACH_WORD(sum.v[i] + static_cast<int16_t>(a.v[i]) * static_cast<int16_t>(b.v[i]) +
                (a.v[i] >> 16) * (b.v[i] >> 16));
}
HMT_INLINE I16v dot_pairs(I16v sum, I16v a, int32_t b) { return dot_pairs(sum, a, set1(b)); }
HMT_INLINE F16v low_half(I16v a) {
  uint16_t halves[16];
  for (size_t i = 0; i < 16; ++i) halves[i] = static_cast<uint16_t>(a.v[i]);
  return load_f16(halves);
}
// Sums and differences that may leave int32, as bytes do.
HMT_INLINE I16v plus(I16v a, I16v b) { HMT_EACH_WORD(bits_of(a.v[i]) + bits_of(b.v[i])); }
HMT_INLINE I16v minus(I16v a, I16v b) { HMT_EACH_WORD(bits_of(a.v[i]) - bits_of(b.v[i])); }
#undef HMT_EACH_WORD

#endif

#if defined(HMT_AVX2)
HMT_INLINE I16v plus(I16v a, I16v b) { return add(a, b); }
HMT_INLINE I16v minus(I16v a, I16v b) { return sub(a, b); }
#endif
#if !defined(HMT_AVX2) || defined(HMT_AVX512)
HMT_INLINE I16v dot_signed_bytes(I16v sum, I16v, int32_t) { return sum; }  // see kSignedBytes
#endif

HMT_INLINE F16v high_half(I16v a) { return low_half(shr(a, 16)); }
HMT_INLINE I16v mask_of(uint32_t word) { return set1(static_cast<int32_t>(word)); }
HMT_INLINE I16v bits_in(I16v a, uint32_t mask) { return both(a, mask_of(mask)); }
// Byte `k` of each lane, with its sign.
HMT_INLINE I16v signed_byte(I16v a, int k) { return sar(shl(a, 24 - 8 * k), 24); }
// The lowest four bits, each in the lowest bit of a byte: their places differ by 7 k, and no two
// products with ones fall together.
HMT_INLINE I16v spread_bits(I16v four) {
  return bits_in(mul(bits_in(four, 15), mask_of(0x00204081)), 0x01010101);
}

}  // namespace hmt::HMT_ISA
