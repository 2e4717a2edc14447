// The two products of attention, over words of four bytes.  Only for *.isa.cpp.
//
// A word is one f32, or two bf16 numbers.  `Words` says how words are multiplied and added:
//     scores  [rows, 64] += query words [rows, lines] x key lines of four pages [lines, 16 tokens]
//     mixes   sums [rows, width] += weight words [rows, words] x value lines [words, width]
#pragma once

#include <type_traits>

#include "attention/kernels.h"
#include "attention/lanes.h"

namespace hmt::HMT_ISA {

struct FloatWords {
  static constexpr size_t kNumbers = 1;
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

// Keys and values of four pages as a product reads them.  Those beyond `count` pages repeat the
// first, to be read and masked.
struct Block {
  const uint8_t* keys[kBlockPages];
  const uint8_t* values[kBlockPages];
  // What the next block will read out of memory, fetched meanwhile; key_ahead[p] may be null.
  const uint8_t* key_ahead[kBlockPages];
  const uint8_t* value_ahead[kBlockPages];
  size_t count;
};

HMT_INLINE void fetch(const uint8_t* line) {
  __builtin_prefetch(line, 0, 3);
}

template <typename Words, size_t kRows, bool kAhead>
HMT_INLINE void score_rows(const uint32_t* query, size_t lines, const Block& block, size_t page,
                           float* scores) {
  F16v sums[kRows][kRegisterColumns];
  for (auto& row : sums) {
    for (F16v& sum : row) sum = zero();
  }
  for (size_t line = 0; line < lines; ++line) {
    F16v keys[kRegisterColumns];
    for (size_t c = 0; c < kRegisterColumns; ++c) {
      keys[c] = as_float(load_words(block.keys[page + c] + line * 64));
      if (kAhead) fetch(block.key_ahead[page + c] + line * 64);
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

// Calls each(rows as a compile-time number, first row) for pieces that cover [0, rows).
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

template <typename Words>
void score(const uint32_t* query, size_t rows, size_t lines, const Block& block, float* scores) {
  for (size_t page = 0; page < kBlockPages; page += kRegisterColumns) {
    by_rows(rows, [&](auto count, size_t r) {
      const uint32_t* words = query + r * lines;
      float* out = scores + r * kBlockTokens;
      if (r == 0 && block.key_ahead[0] != nullptr) {
        score_rows<Words, decltype(count)::value, true>(words, lines, block, page, out);
      } else {
        score_rows<Words, decltype(count)::value, false>(words, lines, block, page, out);
      }
    });
  }
}

template <typename Words, size_t kRows, size_t kColumns, bool kAhead>
HMT_INLINE void mix_columns(const uint32_t* weights, const Block& block, size_t width,
                            size_t column, float* sums) {
  constexpr size_t kWords = kPageTokens / Words::kNumbers;  // of a page
  constexpr size_t kStride = kBlockTokens / Words::kNumbers;
  F16v total[kRows][kColumns];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t c = 0; c < kColumns; ++c) total[r][c] = load(sums + r * width + column + 16 * c);
  }
  for (size_t page = 0; page < block.count; ++page) {
    const uint8_t* line = block.values[page] + column * 4;
    for (size_t word = 0; word < kWords; ++word, line += width * 4) {
      F16v values[kColumns];
      for (size_t c = 0; c < kColumns; ++c) {
        values[c] = as_float(load_words(line + 64 * c));
        if (kAhead) fetch(block.value_ahead[page] + (line - block.values[page]) + 64 * c);
      }
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
  by_rows(rows, [&](auto count, size_t r) {
    constexpr size_t kRows = decltype(count)::value;
    if (r == 0 && block.value_ahead[0] != nullptr) {
      mix_columns<Words, kRows, kColumns, true>(weights, block, width, column, sums);
    } else {
      mix_columns<Words, kRows, kColumns, false>(weights + r * kStride, block, width, column,
                                                 sums + r * width);
    }
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
