// What the blocks of each of ggml's types hold.  Only for gguf.isa.cpp.
//
// A type says: kBytes of a block, kNumbers in it, kGroups of them that share a scale, kPaired for
// codes of 4 bits, Scale, kMinima, and `unpack`, which writes
//
//   codes   int8 [kNumbers]; kPaired: of 32 numbers byte k has number k in its low nibble, and
//           number k + 16 in its high one
//   scales  [kGroups], and minima where there are any
#pragma once

#include <cstring>

#include "simd/vec.h"

namespace hmt::HMT_ISA {
namespace {

HMT_INLINE uint16_t half_bits(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}
HMT_INLINE float half(const uint8_t* p) {
#if defined(HMT_AVX2)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half_bits(p))));
#else
  return f16_to_float(half_bits(p));
#endif
}

// Low nibbles of `count` bytes, then their high ones.
template <size_t kCount>
HMT_INLINE void nibbles(const uint8_t* raw, uint8_t* codes) {
  for (size_t i = 0; i < kCount; ++i) codes[i] = raw[i] & 15;
  for (size_t i = 0; i < kCount; ++i) codes[kCount + i] = static_cast<uint8_t>(raw[i] >> 4);
}

// Codes 0..15 of 32 numbers in pairs.
HMT_INLINE void pair_up(const uint8_t* codes, uint8_t* pairs) {
  for (size_t i = 0; i < 16; ++i) pairs[i] = static_cast<uint8_t>(codes[i] | codes[16 + i] << 4);
}

template <size_t kBytes_, size_t kNumbers_, size_t kGroups_, bool kPaired_, typename Scale_,
          bool kMinima_ = false>
struct Block {
  using Scale = Scale_;
  static constexpr size_t kBytes = kBytes_, kNumbers = kNumbers_, kGroups = kGroups_;
  static constexpr bool kPaired = kPaired_, kMinima = kMinima_;
};

struct Q4_0 : Block<18, 32, 1, true, uint16_t> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, uint16_t* scales, uint16_t*) {
    scales[0] = half_bits(raw);
    std::memcpy(codes, raw + 2, 16);
  }
};

struct Q4_1 : Block<20, 32, 1, true, uint16_t, true> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, uint16_t* scales,
                                uint16_t* minima) {
    scales[0] = half_bits(raw);
    minima[0] = half_bits(raw + 2);
    std::memcpy(codes, raw + 4, 16);
  }
};

struct MXFP4 : Block<17, 32, 1, true, uint8_t> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, uint8_t* scales, uint8_t*) {
    scales[0] = raw[0];
    std::memcpy(codes, raw + 1, 16);
  }
};

// Adds bit i of `fifth` to code i as 16.
HMT_INLINE void add_fifth(const uint8_t* fifth, uint8_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, fifth, sizeof bits);
  for (size_t i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((bits >> i & 1) << 4);
}

struct Q5_0 : Block<22, 32, 1, false, float> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, float* scales, float*) {
    scales[0] = half(raw);
    nibbles<16>(raw + 6, codes);
    add_fifth(raw + 2, codes);
    for (size_t i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] - 16);
  }
};

struct Q5_1 : Block<24, 32, 1, false, float, true> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, float* scales, float* minima) {
    scales[0] = half(raw);
    minima[0] = half(raw + 2);
    nibbles<16>(raw + 8, codes);
    add_fifth(raw + 4, codes);
  }
};

struct Q8_0 : Block<34, 32, 1, false, float> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, float* scales, float*) {
    scales[0] = half(raw);
    std::memcpy(codes, raw + 2, 32);
  }
};

struct Q2_K : Block<84, 256, 16, true, float, true> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, float* scales, float* minima) {
    const float by = half(raw + 80), less = half(raw + 82);
    for (size_t g = 0; g < 16; ++g) {
      scales[g] = by * static_cast<float>(raw[g] & 15);
      minima[g] = -(less * static_cast<float>(raw[g] >> 4));
    }
    for (size_t run = 0; run < 2; ++run) {
      const uint8_t* bytes = raw + 16 + 32 * run;
      for (size_t s = 0; s < 4; ++s, codes += 16) {
        for (size_t i = 0; i < 16; ++i) {
          const uint32_t low = bytes[i] >> 2 * s & 3, high = bytes[16 + i] >> 2 * s & 3;
          codes[i] = static_cast<uint8_t>(low | high << 4);
        }
      }
    }
  }
};

struct Q3_K : Block<110, 256, 16, true, float> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, float* scales, float*) {
    const float by = half(raw + 108);
    for (size_t g = 0; g < 16; ++g) {
      const int low = g < 8 ? raw[96 + g] & 15 : raw[88 + g] >> 4;
      const int high = raw[104 + g % 4] >> g / 4 * 2 & 3;
      scales[g] = by * static_cast<float>((low | high << 4) - 32);
    }
    // A third bit that is not set takes four away; 8 more than the integer is 4 more than the bits.
    for (size_t n = 0; n < 8; ++n, codes += 16) {
      const uint8_t* bytes = raw + 32 + n / 4 * 32;
      uint8_t some[32];
      for (size_t i = 0; i < 32; ++i) {
        some[i] = static_cast<uint8_t>((bytes[i] >> n % 4 * 2 & 3) + (raw[i] >> n & 1) * 4 + 4);
      }
      pair_up(some, codes);
    }
  }
};

// Scales and minima of Q4_K and Q5_K: ggml's get_scale_min_k4.
HMT_INLINE void k_scales(const uint8_t* raw, float* scales, float* minima) {
  const float by = half(raw), less = half(raw + 2);
  const uint8_t *first = raw + 4, *second = raw + 8, *third = raw + 12;
  for (size_t g = 0; g < 4; ++g) {
    scales[g] = by * static_cast<float>(first[g] & 63);
    minima[g] = -(less * static_cast<float>(second[g] & 63));
    scales[4 + g] = by * static_cast<float>((third[g] & 15) | (first[g] >> 2 & 48));
    minima[4 + g] = -(less * static_cast<float>(third[g] >> 4 | (second[g] >> 2 & 48)));
  }
}

struct Q4_K : Block<144, 256, 8, true, float, true> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, float* scales, float* minima) {
    k_scales(raw, scales, minima);
    // Low nibbles of 32 bytes are 32 numbers, high ones the next 32.
    for (size_t run = 0; run < 4; ++run, codes += 32) {
      const uint8_t* bytes = raw + 16 + 32 * run;
      for (size_t i = 0; i < 16; ++i) {
        codes[i] = static_cast<uint8_t>((bytes[i] & 15) | bytes[16 + i] << 4);
        codes[16 + i] = static_cast<uint8_t>(bytes[i] >> 4 | (bytes[16 + i] & 0xf0));
      }
    }
  }
};

struct Q5_K : Block<176, 256, 8, false, float, true> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, float* scales, float* minima) {
    k_scales(raw, scales, minima);
    for (size_t n = 0; n < 8; ++n, codes += 32) {
      const uint8_t* bytes = raw + 48 + n / 2 * 32;
      for (size_t i = 0; i < 32; ++i) {
        const uint32_t low = bytes[i] >> n % 2 * 4 & 15;
        codes[i] = static_cast<uint8_t>(low | (raw[16 + i] >> n & 1) << 4);
      }
    }
  }
};

struct Q6_K : Block<210, 256, 16, false, float> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, float* scales, float*) {
    const float by = half(raw + 208);
    for (size_t g = 0; g < 16; ++g) {
      scales[g] = by * static_cast<float>(static_cast<int8_t>(raw[192 + g]));
    }
    for (size_t n = 0; n < 8; ++n, codes += 32) {
      // Low four bits: of each 64 bytes the low nibbles, then the high ones.
      const uint8_t* low = raw + n / 4 * 64 + n % 2 * 32;
      const uint8_t* high = raw + 128 + n / 4 * 32;
      for (size_t i = 0; i < 32; ++i) {
        const uint32_t four = low[i] >> n % 4 / 2 * 4 & 15, two = high[i] >> n % 4 * 2 & 3;
        codes[i] = static_cast<uint8_t>((four | two << 4) - 32);
      }
    }
  }
};

// ggml's kvalues_iq4nl.
constexpr int8_t kIq4Numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                    1,    13,   25,  38,  53,  69,  89,  113};
// 16 bytes of nibbles as 32 numbers.
HMT_INLINE void look_up(const uint8_t* raw, uint8_t* codes) {
#if defined(HMT_AVX2)
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Numbers));
  const __m128i line = _mm_loadu_si128(reinterpret_cast<const __m128i*>(raw));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(line, mask);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(line, 4), mask);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm_shuffle_epi8(table, low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16), _mm_shuffle_epi8(table, high));
#else
  for (size_t i = 0; i < 16; ++i) {
    codes[i] = static_cast<uint8_t>(kIq4Numbers[raw[i] & 15]);
    codes[16 + i] = static_cast<uint8_t>(kIq4Numbers[raw[i] >> 4]);
  }
#endif
}

struct IQ4_NL : Block<18, 32, 1, false, float> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, float* scales, float*) {
    scales[0] = half(raw);
    look_up(raw + 2, codes);
  }
};

struct IQ4_XS : Block<136, 256, 8, false, float> {
  static HMT_INLINE void unpack(const uint8_t* raw, uint8_t* codes, float* scales, float*) {
    const float by = half(raw);
    for (size_t g = 0; g < 8; ++g) {
      const int low = raw[4 + g / 2] >> g % 2 * 4 & 15, high = raw[2 + g / 4] >> g % 4 * 2 & 3;
      scales[g] = by * static_cast<float>((low | high << 4) - 32);
      look_up(raw + 8 + 16 * g, codes + 32 * g);
    }
  }
};

}  // namespace
}  // namespace hmt::HMT_ISA
