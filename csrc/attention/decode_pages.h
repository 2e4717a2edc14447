// Pages in the form that products read, where they do not lie in it.  Only for *.isa.cpp.
#pragma once

#include "attention/kernels.h"
#include "attention/lanes.h"

namespace hmt::HMT_ISA {

// The numbers in sixteen words, in f32: out[i] has number i of each word.
template <PageEncoding kEncoding>
struct WordNumbers;

template <>
struct WordNumbers<PageEncoding::kF32> {
  static constexpr size_t kCount = 1;
  HMT_INLINE static void get(I16v words, F16v* out) { out[0] = as_float(words); }
};

template <>
struct WordNumbers<PageEncoding::kBF16> {
  static constexpr size_t kCount = 2;
  HMT_INLINE static void get(I16v words, F16v* out) {
    out[0] = as_float(shift_left(words, 16));
    out[1] = as_float(bits_and(words, static_cast<int32_t>(0xffff0000u)));
  }
};

template <>
struct WordNumbers<PageEncoding::kF16> {
  static constexpr size_t kCount = 2;
  HMT_INLINE static void get(I16v words, F16v* out) {
#if defined(HMT_AVX512)
    out[0].v = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words.v));
    out[1].v = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words.v, 16)));
#else
    uint16_t halves[32], even[16], odd[16];
    static_assert(sizeof halves == sizeof words, "");
    std::memcpy(halves, &words, sizeof halves);
    for (size_t i = 0; i < 16; ++i) {
      even[i] = halves[2 * i];
      odd[i] = halves[2 * i + 1];
    }
    out[0] = load_f16(even);
    out[1] = load_f16(odd);
#endif
  }
};

template <>
struct WordNumbers<PageEncoding::kInt8> {
  static constexpr size_t kCount = 4;
  HMT_INLINE static void get(I16v words, F16v* out) {
    for (int i = 0; i < 4; ++i) out[i] = to_float(shift_right(shift_left(words, 24 - 8 * i), 24));
  }
};

template <>
struct WordNumbers<PageEncoding::kInt4> {
  static constexpr size_t kCount = 8;
  HMT_INLINE static void get(I16v words, F16v* out) {
    for (int i = 0; i < 8; ++i) {
      const I16v code = bits_and(shift_right(words, i % 4 * 8 + i / 4 * 4), 15);
      out[i] = to_float(add(code, set1(int32_t{-8})));
    }
  }
};

template <>
struct WordNumbers<PageEncoding::kFp8> {
  static constexpr size_t kCount = 4;
  HMT_INLINE static void get(I16v words, F16v* out) {
    for (int i = 0; i < 4; ++i) {
      const I16v code = shift_left(words, 24 - 8 * i);
      const I16v size = add(bits_and(shift_right(code, 4), 0x7f00000), set1(int32_t{120 << 23}));
      // As if all had a hidden bit, which those below 2^-6 have not: of them this makes 2^-7 (1 + m)
      // of 2^-6 m.  No step has a number that a process might flush.
      const F16v hidden = as_float(size);
      const F16v number = min(hidden, fma(hidden, set1(2.0f), set1(-0x1p-6f)));
      out[i] = as_float(add(bits(number), bits_and(code, INT32_MIN)));
    }
  }
};

HMT_INLINE F16v key_scales(const PageLayout& layout, const uint8_t* scales, size_t column) {
  if (layout.encoding == PageEncoding::kInt8) {
    float lanes[16];
    std::memcpy(lanes, scales, sizeof lanes);
    return load(lanes);
  }
  uint16_t lanes[16];
  std::memcpy(lanes, scales + column / kInt4Group * sizeof lanes, sizeof lanes);
  return load_bf16(lanes);
}

// The scale of a token's values in columns [column, column + 16).
HMT_INLINE float value_scale(const PageLayout& layout, const uint8_t* scales, size_t token,
                             size_t column) {
  if (layout.encoding == PageEncoding::kInt8) {
    float scale;
    std::memcpy(&scale, scales + 4 * token, sizeof scale);
    return scale;
  }
  uint16_t scale;
  std::memcpy(&scale, scales + 2 * (column / kInt4Group * kPageTokens + token), sizeof scale);
  return bf16_to_float(scale);
}

constexpr bool has_scales(PageEncoding encoding) {
  return encoding == PageEncoding::kInt8 || encoding == PageEncoding::kInt4;
}

// lines [key_dim, 16 tokens] f32
template <PageEncoding kEncoding>
void spread_keys(const PageLayout& layout, const uint8_t* page, size_t head, float* lines) {
  using Numbers = WordNumbers<kEncoding>;
  const uint8_t* words = page + layout.key_at(head);
  const uint8_t* scales = page + layout.key_scales_at(head);
  for (size_t column = 0; column < layout.key_dim; column += Numbers::kCount, words += 64) {
    F16v numbers[Numbers::kCount];
    Numbers::get(load_words(words), numbers);
    for (size_t i = 0; i < Numbers::kCount; ++i) {
      if (has_scales(kEncoding)) numbers[i] = mul(numbers[i], key_scales(layout, scales, column));
      store(lines + (column + i) * kPageTokens, numbers[i]);
    }
  }
}

// Up to 16 words, zero beyond them.
HMT_INLINE I16v load_some_words(const uint8_t* words, size_t count) {
  if (count >= 16) return load_words(words);
  uint32_t some[16] = {};
  std::memcpy(some, words, count * 4);
  return load_words(some);
}

// rows [16 tokens, width] f32, zero beyond value_dim
template <PageEncoding kEncoding>
void spread_values(const PageLayout& layout, const uint8_t* page, size_t head, size_t width,
                   float* rows) {
  using Numbers = WordNumbers<kEncoding>;
  const uint8_t* words = page + layout.value_at(head);
  const uint8_t* scales = page + layout.value_scales_at(head);
  for (size_t token = 0; token < kPageTokens; token += Numbers::kCount) {
    for (size_t column = 0; column < width; column += 16) {
      F16v numbers[Numbers::kCount];
      Numbers::get(load_some_words(words + column * 4, layout.value_dim - column), numbers);
      for (size_t i = 0; i < Numbers::kCount; ++i) {
        if (has_scales(kEncoding)) {
          const float scale = value_scale(layout, scales, token + i, column);
          numbers[i] = mul(numbers[i], set1(scale));
        }
        store(rows + (token + i) * width + column, numbers[i]);
      }
    }
    words += layout.value_dim * 4;
  }
  if (kEncoding != PageEncoding::kInt4 || width == layout.value_dim) return;
  // The codes of columns that do not exist were zeros, which stand for -8.
  for (size_t token = 0; token < kPageTokens; ++token) {
    for (size_t c = layout.value_dim; c < width; ++c) rows[token * width + c] = 0.0f;
  }
}

#if defined(HMT_AVX512)
// r[i] lane j becomes r[j] lane i.
HMT_INLINE void transpose_words(__m512i (&r)[16]) {
  __m512i t[16];
  for (size_t i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (size_t i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Quarter q of r[4 i + j] has lanes 4 i .. 4 i + 3 of column 4 q + j.
  for (size_t j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (size_t i = 0; i < 16; ++i) r[i] = t[i];
}
#endif

// Values of a latent layer, out of its keys: rows [16 tokens, width] f32.
inline void turn_keys(const float* lines, size_t value_dim, size_t width, float* rows) {
  size_t column = 0;
#if defined(HMT_AVX512)
  for (; column + 16 <= value_dim; column += 16) {
    __m512i r[16];
    for (size_t i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(lines + (column + i) * 16);
    transpose_words(r);
    for (size_t i = 0; i < 16; ++i) _mm512_storeu_si512(rows + i * width + column, r[i]);
  }
#endif
  for (; column < width; ++column) {
    for (size_t token = 0; token < kPageTokens; ++token) {
      rows[token * width + column] = column < value_dim ? lines[column * 16 + token] : 0.0f;
    }
  }
}

#if defined(HMT_AVX512_BF16)

// The same in bf16: keys [value_dim / 2, 16 tokens, 2] to rows [8, width, 2 tokens].
inline void turn_bf16_keys(const uint8_t* keys, size_t value_dim, size_t width, uint16_t* rows) {
  alignas(64) uint16_t low[32], high[32];  // which numbers of two rows make pairs
  for (uint16_t i = 0; i < 16; ++i) {
    low[2 * i] = i;
    high[2 * i] = static_cast<uint16_t>(16 + i);
    low[2 * i + 1] = static_cast<uint16_t>(32 + i);
    high[2 * i + 1] = static_cast<uint16_t>(48 + i);
  }
  const __m512i first = _mm512_loadu_si512(low), second = _mm512_loadu_si512(high);
  size_t column = 0;
  for (; column + 32 <= value_dim; column += 32) {
    __m512i r[16];
    for (size_t i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(keys + (column / 2 + i) * 64);
    transpose_words(r);
    for (size_t i = 0; i < 16; i += 2) {
      uint16_t* out = rows + (i / 2 * width + column) * 2;
      _mm512_storeu_si512(out, _mm512_permutex2var_epi16(r[i], first, r[i + 1]));
      _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(r[i], second, r[i + 1]));
    }
  }
  for (; column < width; ++column) {
    for (size_t token = 0; token < kPageTokens; ++token) {
      uint16_t number = 0;
      const size_t at = (column / 2 * kPageTokens + token) * 2 + column % 2;
      if (column < value_dim) std::memcpy(&number, keys + at * 2, sizeof number);
      rows[(token / 2 * width + column) * 2 + token % 2] = number;
    }
  }
}

// Values of other layers, where columns are missing or tokens have to be hidden.
inline void copy_bf16_values(const uint8_t* values, size_t value_dim, size_t width,
                             uint16_t* rows) {
  for (size_t pair = 0; pair < kPageTokens / 2; ++pair) {
    uint16_t* row = rows + pair * width * 2;
    std::memcpy(row, values + pair * value_dim * 4, value_dim * 4);
    std::memset(row + value_dim * 2, 0, (width - value_dim) * 4);
  }
}

inline void hide_bf16_tokens(size_t seen, size_t width, uint16_t* rows) {
  for (size_t token = seen; token < kPageTokens; ++token) {
    uint16_t* row = rows + token / 2 * width * 2 + token % 2;
    for (size_t column = 0; column < width; ++column) row[2 * column] = 0;
  }
}

#endif

}  // namespace hmt::HMT_ISA
