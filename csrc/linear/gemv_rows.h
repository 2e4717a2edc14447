// Few tokens: columns in lanes, four rows at a time, so that weights stream through once and each
// piece of a token serves four rows.  Only for rows.isa.cpp.
#pragma once

#include "base/scratch.h"
#include "linear/kernels.h"
#include "linear/rows_minima.h"
#include "linear/rows_decode.h"

namespace hmt::HMT_ISA {
namespace {

constexpr size_t kFewRows = 4;
// Tokens whose sums fit into registers next to four rows.
#if defined(HMT_AVX512)
constexpr size_t kFewTokens = 4;
#else
constexpr size_t kFewTokens = 2;
#endif

// Four rows from `row` on; those beyond end_row repeat the last one and are not written.
struct FourRows {
  size_t count;
  const uint8_t* begin[kFewRows];
  RowScales scales[kFewRows];
  const float* minima[kFewRows];  // all null, or none
  const float* sums;  // [tokens, segments], see segment_sum; read where there are minima
  FourRows(const Weight& w, size_t row, size_t end_row, const float* token_sums)
      : count(end_row - row < kFewRows ? end_row - row : kFewRows), sums(token_sums) {
    for (size_t r = 0; r < kFewRows; ++r) {
      const size_t index = row + (r < count ? r : count - 1);
      begin[r] = address_of(w, index, 0);
      scales[r] = RowScales(w, index);
      minima[r] = row_minima(w, index);
    }
    row_bytes_ = w.columns * bytes_of(w.code);
  }

  // Asks for what will be read kAhead bytes after byte `offset` of each row, in these rows or the
  // next four.  Processors foresee it badly: 13 instead of 18 GB/s for int8 groups.
  HMT_INLINE void fetch_ahead(size_t offset) const {
    const size_t ahead = offset + kAhead, skip = ahead < row_bytes_ ? 0 : 3 * row_bytes_;
    HMT_UNROLL
    for (size_t r = 0; r < kFewRows; ++r) __builtin_prefetch(begin[r] + ahead + skip);
  }

 private:
  static constexpr size_t kAhead = 512;
  size_t row_bytes_;
};

// Weights of any code times f32 activations.
template <Code kCode>
struct WidenedColumns {
  using Activation = float;
  using Weights = F16v;
  using Numbers = F16v;
  static constexpr size_t kColumns = 16, kBytes = bytes_of(kCode);
  static constexpr float kUnit = unit_of(kCode);
  static const float* tokens(const Inputs& in) { return in.f32; }
  static HMT_INLINE Weights weights(const uint8_t* p) { return load_codes<kCode>(p); }
  static HMT_INLINE Numbers numbers(const float* p) { return load(p); }
  static HMT_INLINE F16v step(F16v sum, Weights w, Numbers x) { return fma(w, x, sum); }
};

#if defined(HMT_AVX512_BF16)
// bf16 weights times bf16 activations, two columns in a lane.
struct PairedColumns {
  using Activation = uint16_t;
  using Weights = __m512i;
  using Numbers = __m512i;
  static constexpr size_t kColumns = 32, kBytes = 2;
  static constexpr float kUnit = 1.0f;
  static const uint16_t* tokens(const Inputs& in) { return in.bf16; }
  static HMT_INLINE Weights weights(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static HMT_INLINE Numbers numbers(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static HMT_INLINE F16v step(F16v sum, Weights w, Numbers x) {
    return dot2_bf16(sum, w, x);
  }
};

// e4m3 weights times bf16 activations; columns in the order that e4m3_as_bf16 leaves them in.
struct PairedE4M3Columns {
  using Activation = uint16_t;
  struct Both {
    __m512i low, high;
  };
  using Weights = Both;
  using Numbers = Both;
  static constexpr size_t kColumns = 64, kBytes = 1;
  static constexpr float kUnit = 1.0f;
  static const uint16_t* tokens(const Inputs& in) { return in.bf16; }
  static HMT_INLINE Both weights(const uint8_t* p) {
    Both out;
    e4m3_as_bf16(_mm512_loadu_si512(p), out.low, out.high);
    return out;
  }
  static HMT_INLINE Both numbers(const uint16_t* p) {
    const __m512i first = _mm512_loadu_si512(p), second = _mm512_loadu_si512(p + 32);
    return {_mm512_shuffle_i64x2(first, second, 0x88), _mm512_shuffle_i64x2(first, second, 0xdd)};
  }
  static HMT_INLINE F16v step(F16v sum, const Both& w, const Both& x) {
    return dot2_bf16(dot2_bf16(sum, w.low, x.low), w.high, x.high);
  }
};
#endif

template <typename Columns, size_t kTokens>
HMT_INLINE void step_rows(const uint8_t* const* rows, size_t offset,
                          const typename Columns::Activation* const* tokens, size_t column,
                          F16v (*sums)[kTokens]) {
  typename Columns::Numbers x[kTokens];
  HMT_UNROLL
  for (size_t t = 0; t < kTokens; ++t) x[t] = Columns::numbers(tokens[t] + column);
  HMT_UNROLL
  for (size_t r = 0; r < kFewRows; ++r) {
    const typename Columns::Weights w = Columns::weights(rows[r] + offset);
    HMT_UNROLL
    for (size_t t = 0; t < kTokens; ++t) sums[r][t] = Columns::step(sums[r][t], w, x[t]);
  }
}

// Adds up columns [0, count) of four rows with kTokens tokens; `offset` bytes of each row precede.
template <typename Columns, size_t kTokens>
HMT_INLINE void sum_rows(const FourRows& four, size_t offset, const uint8_t* const* rows,
                         const typename Columns::Activation* const* tokens, size_t count,
                         F16v (*sums)[kTokens]) {
  using Activation = typename Columns::Activation;
  constexpr size_t kColumns = Columns::kColumns, kBytes = Columns::kBytes;
  constexpr size_t kLineColumns = 64 / kBytes;
  size_t c = 0;
  for (; c + kLineColumns <= count; c += kLineColumns) {
    four.fetch_ahead(offset + c * kBytes);
    HMT_UNROLL
    for (size_t i = 0; i < kLineColumns; i += kColumns) {
      step_rows<Columns, kTokens>(rows, (c + i) * kBytes, tokens, c + i, sums);
    }
  }
  for (; c + kColumns <= count; c += kColumns) {
    step_rows<Columns, kTokens>(rows, c * kBytes, tokens, c, sums);
  }
  if (c == count) return;
  alignas(64) uint8_t row_rest[kFewRows][64] = {};
  alignas(64) Activation token_rest[kTokens][kColumns] = {};
  const uint8_t* row_ends[kFewRows];
  const Activation* token_ends[kTokens];
  for (size_t r = 0; r < kFewRows; ++r) {
    std::memcpy(row_rest[r], rows[r] + c * kBytes, (count - c) * kBytes);
    row_ends[r] = row_rest[r];
  }
  for (size_t t = 0; t < kTokens; ++t) {
    std::memcpy(token_rest[t], tokens[t] + c, (count - c) * sizeof(Activation));
    token_ends[t] = token_rest[t];
  }
  step_rows<Columns, kTokens>(row_ends, 0, token_ends, 0, sums);
}

// out[t * out_stride + r] for kTokens tokens from `token` on.
template <typename Columns, size_t kTokens>
HMT_KERNEL void few_numbers(const Weight& w, const Inputs& in, size_t token, const FourRows& four,
                            float* out, size_t out_stride) {
  const size_t width = segment_width(w), segments = (w.columns + width - 1) / width;
  F16v totals[kFewRows][kTokens];
  for (auto& row : totals) {
    for (F16v& total : row) total = zero();
  }
  for (size_t s = 0; s < segments; ++s) {
    const size_t begin = s * width, left = w.columns - begin;
    const uint8_t* rows[kFewRows];
    const typename Columns::Activation* tokens[kTokens];
    for (size_t r = 0; r < kFewRows; ++r) rows[r] = four.begin[r] + begin * Columns::kBytes;
    for (size_t t = 0; t < kTokens; ++t) {
      tokens[t] = Columns::tokens(in) + (token + t) * in.stride + begin;
    }
    F16v sums[kFewRows][kTokens];
    HMT_UNROLL
    for (auto& row : sums) {
      HMT_UNROLL
      for (F16v& sum : row) sum = zero();
    }
    sum_rows<Columns, kTokens>(four, begin * Columns::kBytes, rows, tokens,
                               left < width ? left : width, sums);
    HMT_UNROLL
    for (size_t r = 0; r < kFewRows; ++r) {
      const F16v scale = set1(four.scales[r][s] * Columns::kUnit);
      HMT_UNROLL
      for (size_t t = 0; t < kTokens; ++t) totals[r][t] = fma(sums[r][t], scale, totals[r][t]);
    }
  }
  for (size_t t = 0; t < kTokens; ++t) {
    for (size_t r = 0; r < four.count; ++r) {
      float total = total_of(totals[r][t]);
      if (four.minima[r] != nullptr) {
        total += minima_product(four.minima[r], four.sums + (token + t) * segments, segments);
      }
      out[t * out_stride + r] = total;
    }
  }
}

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
#if defined(HMT_AVX512_BF16)
  if (w.code == Code::kBF16 && in.bf16 != nullptr) {
    return few_numbers<PairedColumns, kTokens>(w, in, token, four, out, out_stride);
  }
  if (w.code == Code::kFp8 && in.bf16 != nullptr) {
    return few_numbers<PairedE4M3Columns, kTokens>(w, in, token, four, out, out_stride);
  }
#endif
  with_code(w.code, [&](auto code) {
    few_numbers<WidenedColumns<code.value>, kTokens>(w, in, token, four, out, out_stride);
  });
}

// See LinearKernels::multiply.
inline void multiply_few(const Weight& w, const Inputs& in, size_t first_row, size_t end_row,
                         float* out, size_t out_stride) {
  const size_t segments = w.minima == nullptr ? 0 : segments_of(w);
  Scratch scratch(in.tokens * segments * sizeof(float));
  float* sums = scratch.take<float>(in.tokens * segments);
  for (size_t t = 0; t < in.tokens; ++t) {
    for (size_t s = 0; s < segments; ++s) sums[t * segments + s] = segment_sum(w, in, t, s);
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
