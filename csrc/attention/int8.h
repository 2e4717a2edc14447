// int8 pages read where they lie, by VPDPBUSD.  Only for *.isa.cpp.
//
// A query is rounded to 15 bits and cut into two rows of int8, 128 times the first plus the second;
// weights, with the scales of their values, are rounded to 16 bits and cut into two rows of bytes.
// Products and their sums are exact.  Rounding to 8 bits would be as fast as half the rows, but
// would cost more accuracy than the pages' own codes.
#pragma once

#include "attention/forms.h"

#if defined(HMT_AVX512)

namespace hmt::HMT_ISA {

struct Int8Keys {
  static constexpr size_t kNumbers = 4;
  static constexpr bool kFresh = true;
  // VPDPBUSD takes one operand without sign: codes plus 128.
  HMT_INLINE static F16v line(F16v words) {
    const __m512i sign = _mm512_set1_epi8(-128);
    return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(words.v), sign))};
  }
  HMT_INLINE static F16v multiply_add(F16v sum, F16v line, F16v word) {
    return {_mm512_castsi512_ps(_mm512_dpbusd_epi32(
        _mm512_castps_si512(sum.v), _mm512_castps_si512(line.v), _mm512_castps_si512(word.v)))};
  }
};

struct Int8Values {
  static constexpr size_t kNumbers = 4;
  static constexpr bool kFresh = true;
  HMT_INLINE static F16v line(F16v words) { return words; }
  HMT_INLINE static F16v multiply_add(F16v sum, F16v line, F16v word) {
    return {_mm512_castsi512_ps(_mm512_dpbusd_epi32(
        _mm512_castps_si512(sum.v), _mm512_castps_si512(word.v), _mm512_castps_si512(line.v)))};
  }
};

HMT_INLINE F16v integers(const float* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }

struct Int8Pages {
  static constexpr size_t kNumbers = 4;
  static constexpr bool kHidesTokens = false;
  static bool keys_in_place(const PageLayout&) { return true; }
  static bool values_in_place(const PageLayout& layout) { return layout.value_dim % 16 == 0; }
  static void keys(const PageLayout&, const uint8_t*, size_t, uint8_t*) {}

  static void values(const PageLayout& layout, const uint8_t* page, const uint8_t*, size_t head,
                     size_t, uint8_t* out) {
    const size_t bytes = layout.value_dim * 4, width = padded_width(layout) * 4;
    for (size_t i = 0; i < kPageTokens / kNumbers; ++i) {
      std::memcpy(out + i * width, page + layout.value_at(head) + i * bytes, bytes);
      std::memset(out + i * width + bytes, 0, width - bytes);
    }
  }

  static void load_query(const Tile& tile, const Work& work) {
    const size_t dim = tile.pages->layout.key_dim;
    for (size_t r = 0; r < tile.rows; ++r) {
      float* row = work.scores;  // not in use yet
      widen_row(query_row(tile, r), static_cast<int>(tile.query->type), dim, row);
      float most = 0.0f, nothing = 0.0f;  // which turns NaN if a number is not finite
      for (size_t i = 0; i < dim; ++i) {
        const float size = row[i] < 0.0f ? -row[i] : row[i];
        most = size > most ? size : most;
        nothing += row[i] * 0.0f;
      }
      const float scale = most / 16256.0f;  // 127 * 128
      const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      work.query_scales[r] = scale + nothing;
      auto* high = reinterpret_cast<int8_t*>(work.query) + 2 * r * dim;
      split_row(row, dim, inverse <= 1e38f ? inverse : 0.0f, high, high + dim,
                work.query_sums + 2 * r);
    }
  }

  static void split_row(const float* row, size_t dim, float inverse, int8_t* high, int8_t* low,
                        int32_t* sums) {
    int32_t high_sum = 0, low_sum = 0;
    for (size_t begin = 0; begin < dim; begin += 16) {
      const size_t count = dim - begin < 16 ? dim - begin : 16;
      float numbers[16] = {};
      int32_t codes[16];
      std::memcpy(numbers, row + begin, count * sizeof(float));
      const F16v scaled = mul(load(numbers), set1(inverse));
      // In this order, NaN becomes a bound.
      store(codes, to_int(min(max(scaled, set1(-16256.0f)), set1(16256.0f))));
      for (size_t i = 0; i < count; ++i) {
        const int32_t upper = (codes[i] + 64) >> 7, lower = codes[i] - 128 * upper;
        high[begin + i] = static_cast<int8_t>(upper);
        low[begin + i] = static_cast<int8_t>(lower);
        high_sum += upper;
        low_sum += lower;
      }
    }
    sums[0] = 128 * high_sum;
    sums[1] = 128 * low_sum;
  }

  static void score(const Tile& tile, const Block& block, const Work& work) {
    const size_t lines = tile.pages->layout.key_dim / kNumbers;
    hmt::HMT_ISA::score<Int8Keys>(work.query, 2 * tile.rows, lines, block, work.scores);
  }

  HMT_INLINE static F16v part(const Work& work, size_t row, size_t page) {
    const __m512i sum = _mm512_loadu_si512(work.scores + row * kBlockTokens + page * kPageTokens);
    return {_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(work.query_sums[row])))};
  }
  HMT_INLINE static F16v scores(const Block& block, const Work& work, size_t r, size_t page) {
    const F16v sum = fma(part(work, 2 * r, page), set1(128.0f), part(work, 2 * r + 1, page));
    const F16v scales = as_float(load_words(block.key_scales[page]));
    return mul(mul(sum, set1(work.query_scales[r])), scales);
  }

  HMT_INLINE static void weights(const Block& block, const Work& work, size_t r,
                                 const F16v* weights) {
    F16v scaled[kBlockPages];
    F16v most = zero();
    for (size_t page = 0; page < kBlockPages; ++page) {
      const F16v scales = as_float(load_words(block.value_scales[page]));
      // Scales of tokens that are not there may be anything.
      const __mmask16 seen = _mm512_cmp_ps_mask(weights[page].v, _mm512_setzero_ps(), _CMP_GT_OQ);
      scaled[page].v = _mm512_maskz_mul_ps(seen, weights[page].v, scales.v);
      most = max(most, scaled[page]);
    }
    const float top = greatest(most);
    const float inverse = top > 1e-33f ? 65535.0f / top : 0.0f;
    work.weight_scales[r] = top / 65535.0f;
    auto* high = reinterpret_cast<uint8_t*>(work.weights) + 2 * r * kBlockTokens;
    for (size_t page = 0; page < kBlockPages; ++page) {
      const F16v number = min(mul(scaled[page], set1(inverse)), set1(65535.0f));
      const __m512i codes = _mm512_cvtps_epi32(number.v);
      uint8_t* bytes = high + page * kPageTokens;
      const __m128i upper = _mm512_cvtepi32_epi8(_mm512_srli_epi32(codes, 8));
      const __m128i lower = _mm512_cvtepi32_epi8(codes);
      std::memcpy(bytes, &upper, sizeof upper);
      std::memcpy(bytes + kBlockTokens, &lower, sizeof lower);
    }
  }

  static void mix(const Tile& tile, const Block& block, const Work& work, float* sums) {
    const size_t width = padded_width(tile.pages->layout);
    hmt::HMT_ISA::mix<Int8Values>(work.weights, 2 * tile.rows, block, width, work.mixed);
    for (size_t r = 0; r < tile.rows; ++r) {
      const float* high = work.mixed + 2 * r * width;
      const F16v scale = set1(work.weight_scales[r]);
      for (size_t c = 0; c < width; c += 16) {
        const F16v sum = fma(integers(high + c), set1(256.0f), integers(high + width + c));
        store(sums + r * width + c, fma(sum, scale, load(sums + r * width + c)));
      }
    }
  }
};

}  // namespace hmt::HMT_ISA

#endif
