// Numbers, columns in lanes: four rows at a time, so that weights stream through once and each piece of
// a token serves four rows.  Whatever the number of tokens, so that each one's sums have the same order.
// Only for rows.isa.cpp.
#pragma once

#include <type_traits>

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
constexpr size_t kManyTokens = 6;  // where each piece of a row serves many, so that time is registers'
#else
constexpr size_t kFewTokens = 2;
constexpr size_t kManyTokens = 1;
#endif
// Many tokens: so many at a time, against so many columns, that what a pass reads stays in L1, and
// sums between passes in L2.
constexpr size_t kTokensTogether = 96, kColumnsTogether = 1024;

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

  // The same rows, where they were copied to: [count, bytes].
  void lie_at(const uint8_t* copies, size_t bytes) {
    for (size_t r = 0; r < kFewRows; ++r) begin[r] = copies + (r < count ? r : count - 1) * bytes;
    row_bytes_ = bytes;
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

// Weights of any code times f32 activations.  Where tokens are many, rows are brought to kPacked first,
// in which they lie densely: rows a multiple of 4 KiB apart would push each other out of L1.
template <Code kCode>
struct WidenedColumns {
  using Packed = WidenedColumns<Code::kF32>;
  static void pack(const uint8_t* codes, size_t count, uint8_t* out) {
    each_16<kCode>(codes, count, [&](F16v numbers, size_t i, size_t n) {
      float lanes[16];
      store(lanes, numbers);
      std::memcpy(out + 4 * i, lanes, 4 * n);
    });
  }
  using Activation = float;
  using Weights = F16v;
  using Numbers = F16v;
  static constexpr size_t kColumns = 16, kBytes = bytes_of(kCode);
  static float unit(const Weight& w) { return unit_of(w.code); }
  static const float* tokens(const Inputs& in) { return in.f32; }
  static HMT_INLINE Weights weights(const uint8_t* p) { return load_codes<kCode>(p); }
  static HMT_INLINE Numbers numbers(const float* p) { return load(p); }
  static HMT_INLINE F16v step(F16v sum, Weights w, Numbers x) { return fma(w, x, sum); }
};

#if defined(HMT_AVX512_BF16)
// bf16 weights times bf16 activations, two columns in a lane.
struct PairedColumns {
  using Packed = PairedColumns;
  static void pack(const uint8_t* codes, size_t count, uint8_t* out) {
    std::memcpy(out, codes, 2 * count);
  }
  using Activation = uint16_t;
  using Weights = __m512i;
  using Numbers = __m512i;
  static constexpr size_t kColumns = 32, kBytes = 2;
  static float unit(const Weight&) { return 1.0f; }
  static const uint16_t* tokens(const Inputs& in) { return in.bf16; }
  static HMT_INLINE Weights weights(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static HMT_INLINE Numbers numbers(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static HMT_INLINE F16v step(F16v sum, Weights w, Numbers x) {
    return dot2_bf16(sum, w, x);
  }
};

// e4m3 weights times bf16 activations; columns in the order that e4m3_as_bf16 leaves them in.
struct PairedE4M3Columns {
  using Packed = PairedE4M3Columns;
  static void pack(const uint8_t* codes, size_t count, uint8_t* out) {
    std::memcpy(out, codes, count);
  }
  using Activation = uint16_t;
  struct Both {
    __m512i low, high;
  };
  using Weights = Both;
  using Numbers = Both;
  static constexpr size_t kColumns = 64, kBytes = 1;
  static float unit(const Weight&) { return 1.0f; }
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

#if defined(HMT_AVX512)
// Sums of sixteen vectors' lanes, each in the order of total_of.
HMT_INLINE F16v totals_of_16(const F16v* x) {
  __m512 a[8], b[4], c[2];
  HMT_UNROLL
  for (size_t i = 0; i < 8; ++i) {
    const __m512 first = x[2 * i].v, second = x[2 * i + 1].v;
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x44),
                         _mm512_shuffle_f32x4(first, second, 0xee));
  }
  HMT_UNROLL
  for (size_t i = 0; i < 4; ++i) {
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
  }
  // Quarter q of b[i] is of vector 4 i + q.
  HMT_UNROLL
  for (size_t i = 0; i < 2; ++i) {
    const __m512d first = _mm512_castps_pd(b[2 * i]), second = _mm512_castps_pd(b[2 * i + 1]);
    c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
  }
  const __m512 mixed = _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88),
                                     _mm512_shuffle_ps(c[0], c[1], 0xdd));
  // Lane 4 q + i is of vector 4 i + q.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return {_mm512_permutexvar_ps(order, mixed)};
}
#endif

// out[i] = total_of(x[i]); sixteen together where there are so many.
HMT_INLINE void totals_of(const F16v* x, size_t count, float* out) {
  size_t i = 0;
#if defined(HMT_AVX512)
  for (; i + 16 <= count; i += 16) store(out + i, totals_of_16(x + i));
  if (count - i >= 4) {
    F16v some[16];
    float lanes[16];
    for (size_t k = 0; k < 16; ++k) some[k] = i + k < count ? x[i + k] : zero();
    store(lanes, totals_of_16(some));
    std::memcpy(out + i, lanes, (count - i) * sizeof(float));
    return;
  }
#endif
  for (; i < count; ++i) out[i] = total_of(x[i]);
}

// Columns of a pass: whole segments, or lines of 64 bytes of the only one.
struct Pass {
  size_t begin, end;
  float* kept;       // [kFewRows, tokens, 16]: lanes between passes
  size_t origin = 0;  // the column that rows begin with
};

// The lanes of a pass, in registers and between passes.
template <size_t kTokens>
HMT_INLINE void take_lanes(const Pass& pass, F16v (*lanes)[kTokens]) {
  HMT_UNROLL
  for (size_t r = 0; r < kFewRows; ++r) {
    HMT_UNROLL
    for (size_t t = 0; t < kTokens; ++t) {
      lanes[r][t] = pass.begin == 0 ? zero() : load(pass.kept + (r * kTokens + t) * 16);
    }
  }
}
template <size_t kTokens>
HMT_INLINE void keep_lanes(const Pass& pass, const F16v (*lanes)[kTokens]) {
  HMT_UNROLL
  for (size_t r = 0; r < kFewRows; ++r) {
    HMT_UNROLL
    for (size_t t = 0; t < kTokens; ++t) store(pass.kept + (r * kTokens + t) * 16, lanes[r][t]);
  }
}

// Adds columns [begin, begin + count) of four rows, from a segment's beginning on or within it.
template <typename Columns, size_t kTokens>
HMT_INLINE void sum_columns(const Inputs& in, size_t token, const FourRows& four, const Pass& pass,
                            size_t begin, size_t count, F16v (*sums)[kTokens]) {
  const size_t offset = (begin - pass.origin) * Columns::kBytes;
  const uint8_t* rows[kFewRows];
  const typename Columns::Activation* tokens[kTokens];
  for (size_t r = 0; r < kFewRows; ++r) rows[r] = four.begin[r] + offset;
  for (size_t t = 0; t < kTokens; ++t) {
    tokens[t] = Columns::tokens(in) + (token + t) * in.stride + begin;
  }
  sum_rows<Columns, kTokens>(four, offset, rows, tokens, count, sums);
}

template <size_t kTokens>
HMT_INLINE void add_segment(const FourRows& four, size_t segment, float unit,
                            const F16v (*sums)[kTokens], F16v (*totals)[kTokens]) {
  HMT_UNROLL
  for (size_t r = 0; r < kFewRows; ++r) {
    const F16v scale = set1(four.scales[r][segment] * unit);
    HMT_UNROLL
    for (size_t t = 0; t < kTokens; ++t) totals[r][t] = fma(sums[r][t], scale, totals[r][t]);
  }
}

template <size_t kTokens>
HMT_INLINE void no_lanes(F16v (*lanes)[kTokens]) {
  HMT_UNROLL
  for (size_t r = 0; r < kFewRows; ++r) {
    HMT_UNROLL
    for (size_t t = 0; t < kTokens; ++t) lanes[r][t] = zero();
  }
}

// out[t * out_stride + r] for kTokens tokens from `token` on, in the last pass.
template <typename Columns, size_t kTokens>
HMT_KERNEL void few_numbers(const Weight& w, const Inputs& in, size_t token, const FourRows& four,
                            const Pass& pass, float* out, size_t out_stride) {
  const size_t width = segment_width(w), segments = (w.columns + width - 1) / width;
  const float unit = Columns::unit(w);
  F16v totals[kFewRows][kTokens];
  if (segments == 1) {
    F16v sums[kFewRows][kTokens];
    take_lanes<kTokens>(pass, sums);
    sum_columns<Columns, kTokens>(in, token, four, pass, pass.begin, pass.end - pass.begin, sums);
    if (pass.end < w.columns) return keep_lanes<kTokens>(pass, sums);
    no_lanes<kTokens>(totals);
    add_segment<kTokens>(four, 0, unit, sums, totals);
  } else {
    take_lanes<kTokens>(pass, totals);
    for (size_t begin = pass.begin; begin < pass.end; begin += width) {
      const size_t left = pass.end - begin;
      F16v sums[kFewRows][kTokens];
      no_lanes<kTokens>(sums);
      sum_columns<Columns, kTokens>(in, token, four, pass, begin, left < width ? left : width,
                                    sums);
      add_segment<kTokens>(four, begin / width, unit, sums, totals);
    }
    if (pass.end < w.columns) return keep_lanes<kTokens>(pass, totals);
  }
  float results[kFewRows * kTokens];
  totals_of(totals[0], kFewRows * kTokens, results);
  for (size_t t = 0; t < kTokens; ++t) {
    for (size_t r = 0; r < four.count; ++r) {
      float total = results[r * kTokens + t];
      if (four.minima[r] != nullptr) {
        total += minima_product(four.minima[r], four.sums + (token + t) * segments, segments);
      }
      out[t * out_stride + r] = total;
    }
  }
}

// Calls call(Columns()) with how the numbers of a weight meet activations.
template <typename Call>
HMT_INLINE void with_columns(const Weight& w, const Inputs& in, Call call) {
#if defined(HMT_AVX512_BF16)
  if (w.code == Code::kBF16 && in.bf16 != nullptr) return call(PairedColumns());
  if (w.code == Code::kFp8 && in.bf16 != nullptr) return call(PairedE4M3Columns());
#endif
  (void)in;
  with_code(w.code, [&](auto code) { call(WidenedColumns<code.value>()); });
}

// Calls call(tokens as a compile-time number), up to kManyTokens.
template <typename Call>
HMT_INLINE void by_tokens(size_t tokens, const Call& call) {
  if (tokens >= kManyTokens) return call(std::integral_constant<size_t, kManyTokens>());
#if defined(HMT_AVX512)
  switch (tokens) {
    case 5: return call(std::integral_constant<size_t, 5>());
    case 4: return call(std::integral_constant<size_t, 4>());
    case 3: return call(std::integral_constant<size_t, 3>());
    case 2: return call(std::integral_constant<size_t, 2>());
    default: return call(std::integral_constant<size_t, 1>());
  }
#endif
}

// Memory of many_numbers: rows that are brought to the form they are multiplied in, and lanes.
struct ManyMemory {
  static constexpr size_t kRowBytes = kColumnsTogether * sizeof(float) + 64;
  uint8_t* rows;  // [rows, kRowBytes]
  float* kept;    // [rows, kTokensTogether, 16]
};

// Tokens [first, end), some columns after the other.
template <typename Columns>
void many_numbers(const Weight& w, const Inputs& in, size_t first, size_t end, size_t first_row,
                  size_t end_row, const float* sums, const ManyMemory& memory, float* out,
                  size_t out_stride) {
  using Packed = typename Columns::Packed;
  const size_t width = segment_width(w), row_bytes = ManyMemory::kRowBytes;
  size_t most = kColumnsTogether * sizeof(float) / sizeof(typename Columns::Activation);
  if (width < w.columns) most = most < width ? width : most / width * width;
  const bool packs = most * Packed::kBytes <= row_bytes;
  const auto multiply_as = [&](auto columns, size_t t, const FourRows& four, size_t row,
                               Pass pass) {
    using Lying = decltype(columns);
    float* target = out + t * out_stride + (row - first_row);
    pass.kept += ((row - first_row) * kTokensTogether + (t - first) * kFewRows) * 16;
    const auto some = [&](auto count) {
      constexpr size_t kTokens = decltype(count)::value;
      few_numbers<Lying, kTokens>(w, in, t, four, pass, target, out_stride);
    };
    by_tokens(end - t, some);
  };
  for (size_t begin = 0; begin < w.columns; begin += most) {
    const size_t left = w.columns - begin, count = left < most ? left : most;
    const Pass pass{begin, begin + count, memory.kept, packs ? begin : 0};
    for (size_t row = first_row; packs && row < end_row; ++row) {
      Columns::pack(address_of(w, row, begin), count, memory.rows + (row - first_row) * row_bytes);
    }
    const auto multiply = [&](size_t t, size_t row) {
      FourRows four(w, row, end_row, sums);
      if (!packs) return multiply_as(Columns(), t, four, row, pass);
      four.lie_at(memory.rows + (row - first_row) * row_bytes, row_bytes);
      multiply_as(Packed(), t, four, row, pass);
    };
    // What stays in L1 meanwhile is whichever is more; the other one streams out of L2.
    if (kManyTokens > kFewRows) {
      for (size_t t = first; t < end; t += kManyTokens) {
        for (size_t row = first_row; row < end_row; row += kFewRows) multiply(t, row);
      }
    } else {
      for (size_t row = first_row; row < end_row; row += kFewRows) {
        for (size_t t = first; t < end; t += kManyTokens) multiply(t, row);
      }
    }
  }
}

}  // namespace
}  // namespace hmt::HMT_ISA
