// The two products of attention, over words of four bytes.  Only for *.isa.cpp.
//
// A word is one f32, two bf16 numbers, or four of int8.  `Words` says what is made of a line of
// sixteen words as it is read, how words are multiplied and added, and whether sums begin anew:
//     score   scores [rows, 64] = query words [rows, lines] x key lines of four pages [lines, 16]
//     mix     sums [rows, width] += weight words [rows, words] x value lines [words, width]
#pragma once

#include <type_traits>

#include "attention/kernels.h"
#include "attention/lanes.h"

namespace hmt::HMT_ISA {

struct FloatWords {
  static constexpr size_t kNumbers = 1;
  static constexpr bool kFresh = false;
  HMT_INLINE static F16v line(F16v words) { return words; }
  HMT_INLINE static F16v multiply_add(F16v sum, F16v line, F16v word) {
    return fma(line, word, sum);
  }
  HMT_INLINE static void store_weights(uint32_t* words, size_t vector, F16v weights) {
    float lanes[16];
    store(lanes, weights);
    std::memcpy(words + 16 * vector, lanes, sizeof lanes);
  }
};

#if defined(HMT_AVX512_BF16)
struct Bf16Words {
  static constexpr size_t kNumbers = 2;
  static constexpr bool kFresh = false;
  HMT_INLINE static F16v line(F16v words) { return words; }
  HMT_INLINE static F16v multiply_add(F16v sum, F16v line, F16v word) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)line.v, (__m512bh)word.v)};
  }
  HMT_INLINE static void store_weights(uint32_t* words, size_t vector, F16v weights) {
    const __m256bh halves = _mm512_cvtneps_pbh(weights.v);
    std::memcpy(words + 8 * vector, &halves, sizeof halves);
  }
};
#endif

// Registers for sums: rows by vectors of 16.
#if defined(HMT_AVX512)
constexpr size_t kRegisterRows = 6, kRegisterColumns = 4;
#elif defined(HMT_AVX2)
constexpr size_t kRegisterRows = 3, kRegisterColumns = 2;
#else
constexpr size_t kRegisterRows = 2, kRegisterColumns = 1;
#endif

// Keys and values of four pages as a product reads them: of pages [first, count).  Of the others,
// keys are those of another page, to be read and masked.
struct Block {
  const uint8_t* keys[kBlockPages];
  const uint8_t* values[kBlockPages];
  // What the next block will read out of memory, fetched meanwhile; key_ahead[p] may be null.
  const uint8_t* key_ahead[kBlockPages];
  const uint8_t* value_ahead[kBlockPages];
  // Of int8 pages: f32 [16].
  const uint8_t* key_scales[kBlockPages];
  const uint8_t* value_scales[kBlockPages];
  size_t first, count;
};

// Into L2: a block of keys and values fills L1, and what is fetched there pushes out what is in use
// (12 GB/s on one core, and 18 into L2, where sums of words read 19).
HMT_INLINE void fetch(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// Which of the columns in registers a pass over some rows fetches ahead: each pass some, so that
// memory is busy through all of them.
struct Share {
  size_t first, count;
};
HMT_INLINE Share share_of(size_t pass, size_t passes, size_t columns) {
  const size_t each = (columns + passes - 1) / passes, first = pass * each;
  if (first >= columns) return {0, 0};
  return {first, each};
}

template <typename Words, size_t kRows, size_t kFetched>
HMT_INLINE void score_rows(const uint32_t* query, size_t lines, const Block& block, size_t page,
                           size_t fetched, float* scores) {
  F16v sums[kRows][kRegisterColumns];
  for (auto& row : sums) {
    for (F16v& sum : row) sum = zero();
  }
  for (size_t line = 0; line < lines; ++line) {
    F16v keys[kRegisterColumns];
    for (size_t c = 0; c < kRegisterColumns; ++c) {
      keys[c] = Words::line(as_float(load_words(block.keys[page + c] + line * 64)));
    }
    for (size_t c = 0; c < kFetched; ++c) {
      fetch(block.key_ahead[page + fetched + c] + line * 64);
    }
    for (size_t r = 0; r < kRows; ++r) {
      const F16v word = broadcast_word(query + r * lines + line);
      for (size_t c = 0; c < kRegisterColumns; ++c) {
        sums[r][c] = Words::multiply_add(sums[r][c], keys[c], word);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t c = 0; c < kRegisterColumns; ++c) {
      store(scores + r * kBlockTokens + (page + c) * kPageTokens, sums[r][c]);
    }
  }
}

// Calls each(rows as a compile-time number, first row) for passes that cover [0, rows).
template <typename Each>
HMT_INLINE void by_rows(size_t rows, const Each& each) {
  size_t r = 0;
  if (kRegisterRows >= 6) {
    // 8 rows are faster as 4 + 4 than as 6 + 2.
    for (; rows - r >= 6 && rows - r != 8; r += 6) each(std::integral_constant<size_t, 6>(), r);
    for (; rows - r >= 4; r += 4) each(std::integral_constant<size_t, 4>(), r);
  }
  if (kRegisterRows >= 3) {
    for (; rows - r >= 3; r += 3) each(std::integral_constant<size_t, 3>(), r);
  }
  for (; rows - r >= 2; r += 2) each(std::integral_constant<size_t, 2>(), r);
  if (r < rows) each(std::integral_constant<size_t, 1>(), r);
}

inline size_t passes_of(size_t rows) {
  size_t passes = 0;
  by_rows(rows, [&](auto, size_t) { ++passes; });
  return passes;
}

// Calls each(rows, columns to fetch; both compile-time numbers, first column to fetch, first row).
template <size_t kColumns, typename Each>
HMT_INLINE void by_rows_fetching(size_t rows, bool ahead, const Each& each) {
  const size_t passes = ahead ? passes_of(rows) : 1;
  size_t pass = 0;
  by_rows(rows, [&](auto count, size_t r) {
    const Share share = ahead ? share_of(pass++, passes, kColumns) : Share{0, 0};
    if (share.count == 0) return each(count, std::integral_constant<size_t, 0>(), 0, r);
    if (share.count == 1) return each(count, std::integral_constant<size_t, 1>(), share.first, r);
    if (share.count < kColumns) {
      return each(count, std::integral_constant<size_t, (kColumns + 1) / 2>(), share.first, r);
    }
    each(count, std::integral_constant<size_t, kColumns>(), 0, r);
  });
}

template <typename Words>
void score(const uint32_t* query, size_t rows, size_t lines, const Block& block, float* scores) {
  for (size_t page = 0; page < kBlockPages; page += kRegisterColumns) {
    by_rows_fetching<kRegisterColumns>(
        rows, block.key_ahead[0] != nullptr,
        [&](auto count, auto fetched, size_t first_fetched, size_t r) {
          score_rows<Words, decltype(count)::value, decltype(fetched)::value>(
              query + r * lines, lines, block, page, first_fetched, scores + r * kBlockTokens);
        });
  }
}

template <typename Words, size_t kRows, size_t kColumns, size_t kFetched>
HMT_INLINE void mix_columns(const uint32_t* weights, const Block& block, size_t width,
                            size_t column, size_t fetched, float* sums) {
  constexpr size_t kWords = kPageTokens / Words::kNumbers;  // of a page
  constexpr size_t kStride = kBlockTokens / Words::kNumbers;
  F16v total[kRows][kColumns];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t c = 0; c < kColumns; ++c) {
      total[r][c] = Words::kFresh ? zero() : load(sums + r * width + column + 16 * c);
    }
  }
  for (size_t page = block.first; page < block.count; ++page) {
    const uint8_t* line = block.values[page] + column * 4;
    const uint8_t* ahead = nullptr;
    if (kFetched > 0) ahead = block.value_ahead[page] + (column + 16 * fetched) * 4;
    for (size_t word = 0; word < kWords; ++word, line += width * 4) {
      F16v values[kColumns];
      for (size_t c = 0; c < kColumns; ++c) {
        values[c] = Words::line(as_float(load_words(line + 64 * c)));
      }
      for (size_t c = 0; c < kFetched; ++c) fetch(ahead + word * width * 4 + 64 * c);
      for (size_t r = 0; r < kRows; ++r) {
        const F16v weight = broadcast_word(weights + r * kStride + page * kWords + word);
        for (size_t c = 0; c < kColumns; ++c) {
          total[r][c] = Words::multiply_add(total[r][c], values[c], weight);
        }
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t c = 0; c < kColumns; ++c) store(sums + r * width + column + 16 * c, total[r][c]);
  }
}

template <typename Words, size_t kColumns>
HMT_INLINE void mix_all_rows(const uint32_t* weights, size_t rows, const Block& block, size_t width,
                             size_t column, float* sums) {
  constexpr size_t kStride = kBlockTokens / Words::kNumbers;
  by_rows_fetching<kColumns>(
      rows, block.value_ahead[block.first] != nullptr,
      [&](auto count, auto fetched, size_t first_fetched, size_t r) {
        mix_columns<Words, decltype(count)::value, kColumns, decltype(fetched)::value>(
            weights + r * kStride, block, width, column, first_fetched, sums + r * width);
      });
}

// width: a multiple of 16
template <typename Words>
void mix(const uint32_t* weights, size_t rows, const Block& block, size_t width, float* sums) {
  size_t column = 0;
  for (; column + 16 * kRegisterColumns <= width; column += 16 * kRegisterColumns) {
    mix_all_rows<Words, kRegisterColumns>(weights, rows, block, width, column, sums);
  }
  for (; column < width; column += 16) {
    mix_all_rows<Words, 1>(weights, rows, block, width, column, sums);
  }
}

}  // namespace hmt::HMT_ISA
