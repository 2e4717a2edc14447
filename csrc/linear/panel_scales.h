// Scales, minima and codebooks of weights in panels, sixteen rows at a time.  Only for *.isa.cpp.
#pragma once

#include "base/isa.h"
#include "linear/kernels.h"
#include "simd/vec.h"

namespace hmt::HMT_ISA {

// What a nibble stands for, and what its integer code needs to become unsigned.
enum class Nibble {
  kOffset,  // nibble - 8
  kZero,    // nibble - zero of the group
  kMinimum, // nibble, and the group has a minimum
  kFp4,     // e2m1; the integer codes are its numbers doubled
};

inline Nibble nibble_of(const Weight& w) {
  if (w.code == Code::kFp4) return Nibble::kFp4;
  if (w.minima != nullptr) return Nibble::kMinimum;
  return w.zeros != nullptr ? Nibble::kZero : Nibble::kOffset;
}

// Twice the numbers of e2m1.
constexpr int8_t kDoubledE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int32_t kFp4Offset = 12;  // makes them unsigned

// Times the number that a scale is stored as gives the scale of integer codes.
inline float code_factor(const Weight& w) {
  return w.code == Code::kFp4 ? w.factor * 0.5f : w.factor;
}

inline size_t groups_of(const Weight& w) { return w.columns / w.tile_columns; }

// From one panel to the next: in groups, and in bytes of codes.
inline size_t panel_columns(const Weight& w) {
  return w.panel_columns != 0 ? w.panel_columns : w.columns;
}
inline size_t panel_groups(const Weight& w) { return panel_columns(w) / w.tile_columns; }
inline size_t panel_bytes(const Weight& w) { return panel_columns(w) * (kPanelRows / 2); }

// Asks for codes that come some blocks of 32 columns later.  An AMD processor's own prefetching
// keeps up with one token (96% of the rate of reading without this, 87% with it), not with several,
// which compute longer than it looks ahead: at four tokens 43% became 56%.  An Intel processor's
// stops at the end of a page of 4 KiB, so it falls behind with one token, too: 16 Sapphire Rapids
// cores went from 93 to 119 GB/s, one from 9.2 to 12.6.
constexpr size_t kBytesAhead = 4096;

// Such a processor also reads two panels at once for one token, each half as far ahead: two Xeon
// cores decode a Llama of 1.1 billion weights at 38.7 tokens/s instead of 34.8, eight cores of an
// older one read 76 GB/s instead of 70.
constexpr size_t kBytesAheadInPairs = 2048;

// Whether to ask, for a tile of the call's first tokens; later ones find codes in a cache.
inline bool asks_ahead(size_t tokens, bool first) {
  return first && (tokens > 1 || !reads_far_ahead());
}

HMT_INLINE void prefetch_after(const uint8_t* block, size_t ahead = kBytesAhead) {
  // As a number, since it may lie beyond the array.
  const auto address = reinterpret_cast<uintptr_t>(block) + ahead;
  for (size_t line = 0; line < 256; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + line));
  }
}

// e4m3fn: sign, 4 bits of exponent biased by 7, 3 of mantissa, no infinity, NaN codes read as 480.
HMT_INLINE F16v load_e4m3(const uint8_t* p) {
#if defined(HMT_AVX512)
  // As f16 it is 2^-8 of itself, denormals included.
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(words, 7),
                                        _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f))};
#else
  // Mantissa times a power of two, so that no denormal f32 occurs (a process may flush them).
  float out[16];
  for (size_t i = 0; i < 16; ++i) {
    const uint32_t exponent = (p[i] >> 3) & 15u;
    const uint32_t normal = exponent != 0;
    const auto mantissa = static_cast<int32_t>((p[i] & 7u) + 8u * normal);
    const uint32_t sign = static_cast<uint32_t>(p[i] & 128u) << 24;
    out[i] = static_cast<float>(mantissa) * from_bits(sign | (exponent + 118u - normal) << 23);
  }
  return load(out);
#endif
}

// e8m0: 2^(code - 127).
HMT_INLINE F16v load_e8m0(const uint8_t* p) {
#if defined(HMT_AVX512)
  const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __mmask16 smallest = _mm512_testn_epi32_mask(codes, codes);
  return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_slli_epi32(codes, 23), smallest,
                                                    _mm512_set1_epi32(0x00400000)))};
#else
  float out[16];
  for (size_t i = 0; i < 16; ++i) {
    out[i] = from_bits(p[i] == 0 ? 0x00400000u : uint32_t{p[i]} << 23);
  }
  return load(out);
#endif
}

// The sixteen numbers of a panel's group, at `index` groups of an array in the type of the scales.
HMT_INLINE F16v group_numbers(Scales type, const void* array, size_t index) {
  const auto* bytes = static_cast<const uint8_t*>(array);
  const auto* halves = static_cast<const uint16_t*>(array);
  switch (type) {
    case Scales::kBF16:
      return load_bf16(halves + index * kPanelRows);
    case Scales::kF16:
      return load_f16(halves + index * kPanelRows);
    case Scales::kF32:
      return load(static_cast<const float*>(array) + index * kPanelRows);
    case Scales::kE4M3:
      return load_e4m3(bytes + index * kPanelRows);
    case Scales::kE8M0:
      return load_e8m0(bytes + index * kPanelRows);
    default:
      return set1(1.0f);
  }
}

HMT_INLINE I16v group_zeros(const uint8_t* zeros, size_t index) {
#if defined(HMT_AVX512)
  return {_mm512_cvtepu8_epi32(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + index * kPanelRows)))};
#else
  int32_t wide[16];
  for (size_t i = 0; i < 16; ++i) wide[i] = zeros[index * kPanelRows + i];
  return load(wide);
#endif
}

// Scales of integer codes, and minima where there are any, of some groups of a panel.  Read a few
// groups at a time: inside the loop over groups, each scale type would need a loop of its own.
constexpr size_t kGroupsAhead = 16;
struct GroupNumbers {
  alignas(64) float scales[kGroupsAhead][16];
  alignas(64) float minima[kGroupsAhead][16];
};

template <typename Load>
HMT_INLINE void read_with(Load load_one, F16v factor, size_t count, float (*numbers)[16]) {
  for (size_t i = 0; i < count; ++i) store(numbers[i], mul(load_one(i), factor));
}

inline void read_numbers(Scales type, const void* array, float factor, size_t first, size_t count,
                         float (*numbers)[16]) {
  const F16v times = set1(factor);
  switch (type) {
    case Scales::kBF16:
      return read_with([&](size_t i) { return group_numbers(Scales::kBF16, array, first + i); },
                       times, count, numbers);
    case Scales::kF16:
      return read_with([&](size_t i) { return group_numbers(Scales::kF16, array, first + i); },
                       times, count, numbers);
    case Scales::kF32:
      return read_with([&](size_t i) { return group_numbers(Scales::kF32, array, first + i); },
                       times, count, numbers);
    case Scales::kE4M3:
      return read_with([&](size_t i) { return group_numbers(Scales::kE4M3, array, first + i); },
                       times, count, numbers);
    case Scales::kE8M0:
      return read_with([&](size_t i) { return group_numbers(Scales::kE8M0, array, first + i); },
                       times, count, numbers);
    default:
      return read_with([](size_t) { return set1(1.0f); }, times, count, numbers);
  }
}

__attribute__((noinline)) inline void read_groups(const Weight& w, float factor, size_t first,
                                                  size_t count, GroupNumbers& numbers) {
  read_numbers(w.scale_type, w.scales, factor, first, count, numbers.scales);
  if (w.minima != nullptr) {
    read_numbers(w.scale_type, w.minima, 1.0f, first, count, numbers.minima);
  }
}

}  // namespace hmt::HMT_ISA
