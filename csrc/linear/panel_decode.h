// Panels as numbers.  Only for panels.isa.cpp.
#pragma once

#include "linear/panel_scales.h"

namespace hmt::HMT_ISA {

// The codes of a row in a block of 32 columns, before zero points; those of e2m1 doubled.
HMT_INLINE void block_codes(const uint8_t* block, size_t row, const int8_t (&book)[16],
                            int8_t (&codes)[32]) {
  uint8_t pairs[16];
  for (size_t quad = 0; quad < 4; ++quad) {
    std::memcpy(pairs + 4 * quad, block + quad * 64 + row * 4, 4);
  }
#if defined(HMT_AVX2)
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(book));
  const __m128i line = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(line, mask));
  const __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(line, 4), mask));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), low);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16), high);
#else
  for (size_t i = 0; i < 16; ++i) {
    codes[i] = book[pairs[i] & 15];
    codes[16 + i] = book[pairs[i] >> 4];
  }
#endif
}

// Sixteen columns of one group: code * scale, plus the minimum where there is one.
HMT_INLINE void decode_columns(const int8_t* codes, int32_t zero_point, float scale,
                               const float* minimum, float* out) {
  int32_t wide[16];
  for (size_t i = 0; i < 16; ++i) wide[i] = codes[i];
  F16v number = mul(to_float(sub(load(wide), set1(zero_point))), set1(scale));
  if (minimum != nullptr) number = add(number, set1(*minimum));
  store(out, number);
}

inline void decode_row(const Weight& w, size_t row, const int8_t (&book)[16], float* out) {
  const size_t groups = groups_of(w), panel = row / kPanelRows, lane = row % kPanelRows;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
  GroupNumbers numbers;
  int8_t codes[32];
  for (size_t begin = 0; begin < groups; begin += kGroupsAhead) {
    const size_t end = begin + kGroupsAhead < groups ? begin + kGroupsAhead : groups;
    read_groups(w, code_factor(w), panel * panel_groups(w) + begin, end - begin, numbers);
    for (size_t c = begin * w.tile_columns; c < end * w.tile_columns; c += 16) {
      if (c % kPanelBlock == 0) block_codes(data + c / kPanelBlock * 256, lane, book, codes);
      const size_t group = c / w.tile_columns, slot = group - begin;
      const int32_t zero_point =
          w.zeros == nullptr ? 0 : w.zeros[(panel * panel_groups(w) + group) * kPanelRows + lane];
      decode_columns(codes + c % kPanelBlock, zero_point, numbers.scales[slot][lane],
                     w.minima == nullptr ? nullptr : &numbers.minima[slot][lane], out + c);
    }
  }
}

inline void decode_panels(const Weight& w, size_t first, size_t count, float* out) {
  const Nibble nibble = nibble_of(w);
  int8_t book[16];
  for (int8_t i = 0; i < 16; ++i) {
    if (nibble == Nibble::kFp4) book[i] = kDoubledE2M1[i];
    else book[i] = nibble == Nibble::kOffset ? static_cast<int8_t>(i - 8) : i;
  }
  Weight plain = w;
  if (nibble != Nibble::kZero) plain.zeros = nullptr;
  for (size_t r = 0; r < count; ++r) decode_row(plain, first + r, book, out + r * w.columns);
}

}  // namespace hmt::HMT_ISA
