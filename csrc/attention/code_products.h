// Products with codes read where they lie, by VPDPBUSD.  Only for *.isa.cpp.
//
// A query, and the weights of values, are whole numbers of 15 or 16 bits cut into two rows of
// bytes, so that products and their sums are exact.  Both halves of four rows meet a line of codes
// as it is read, once: two lines and sixteen sums fill the registers.  Products are 2048 of the
// 2800 cycles that 64 positions of int8 and four rows take on Zen 4.
#pragma once

#include <type_traits>

#include "attention/kernels.h"
#include "attention/lanes.h"
#include "attention/products.h"
#include "attention/workspace.h"

#if defined(HMT_AVX512)

namespace hmt::HMT_ISA {

constexpr size_t kCodeRows = 4;  // rows of a pass

// sum += the products of four bytes without sign and four with one, in each word.  Not by
// intrinsic: GCC 12 copies sums between registers then.
HMT_INLINE void add_products(__m512i& sum, __m512i bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(signed_bytes));
}

// Bytes of int8: a row has one scale.
struct Int8Codes {
  static constexpr size_t kNumbers = 4;  // in a word
  static constexpr size_t kParts = 1;    // lines of bytes in a line of words
  static constexpr int32_t kKeyZero = 128;
  static constexpr int kWeightShift = 8;
  static constexpr size_t kWidestColumns = 4;
  static constexpr size_t group(size_t dim) { return dim; }
  HMT_INLINE static F16v scales(const uint8_t* scales, size_t) {
    return as_float(load_words(scales));
  }
  // Bytes without sign: codes plus kKeyZero.
  HMT_INLINE static __m512i key_bytes(__m512i words, size_t) {
    return _mm512_xor_si512(words, _mm512_set1_epi8(-128));
  }
  HMT_INLINE static __m512i value_bytes(__m512i words, size_t) { return words; }
  // Weights have no sign, values have one.
  HMT_INLINE static void add_values(__m512i& sum, __m512i bytes, __m512i weights) {
    add_products(sum, weights, bytes);
  }
};

// Four bits: a scale for every 32 numbers of a row, which may be negative.
struct Int4Codes {
  static constexpr size_t kNumbers = 8, kParts = 2;
  static constexpr int32_t kKeyZero = 8;
  static constexpr int kWeightShift = 7;
  static constexpr size_t kWidestColumns = kInt4Group / 16;
  static constexpr size_t group(size_t) { return kInt4Group; }
  HMT_INLINE static F16v scales(const uint8_t* scales, size_t group) {
    const __m256i halves = _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(scales + group * kPageTokens * 2));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
  }
  HMT_INLINE static __m512i key_bytes(__m512i words, size_t part) {
    const __m512i low = _mm512_set1_epi8(15);
    return _mm512_and_si512(part == 0 ? words : _mm512_srli_epi32(words, 4), low);
  }
  HMT_INLINE static __m512i value_bytes(__m512i words, size_t part) {
    return key_bytes(words, part);
  }
  HMT_INLINE static void add_values(__m512i& sum, __m512i bytes, __m512i weights) {
    add_products(sum, bytes, weights);
  }
};

// Up to eight pages of one head.
struct CodeBlock {
  const uint8_t* keys[kCodePages];
  const uint8_t* values[kCodePages];
  const uint8_t* key_scales[kCodePages];
  const uint8_t* value_scales[kCodePages];
  // Fetched, a line for each that is read, while keys are scored, and while values are mixed: all
  // but the last page of the former and the first of the latter, which `fetch_between` does.
  const uint8_t* ahead_of_keys[kCodePages];
  const uint8_t* ahead_of_values[kCodePages];
  size_t count;
};

// A tile's queries; rows [r, r + 4) are a pass, whose words lie side by side.
struct CodeQuery {
  const uint32_t* words;  // of passes, [bytes of a row / 4, rows of the pass, 2: upper, lower]
  const int32_t* starts;  // of passes, [groups, rows of the pass]: minus kKeyZero times the sum
  const float* factors;   // [rows]: what a sum is multiplied with
};

HMT_INLINE __m512i broadcast(const uint32_t* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// scores [kRows, kCodeTokens]; pages [page, page + kPages) of the block
template <typename Codes, size_t kRows, size_t kPages, size_t kFetched>
HMT_INLINE void score_codes(const uint32_t* query, const int32_t* starts, const float* factors,
                            size_t dim, const CodeBlock& block, size_t page, float* scores) {
  const size_t lines = dim / Codes::kNumbers;
  const size_t group_lines = Codes::group(dim) / Codes::kNumbers;
  F16v total[kRows][kPages];
  for (auto& row : total) {
    for (F16v& sum : row) sum = zero();
  }
  size_t line = 0;
  for (size_t group = 0; line < lines; ++group, starts += kRows) {
    __m512i upper[kRows][kPages], lower[kRows][kPages];
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t c = 0; c < kPages; ++c) {
        upper[r][c] = _mm512_setzero_si512();
        lower[r][c] = _mm512_set1_epi32(starts[r]);
      }
    }
    const size_t end = lines - line < group_lines ? lines : line + group_lines;
    for (; line < end; ++line) {
      __m512i words[kPages];
      for (size_t c = 0; c < kPages; ++c) {
        words[c] = _mm512_loadu_si512(block.keys[page + c] + line * 64);
        if (c < kFetched) fetch(block.ahead_of_keys[page + c] + line * 64);
      }
      for (size_t part = 0; part < Codes::kParts; ++part, query += 2 * kRows) {
        __m512i bytes[kPages];
        for (size_t c = 0; c < kPages; ++c) bytes[c] = Codes::key_bytes(words[c], part);
        for (size_t r = 0; r < kRows; ++r) {
          const __m512i high = broadcast(query + 2 * r), low = broadcast(query + 2 * r + 1);
          for (size_t c = 0; c < kPages; ++c) {
            add_products(upper[r][c], bytes[c], high);
            add_products(lower[r][c], bytes[c], low);
          }
        }
      }
    }
    for (size_t c = 0; c < kPages; ++c) {
      const F16v scales = Codes::scales(block.key_scales[page + c], group);
      for (size_t r = 0; r < kRows; ++r) {
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(upper[r][c], 7), lower[r][c]);
        total[r][c] = fma({_mm512_cvtepi32_ps(sum)}, scales, total[r][c]);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t c = 0; c < kPages; ++c) {
      store(scores + r * kCodeTokens + (page + c) * kPageTokens,
            mul(total[r][c], set1(factors[r])));
    }
  }
}

// Weights of a block's values in whole numbers: of each row, [groups, 2: upper, lower, 128] bytes.
struct CodeWeights {
  const uint8_t* bytes;
  const float* scales;    // [rows, groups]
  const int32_t* starts;  // [rows, groups]: what the sums begin with
  size_t groups;
};

// sums [kRows, width] += ...; columns [column, column + 16 * kColumns), those that exist
template <typename Codes, size_t kRows, size_t kColumns, bool kFetch, bool kWhole>
HMT_INLINE void mix_codes(const CodeWeights& weights, size_t row, const CodeBlock& block,
                          size_t value_dim, size_t width, size_t column, float* sums) {
  constexpr size_t kWords = kPageTokens / Codes::kNumbers;  // of a page
  const size_t group = column / Codes::group(width);
  const size_t row_bytes = weights.groups * 2 * kCodeTokens;
  __m512i upper[kRows][kColumns], lower[kRows][kColumns];
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t c = 0; c < kColumns; ++c) {
      upper[r][c] = _mm512_setzero_si512();
      lower[r][c] = _mm512_set1_epi32(weights.starts[(row + r) * weights.groups + group]);
    }
  }
  __mmask16 there[kColumns];
  for (size_t c = 0; c < kColumns; ++c) {
    const size_t first = column + 16 * c;
    const size_t some = value_dim > first ? value_dim - first : 0;
    there[c] = static_cast<__mmask16>(some >= 16 ? 0xffffu : (1u << some) - 1);
  }
  const uint8_t* words = weights.bytes + row * row_bytes + group * 2 * kCodeTokens;
  // One loop, and those over rows unrolled: GCC 12 keeps the sums in memory otherwise, which takes
  // 1450 cycles instead of 1100.
  for (size_t i = 0; i < block.count * kWords; ++i) {
    const size_t page = i / kWords, word = i % kWords;
    const uint8_t* line = block.values[page] + (word * value_dim + column) * 4;
    __m512i values[kColumns];
    for (size_t c = 0; c < kColumns; ++c) {
      values[c] = kWhole ? _mm512_loadu_si512(line + 64 * c)
                         : _mm512_maskz_loadu_epi32(there[c], line + 64 * c);
      if (kFetch && page > 0) {
        fetch(block.ahead_of_values[page] + (column / 16 * kWords + word * kColumns + c) * 64);
      }
    }
    for (size_t part = 0; part < Codes::kParts; ++part, words += 4) {
      __m512i bytes[kColumns];
      for (size_t c = 0; c < kColumns; ++c) bytes[c] = Codes::value_bytes(values[c], part);
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
        const auto* own = reinterpret_cast<const uint32_t*>(words + r * row_bytes);
        const __m512i high = broadcast(own), low = broadcast(own + kCodeTokens / 4);
        for (size_t c = 0; c < kColumns; ++c) {
          Codes::add_values(upper[r][c], bytes[c], high);
          Codes::add_values(lower[r][c], bytes[c], low);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (size_t c = 0; c < kColumns; ++c) {
    if (!kWhole && column + 16 * c >= width) break;
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
      const F16v scale = set1(weights.scales[(row + r) * weights.groups + group]);
      const __m512i sum =
          _mm512_add_epi32(_mm512_slli_epi32(upper[r][c], Codes::kWeightShift), lower[r][c]);
      float* out = sums + (row + r) * width + column + 16 * c;
      store(out, fma({_mm512_cvtepi32_ps(sum)}, scale, load(out)));
    }
  }
}

// Calls each(rows as a compile-time number, first row) for passes of up to four.
template <typename Each>
HMT_INLINE void by_code_rows(size_t rows, const Each& each) {
  for (size_t r = 0; r < rows; r += kCodeRows) {
    switch (rows - r) {
      case 1: each(std::integral_constant<size_t, 1>(), r); break;
      case 2: each(std::integral_constant<size_t, 2>(), r); break;
      case 3: each(std::integral_constant<size_t, 3>(), r); break;
      default: each(std::integral_constant<size_t, 4>(), r);
    }
  }
}

// scores [rows, kCodeTokens]
template <typename Codes>
void score_codes(const CodeQuery& query, size_t rows, size_t dim, const CodeBlock& block,
                 float* scores) {
  const size_t groups = (dim + Codes::group(dim) - 1) / Codes::group(dim);
  by_code_rows(rows, [&](auto count, size_t r) {
    constexpr size_t kRows = decltype(count)::value;
    constexpr size_t kPages = kRows <= 2 ? 4 : 2;
    const auto pass = [&](auto pages, auto fetched, size_t page) {
      score_codes<Codes, kRows, decltype(pages)::value, decltype(fetched)::value>(
          query.words + r * dim / 2, query.starts + r * groups, query.factors + r, dim, block, page,
          scores + r * kCodeTokens);
    };
    size_t page = 0;
    for (; page + kPages <= block.count; page += kPages) {
      const auto pages = std::integral_constant<size_t, kPages>();
      using All = std::integral_constant<size_t, kPages>;
      using AllButOne = std::integral_constant<size_t, kPages - 1>;
      if (r > 0) pass(pages, std::integral_constant<size_t, 0>(), page);
      else if (page + kPages < kCodePages) pass(pages, All(), page);
      else pass(pages, AllButOne(), page);
    }
    for (; page < block.count; ++page) {
      pass(std::integral_constant<size_t, 1>(), std::integral_constant<size_t, 0>(), page);
    }
  });
}

// sums [rows, width]; width: value_dim, rounded up to a multiple of 16
template <typename Codes>
void mix_codes(const CodeWeights& weights, size_t rows, const CodeBlock& block, size_t value_dim,
               size_t width, float* sums) {
  by_code_rows(rows, [&](auto count, size_t r) {
    constexpr size_t kRows = decltype(count)::value;
    constexpr size_t kColumns = kRows <= 2 ? Codes::kWidestColumns : 2;
    for (size_t column = 0; column < value_dim; column += 16 * kColumns) {
      const auto pass = [&](auto fetches, auto whole) {
        mix_codes<Codes, kRows, kColumns, decltype(fetches)::value, decltype(whole)::value>(
            weights, r, block, value_dim, width, column, sums);
      };
      if (column + 16 * kColumns > value_dim) pass(std::false_type(), std::false_type());
      else if (r == 0) pass(std::true_type(), std::true_type());
      else pass(std::false_type(), std::true_type());
    }
  });
}

}  // namespace hmt::HMT_ISA

#endif
