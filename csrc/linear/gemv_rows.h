// Columns in lanes, four rows at a time: numbers, and codes where tokens are few.  Only for
// rows.isa.cpp.
#pragma once

#include "linear/rows_numbers.h"

namespace hmt::HMT_ISA {
namespace {

#if defined(HMT_AVX2) && !defined(HMT_AVX512)
// 32 codes; zero from `left` on.
HMT_INLINE __m256i load_32_codes(const int8_t* p, size_t left) {
  alignas(32) int8_t rest[32] = {};
  if (left < 32) {
    std::memcpy(rest, p, left);
    p = rest;
  }
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
#endif

// Dot products of four rows' codes with kTokens tokens' codes over `count` columns, exact.
template <size_t kTokens>
HMT_INLINE void dot_codes(const FourRows& four, size_t offset, const int8_t* const* rows,
                          const int8_t* const* tokens, size_t count, int32_t (*dots)[kFewRows]) {
#if defined(HMT_AVX512)
  // Rows plus 128 are unsigned, as the instruction wants them; 128 times the token is taken away.
  const __m512i top = _mm512_set1_epi8(-128);
  __m512i sums[kFewRows][kTokens] = {}, excess[kTokens] = {};
  for (size_t c = 0; c < count; c += 64) {
    const size_t left = count - c;
    four.fetch_ahead(offset + c);
    const __mmask64 here = left < 64 ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
    __m512i x[kTokens];
    HMT_UNROLL
    for (size_t t = 0; t < kTokens; ++t) {
      x[t] = _mm512_maskz_loadu_epi8(here, tokens[t] + c);
      excess[t] = _mm512_dpbusd_epi32(excess[t], top, x[t]);
    }
    HMT_UNROLL
    for (size_t r = 0; r < kFewRows; ++r) {
      const __m512i w = _mm512_xor_si512(_mm512_maskz_loadu_epi8(here, rows[r] + c), top);
      HMT_UNROLL
      for (size_t t = 0; t < kTokens; ++t) {
        sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], w, x[t]);
      }
    }
  }
  HMT_UNROLL
  for (size_t t = 0; t < kTokens; ++t) {
    __m512i s[kFewRows];
    HMT_UNROLL
    for (size_t r = 0; r < kFewRows; ++r) s[r] = _mm512_sub_epi32(sums[r][t], excess[t]);
    const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(s[0], s[1]),
                                         _mm512_unpackhi_epi32(s[0], s[1]));
    const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(s[2], s[3]),
                                          _mm512_unpackhi_epi32(s[2], s[3]));
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high),
                                         _mm512_unpackhi_epi64(low, high));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all),
                                          _mm512_extracti64x4_epi64(all, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dots[t]),
                     _mm_add_epi32(_mm256_castsi256_si128(half),
                                   _mm256_extracti128_si256(half, 1)));
  }
#elif defined(HMT_AVX2)
  // |w| times x with the sign of w: 2 * 128 * 127 fits into 16 bits, so nothing saturates.
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums[kFewRows][kTokens] = {};
  for (size_t c = 0; c < count; c += 32) {
    const size_t left = count - c;
    if (c % 64 == 0) four.fetch_ahead(offset + c);
    __m256i x[kTokens];
    HMT_UNROLL
    for (size_t t = 0; t < kTokens; ++t) x[t] = load_32_codes(tokens[t] + c, left);
    HMT_UNROLL
    for (size_t r = 0; r < kFewRows; ++r) {
      const __m256i w = load_32_codes(rows[r] + c, left), magnitude = _mm256_abs_epi8(w);
      HMT_UNROLL
      for (size_t t = 0; t < kTokens; ++t) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x[t], w));
        sums[r][t] = _mm256_add_epi32(sums[r][t], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
  HMT_UNROLL
  for (size_t t = 0; t < kTokens; ++t) {
    const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0][t], sums[1][t]),
                                          _mm256_hadd_epi32(sums[2][t], sums[3][t]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dots[t]),
                     _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
  }
#else
  four.fetch_ahead(offset);
  for (size_t t = 0; t < kTokens; ++t) {
    for (size_t r = 0; r < kFewRows; ++r) {
      int32_t dot = 0;
      for (size_t c = 0; c < count; ++c) dot += rows[r][c] * tokens[t][c];
      dots[t][r] = dot;
    }
  }
#endif
}

template <size_t kTokens>
HMT_KERNEL void few_codes(const Weight& w, const Inputs& in, size_t token, const FourRows& four,
                          float* out, size_t out_stride) {
  const size_t width = segment_width(w), segments = (w.columns + width - 1) / width;
  float totals[kTokens][kFewRows] = {};
  for (size_t s = 0; s < segments; ++s) {
    const size_t begin = s * width, left = w.columns - begin;
    const int8_t* rows[kFewRows];
    const int8_t* tokens[kTokens];
    float scales[kFewRows];
    for (size_t r = 0; r < kFewRows; ++r) {
      rows[r] = reinterpret_cast<const int8_t*>(four.begin[r] + begin);
      scales[r] = four.scales[r][s];
    }
    for (size_t t = 0; t < kTokens; ++t) tokens[t] = in.codes + (token + t) * in.stride + begin;
    int32_t dots[kTokens][kFewRows];
    dot_codes<kTokens>(four, begin, rows, tokens, left < width ? left : width, dots);
    for (size_t t = 0; t < kTokens; ++t) {
      for (size_t r = 0; r < kFewRows; ++r) {
        totals[t][r] += static_cast<float>(dots[t][r]) * scales[r];
      }
    }
    if (four.minima[0] == nullptr) continue;
    for (size_t t = 0; t < kTokens; ++t) {
      const float sum = four.sums[(token + t) * segments + s];
      for (size_t r = 0; r < kFewRows; ++r) totals[t][r] += sum * four.minima[r][s];
    }
  }
  for (size_t t = 0; t < kTokens; ++t) {
    for (size_t r = 0; r < four.count; ++r) {
      out[t * out_stride + r] = totals[t][r] * in.scales[token + t];
    }
  }
}

#if defined(HMT_AVX512)
// Four numbers of each of four rows, [numbers][rows].
HMT_INLINE void four_of_rows(const float* const* rows, size_t at, size_t count, __m128* out) {
  const auto some = static_cast<__mmask8>((1u << count) - 1);
  for (size_t r = 0; r < kFewRows; ++r) out[r] = _mm_maskz_loadu_ps(some, rows[r] + at);
  _MM_TRANSPOSE4_PS(out[0], out[1], out[2], out[3]);
}

// As few_codes, for groups of 16 or 32 in rows of whole lines of 64 columns: what lanes hold after
// a line are its groups, so that rows are added up once for all of them.
template <size_t kTokens, size_t kGroup>
HMT_KERNEL void few_short_groups(const Weight& w, const Inputs& in, size_t token,
                                 const FourRows& four, float* out, size_t out_stride) {
  constexpr size_t kGroups = 64 / kGroup;
  const __m512i top = _mm512_set1_epi8(-128);
  const __m128 factor = _mm_set1_ps(four.scales[0].factor());
  const size_t segments = w.columns / kGroup;
  const float* scales[kFewRows];
  for (size_t r = 0; r < kFewRows; ++r) scales[r] = four.scales[r].numbers();
  __m128 totals[kTokens];
  HMT_UNROLL
  for (size_t t = 0; t < kTokens; ++t) totals[t] = _mm_setzero_ps();
  for (size_t c = 0; c < w.columns; c += 64) {
    four.fetch_ahead(c);
    __m512i weights[kFewRows];
    HMT_UNROLL
    for (size_t r = 0; r < kFewRows; ++r) {
      weights[r] = _mm512_xor_si512(_mm512_loadu_si512(four.begin[r] + c), top);
    }
    const size_t segment = c / kGroup;
    __m128 by[4], least[4];
    four_of_rows(scales, segment, kGroups, by);
    HMT_UNROLL
    for (size_t g = 0; g < kGroups; ++g) by[g] = _mm_mul_ps(by[g], factor);
    if (four.minima[0] != nullptr) four_of_rows(four.minima, segment, kGroups, least);
    HMT_UNROLL
    for (size_t t = 0; t < kTokens; ++t) {
      const __m512i x = _mm512_loadu_si512(in.codes + (token + t) * in.stride + c);
      const __m512i none = _mm512_setzero_si512(), excess = _mm512_dpbusd_epi32(none, top, x);
      __m512i s[kFewRows];
      HMT_UNROLL
      for (size_t r = 0; r < kFewRows; ++r) {
        s[r] = _mm512_sub_epi32(_mm512_dpbusd_epi32(none, weights[r], x), excess);
      }
      const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(s[0], s[1]),
                                           _mm512_unpackhi_epi32(s[0], s[1]));
      const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(s[2], s[3]),
                                            _mm512_unpackhi_epi32(s[2], s[3]));
      // Of each 16 columns, four rows.
      __m512i dots = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high),
                                      _mm512_unpackhi_epi64(low, high));
      if (kGroup == 32) {  // groups come first
        dots = _mm512_add_epi32(_mm512_shuffle_i32x4(dots, dots, 0x08),
                                _mm512_shuffle_i32x4(dots, dots, 0x0d));
      }
      const __m512 numbers = _mm512_cvtepi32_ps(dots);
      const __m128 parts[4] = {
          _mm512_castps512_ps128(numbers), _mm512_extractf32x4_ps(numbers, 1),
          _mm512_extractf32x4_ps(numbers, 2), _mm512_extractf32x4_ps(numbers, 3)};
      HMT_UNROLL
      for (size_t g = 0; g < kGroups; ++g) {
        totals[t] = _mm_add_ps(totals[t], _mm_mul_ps(parts[g], by[g]));
        if (four.minima[0] == nullptr) continue;
        const __m128 sum = _mm_set1_ps(four.sums[(token + t) * segments + segment + g]);
        totals[t] = _mm_add_ps(totals[t], _mm_mul_ps(sum, least[g]));
      }
    }
  }
  for (size_t t = 0; t < kTokens; ++t) {
    float lanes[kFewRows];
    _mm_storeu_ps(lanes, _mm_mul_ps(totals[t], _mm_set1_ps(in.scales[token + t])));
    std::memcpy(out + t * out_stride, lanes, four.count * sizeof(float));
  }
}
#endif

template <size_t kTokens>
void few_tokens(const Weight& w, const Inputs& in, size_t token, const FourRows& four, float* out,
                size_t out_stride) {
#if defined(HMT_AVX512)
  if (w.int8_activations && w.columns % 64 == 0 && four.scales[0].numbers() != nullptr) {
    if (w.tile_columns == 16) {
      return few_short_groups<kTokens, 16>(w, in, token, four, out, out_stride);
    }
    if (w.tile_columns == 32) {
      return few_short_groups<kTokens, 32>(w, in, token, four, out, out_stride);
    }
  }
#endif
  if (w.int8_activations) return few_codes<kTokens>(w, in, token, four, out, out_stride);
  const Pass whole{0, w.columns, nullptr};
  with_columns(w, in, [&](auto columns) {
    few_numbers<decltype(columns), kTokens>(w, in, token, four, whole, out, out_stride);
  });
}

// See LinearKernels::multiply.
inline void multiply_few(const Weight& w, const Inputs& in, size_t first_row, size_t end_row,
                         float* out, size_t out_stride) {
  const size_t segments = w.minima == nullptr ? 0 : segments_of(w);
  // Bringing rows to the form that they are multiplied in pays from 8 tokens on, where they are not.
  const size_t few = w.code == Code::kF32 ? kTokenBlock : 7;
  const bool many = in.tokens > few && !w.int8_activations;
  const size_t padded = (end_row - first_row + kFewRows - 1) / kFewRows * kFewRows;
  const size_t rows = many ? padded * ManyMemory::kRowBytes : 0;
  const size_t lanes = many ? padded * kTokensTogether * 16 : 0;
  Scratch scratch(Scratch::round(in.tokens * segments * sizeof(float)) + rows +
                  lanes * sizeof(float));
  float* sums = scratch.take<float>(in.tokens * segments);
  for (size_t t = 0; t < in.tokens; ++t) {
    for (size_t s = 0; s < segments; ++s) sums[t * segments + s] = segment_sum(w, in, t, s);
  }
  if (many) {
    const ManyMemory memory{scratch.take<uint8_t>(rows), scratch.take<float>(lanes)};
    for (size_t t = 0; t < in.tokens; t += kTokensTogether) {
      const size_t end = in.tokens - t < kTokensTogether ? in.tokens : t + kTokensTogether;
      with_columns(w, in, [&](auto columns) {
        many_numbers<decltype(columns)>(w, in, t, end, first_row, end_row, sums, memory, out,
                                        out_stride);
      });
    }
    return;
  }
  for (size_t row = first_row; row < end_row; row += kFewRows) {
    const FourRows four(w, row, end_row, sums);
    for (size_t t = 0; t < in.tokens;) {
      const size_t left = in.tokens - t;
      float* target = out + t * out_stride + (row - first_row);
      if (left >= 4 && kFewTokens >= 4) {
        few_tokens<kFewTokens>(w, in, t, four, target, out_stride);
        t += 4;
      } else if (left == 3 && kFewTokens >= 4) {
        few_tokens<kFewTokens < 3 ? 1 : 3>(w, in, t, four, target, out_stride);
        t += 3;
      } else if (left >= 2) {
        few_tokens<2>(w, in, t, four, target, out_stride);
        t += 2;
      } else {
        few_tokens<1>(w, in, t, four, target, out_stride);
        t += 1;
      }
    }
  }
}

}  // namespace
}  // namespace hmt::HMT_ISA
