// Codes and many tokens, and tiles of bf16: sixteen tokens in lanes.  `arrange` lays a block of 16
// tokens out in lines of 64 bytes: 4 bytes of each token, two columns in bf16 or int16, four in int8.
// The same columns of a row of weights are one 32-bit number, broadcast to all lanes; so a line is
// also a row of the B tile that AMX multiplies with.  Only for rows.isa.cpp.
//
// A range of rows is multiplied a block of columns at a time: its weights are copied, brought to
// the type they are multiplied in, so that they lie densely (rows that are a multiple of 4 KiB
// apart would push each other out of L1) and end in zeros.
#pragma once

#include "linear/kernels.h"
#include "linear/rows_decode.h"

namespace hmt::HMT_ISA {
namespace {

constexpr size_t kLine = 64;
// Lines of one block of columns: long enough that loading and storing sums costs little, short
// enough that those of three blocks of tokens and eight rows stay in L2 (128: 2% slower; 512: 4%).
constexpr size_t kBlockLines = 256;
// A row of copied weights: 4 bytes for each line, and 64 so that rows lie in different sets.
constexpr size_t kRowBytes = 4 * kBlockLines + 64;

// Four bytes of sixteen rows each, side by side: out[16 * i + r] = rows[r][i] for i < 16.
HMT_INLINE void transpose_16(const uint32_t* const* rows, uint32_t* out) {
#if defined(HMT_AVX512)
  __m512i a[16], b[16];
  HMT_UNROLL
  for (size_t i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i]);
  HMT_UNROLL
  for (size_t i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  HMT_UNROLL
  for (size_t i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 g + k], lane l of 128 bits: column 4 l + k of rows 4 g .. 4 g + 3.
  HMT_UNROLL
  for (size_t k = 0; k < 4; ++k) {
    const __m512i even_low = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
    _mm512_storeu_si512(out + 16 * k, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    _mm512_storeu_si512(out + 16 * (k + 4), _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_si512(out + 16 * (k + 8), _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    _mm512_storeu_si512(out + 16 * (k + 12), _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
#else
  for (size_t r = 0; r < 16; ++r) {
    const auto* row = reinterpret_cast<const uint8_t*>(rows[r]);
    for (size_t i = 0; i < 16; ++i) std::memcpy(out + 16 * i + r, row + 4 * i, 4);
  }
#endif
}

// How the columns of a weight fall into segments of one scale, each in whole lines.
struct Cut {
  size_t columns, width, segments;
  size_t per_line;       // columns
  size_t segment_lines;  // of each but the last
  size_t lines;

  size_t lines_of(size_t count) const {
    return (count + round_ - 1) / round_ * (round_ / per_line);
  }
  size_t begin(size_t segment) const { return segment * width; }
  size_t count(size_t segment) const {
    return columns - begin(segment) < width ? columns - begin(segment) : width;
  }

  // `round_lines`: a segment's lines are a multiple of this
  Cut(const Weight& w, size_t columns_per_line, size_t round_lines)
      : columns(w.columns), width(segment_width(w)), segments((w.columns + width - 1) / width),
        per_line(columns_per_line), round_(columns_per_line * round_lines) {
    segment_lines = lines_of(width);
    lines = (segments - 1) * segment_lines + lines_of(count(segments - 1));
  }

 private:
  size_t round_;
};

// Lines of one segment that are multiplied in one go.
struct Piece {
  size_t segment;
  size_t column, count;
  size_t line, lines;  // `line` counts from the beginning of the token block
  bool starts, ends;   // its segment
};

// The pieces of one block of columns: part of a segment, or several whole ones.
struct Pieces {
  Piece piece[kBlockLines];
  size_t count = 0;
  size_t lines = 0;

  // Continues at `line` of `segment`, and moves both on.
  void fill(const Cut& cut, size_t& segment, size_t& line) {
    count = lines = 0;
    while (segment < cut.segments && lines < kBlockLines) {
      const size_t all = cut.lines_of(cut.count(segment)), left = all - line;
      if (count > 0 && left > kBlockLines - lines) return;
      const size_t here = left < kBlockLines ? left : kBlockLines;
      const size_t column = line * cut.per_line, room = here * cut.per_line;
      const size_t columns_left = cut.count(segment) > column ? cut.count(segment) - column : 0;
      const size_t columns = room < columns_left ? room : columns_left;
      piece[count++] = {segment, cut.begin(segment) + column, columns,
                        segment * cut.segment_lines + line, here, line == 0, here == left};
      lines += here;
      line += here;
      if (here == left) {
        ++segment;
        line = 0;
      }
    }
  }
};

// What codes are multiplied in.  A Math says: Sum, 16 sums; kPerLine, columns in 4 bytes;
// kRoundLines; Line, Four (the broadcast four bytes); `step`; `pack`, which brings a run of a row's
// codes to 4-byte units; `unit`, what it divides them by; `tokens`, where the activations lie.
#if defined(HMT_AMX)
struct PairMath {
  using Sum = F16v;
  static float unit(Code) { return 1.0f; }
  static constexpr size_t kPerLine = 2;
  static constexpr size_t kRoundLines = 16;
  static constexpr bool kInteger = false, kOffset = false;
  using Line = __m512i;
  static HMT_INLINE Line line(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static HMT_INLINE __m512i four(const uint8_t* p) {
    int32_t value;
    std::memcpy(&value, p, sizeof value);
    return _mm512_set1_epi32(value);
  }
  static HMT_INLINE F16v step(F16v sum, Line x, __m512i w) {
    return dot2_bf16(sum, x, w);
  }
  // All codes but f16 and f32 are exact in bf16.
  static void pack(Code code, const uint8_t* codes, size_t count, uint8_t* out) {
    if (code == Code::kBF16) {
      std::memcpy(out, codes, 2 * count);
      return;
    }
    if (code == Code::kFp8) return pack_e4m3(codes, count, out);
    with_code(code, [&](auto is) {
      each_16<is.value>(codes, count, [&](F16v numbers, size_t i, size_t n) {
        const __m256i pairs = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(numbers.v));
        const auto some = static_cast<__mmask16>((1u << n) - 1);
        _mm256_mask_storeu_epi16(out + 2 * i, some, pairs);
      });
    });
  }
  static void pack_e4m3(const uint8_t* codes, size_t count, uint8_t* out) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (size_t i = 0; i < count; i += 64) {
      const uint64_t some = count - i < 64 ? (uint64_t{1} << (count - i)) - 1 : ~uint64_t{0};
      __m512i low, high;
      e4m3_as_bf16(_mm512_maskz_loadu_epi8(some, codes + i), low, high);
      _mm512_mask_storeu_epi16(out + 2 * i, static_cast<__mmask32>(some),
                               _mm512_permutex2var_epi64(low, first, high));
      _mm512_mask_storeu_epi16(out + 2 * i + 64, static_cast<__mmask32>(some >> 32),
                               _mm512_permutex2var_epi64(low, second, high));
    }
  }
  static const uint16_t* tokens(const Inputs& in) { return in.bf16; }
};
#endif

#if defined(HMT_AVX512)
// int8 times int8.  VPDPBUSD takes one side unsigned: weights plus 128; sums begin with -128 times
// the sum of the token's codes (kOffset).  AMX multiplies signed bytes.
struct CodeMath {
  using Sum = I16v;
  static float unit(Code) { return 1.0f; }
  static constexpr size_t kPerLine = 4;
#if defined(HMT_AMX)
  static constexpr size_t kRoundLines = 16;
  static constexpr bool kOffset = false;
#else
  static constexpr size_t kRoundLines = 1;
  static constexpr bool kOffset = true;
#endif
  static constexpr bool kInteger = true;
  using Line = __m512i;
  static HMT_INLINE Line line(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static HMT_INLINE __m512i four(const uint8_t* p) {
    int32_t value;
    std::memcpy(&value, p, sizeof value);
    return _mm512_set1_epi32(value);
  }
  static HMT_INLINE I16v step(I16v sum, Line x, __m512i w) {
    return {_mm512_dpbusd_epi32(sum.v, w, x)};
  }
  static void pack(Code, const uint8_t* codes, size_t count, uint8_t* out) {
    if (!kOffset) {
      std::memcpy(out, codes, count);
      return;
    }
    for (size_t i = 0; i < count; i += 64) {
      const size_t left = count - i;
      const __mmask64 here = left < 64 ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
      const __m512i some = _mm512_maskz_loadu_epi8(here, codes + i);
      _mm512_mask_storeu_epi8(out + i, here, _mm512_xor_si512(some, _mm512_set1_epi8(-128)));
    }
  }
  static const int8_t* tokens(const Inputs& in) { return in.codes; }
};
#else
// int8 times int8 through 16 bits, which never saturates.
struct CodeMath {
  using Sum = I16v;
  static float unit(Code) { return 1.0f; }
  static constexpr size_t kPerLine = 2, kRoundLines = 1;
  static constexpr bool kInteger = true, kOffset = false;
#if defined(HMT_AVX2)
  using Line = I16v;
  static HMT_INLINE Line line(const uint8_t* p) {
    return load(reinterpret_cast<const int32_t*>(p));
  }
  static HMT_INLINE __m256i four(const uint8_t* p) {
    int32_t value;
    std::memcpy(&value, p, sizeof value);
    return _mm256_set1_epi32(value);
  }
  static HMT_INLINE I16v step(I16v sum, Line x, __m256i w) {
    return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(x.lo, w)),
            _mm256_add_epi32(sum.hi, _mm256_madd_epi16(x.hi, w))};
  }
#else
  struct Line { int16_t v[32]; };
  struct Two { int16_t v[2]; };
  static HMT_INLINE Line line(const uint8_t* p) {
    Line out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
  }
  static HMT_INLINE Two four(const uint8_t* p) {
    Two out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
  }
  static HMT_INLINE I16v step(I16v sum, const Line& x, Two w) {
    for (size_t i = 0; i < 16; ++i) sum.v[i] += x.v[2 * i] * w.v[0] + x.v[2 * i + 1] * w.v[1];
    return sum;
  }
#endif
  static void pack(Code, const uint8_t* codes, size_t count, uint8_t* out) {
    for (size_t i = 0; i < count; ++i) {
      const int16_t wide = static_cast<int8_t>(codes[i]);
      std::memcpy(out + 2 * i, &wide, sizeof wide);
    }
  }
  static const int8_t* tokens(const Inputs& in) { return in.codes; }
};
#endif

}  // namespace
}  // namespace hmt::HMT_ISA
