// Panels of 4-bit codes times activations as they are.  Only for panels_float.isa.cpp.
//
// Rows lie in lanes, as in panels_int8.h.  Codes become f32, or bf16 where x is bf16 and the
// machine multiplies pairs of bf16; both hold them exactly.  A group's scale is applied to its sum.
#pragma once

#include "linear/panel_scales.h"
#include "linear/panels_int8.h"

namespace hmt::HMT_ISA {

// The numbers of nibbles before scales; with zero points, minus 8: `sums` hold what that misses.
template <Nibble kNibble>
constexpr float nibble_number(int32_t nibble) {
  if (kNibble == Nibble::kFp4) return kDoubledE2M1[nibble];
  return static_cast<float>(kNibble == Nibble::kMinimum ? nibble : nibble - 8);
}

template <Nibble kNibble>
struct Codebook {
  alignas(64) float f32[16];
  alignas(64) uint16_t bf16[32];  // twice, since a fifth bit of the index belongs to a neighbour
  Codebook() {
    for (int32_t i = 0; i < 32; ++i) {
      bf16[i] = float_to_bf16(nibble_number<kNibble>(i % 16));
      f32[i % 16] = nibble_number<kNibble>(i % 16);
    }
  }
};

// How x is laid out for `multiply`, for each token: `columns` bf16 and a pad, where x is bf16 and
// the machine multiplies it, then a float per group, the sum of its x, where codes need that.
struct FloatLayout {
  size_t pairs_bytes, sums_bytes;

  FloatLayout(const Weight& w, bool bf16) : pairs_bytes(0), sums_bytes(0) {
    const Nibble nibble = nibble_of(w);
#if defined(HMT_AVX512_BF16)
    // The pad keeps rows from falling into the same set of the L1 cache.
    if (bf16) pairs_bytes = w.columns * sizeof(uint16_t) + 64;
#else
    (void)bf16;
#endif
    if (nibble == Nibble::kZero || nibble == Nibble::kMinimum) {
      sums_bytes = groups_of(w) * sizeof(float);
    }
  }
  size_t bytes() const { return pairs_bytes + sums_bytes; }
};

// Swaps the middle two of each four columns: of a line's 16-bit words, the even bytes hold columns
// 0 and 2 and the odd ones 1 and 3.
inline void swap_middles(const uint16_t* x, size_t count, uint16_t* out) {
  for (size_t i = 0; i < count; i += 4) {
    out[i] = x[i];
    out[i + 1] = x[i + 2];
    out[i + 2] = x[i + 1];
    out[i + 3] = x[i + 3];
  }
}

inline void arrange_float(const Weight& w, const Inputs& in, size_t block, uint8_t* arranged) {
  const FloatLayout layout(w, in.bf16 != nullptr);
  for (size_t i = 0; i < kTokenBlock && block * kTokenBlock + i < in.tokens; ++i) {
    const size_t token = block * kTokenBlock + i;
    uint8_t* mine = arranged + i * layout.bytes();
    if (layout.pairs_bytes != 0) {
      swap_middles(in.bf16 + token * in.stride, w.columns, reinterpret_cast<uint16_t*>(mine));
    }
    if (layout.sums_bytes == 0) continue;
    for (size_t group = 0; group < groups_of(w); ++group) {
      const float* x = in.f32 + token * in.stride + group * w.tile_columns;
      F16v total = load(x);
      for (size_t c = 16; c < w.tile_columns; c += 16) total = add(total, load(x + c));
      const float number = sum(total);
      std::memcpy(mine + layout.pairs_bytes + group * sizeof(float), &number, sizeof number);
    }
  }
}

#if defined(HMT_AVX512)
template <Nibble kNibble>
HMT_INLINE F16v column(Line line, int shift, const Codebook<kNibble>& book) {
  const __m512i index = _mm512_srli_epi32(line.v, static_cast<unsigned>(shift));
  return {_mm512_permutexvar_ps(index, _mm512_load_ps(book.f32))};
}
#elif defined(HMT_AVX2)
template <Nibble kNibble>
HMT_INLINE __m256 column_half(__m256i line, int shift, const Codebook<kNibble>& book) {
  const __m256i index = _mm256_srli_epi32(line, shift);
  if (kNibble == Nibble::kFp4) {  // eight magnitudes, and a sign
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(index, _mm256_set1_epi32(8)), 28);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(_mm256_load_ps(book.f32), index),
                         _mm256_castsi256_ps(sign));
  }
  const __m256i nibble = _mm256_and_si256(index, _mm256_set1_epi32(15));
  const int offset = kNibble == Nibble::kMinimum ? 0 : 8;
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(nibble, _mm256_set1_epi32(offset)));
}
template <Nibble kNibble>
HMT_INLINE F16v column(Line line, int shift, const Codebook<kNibble>& book) {
  return {column_half(line.lo, shift, book), column_half(line.hi, shift, book)};
}
#else
template <Nibble kNibble>
__attribute__((noinline)) F16v column(const Line& line, int shift, const Codebook<kNibble>& book) {
  F16v out;
  const int byte = shift / 8, high = shift % 8;
  for (int r = 0; r < 16; ++r) out.v[r] = book.f32[(line.v[4 * r + byte] >> high) & 15];
  return out;
}
#endif

// x as f32.
template <Nibble kNibble>
struct Numbers {
  using Number = float;
  Codebook<kNibble> book;

  // Adds four columns in low nibbles to `low` and four in high ones to `high`.
  template <size_t kTokens>
  HMT_INLINE void add_line(const uint8_t* codes, const float* const (&x)[kTokens], size_t begin,
                           F16v (&low)[kTokens], F16v (&high)[kTokens]) const {
    const Line line = load_line(codes);
    HMT_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      const F16v a = column(line, 8 * i, book), b = column(line, 8 * i + 4, book);
      HMT_UNROLL(8)
      for (size_t t = 0; t < kTokens; ++t) {
        const float* four = x[t] + begin + i;
        low[t] = fma(set1(four[0]), a, low[t]);
        high[t] = fma(set1(four[16]), b, high[t]);
      }
    }
  }
};

#if defined(HMT_AVX512_BF16)
HMT_INLINE F16v dot_pairs(F16v total, __m512i codes, const uint16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return {_mm512_dpbf16_ps(total.v, reinterpret_cast<__m512bh>(codes),
                           reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)))};
}

// x as pairs of bf16, arranged by `swap_middles`.
template <Nibble kNibble>
struct Pairs {
  using Number = uint16_t;
  Codebook<kNibble> book;

  template <size_t kTokens>
  HMT_INLINE void add_line(const uint8_t* codes, const uint16_t* const (&x)[kTokens],
                           size_t begin, F16v (&low)[kTokens], F16v (&high)[kTokens]) const {
    const __m512i line = _mm512_loadu_si512(codes), table = _mm512_load_si512(book.bf16);
    const __m512i a = _mm512_permutexvar_epi16(line, table);
    const __m512i b = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 8), table);
    const __m512i c = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4), table);
    const __m512i d = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 12), table);
    HMT_UNROLL(8)
    for (size_t t = 0; t < kTokens; ++t) {
      const uint16_t* four = x[t] + begin;
      low[t] = dot_pairs(dot_pairs(low[t], a, four), b, four + 2);
      high[t] = dot_pairs(dot_pairs(high[t], c, four + 16), d, four + 18);
    }
  }
};
#endif

template <Nibble kNibble, typename Products, size_t kTokens>
struct FloatTile {
  using Number = typename Products::Number;
  const Weight& w;
  const Products& products;
  size_t panel;
  bool asks;  // for codes ahead of time
  const Number* x[kTokens];
  const float* sums[kTokens];
  float totals[kTokens][16];

  HMT_INLINE void end_group(size_t group, const GroupNumbers& numbers,
                            const F16v (&dots)[kTokens]) {
    const size_t slot = group % kGroupsAhead;
    const F16v scale = load(numbers.scales[slot]);
    F16v missing = zero();
    if (kNibble == Nibble::kZero) {
      missing = sub(set1(8.0f), to_float(group_zeros(w.zeros, panel * panel_groups(w) + group)));
    }
    for (size_t t = 0; t < kTokens; ++t) {
      F16v dot = dots[t];
      if (kNibble == Nibble::kZero) dot = fma(set1(sums[t][group]), missing, dot);
      F16v total = fma(dot, scale, load(totals[t]));
      if (kNibble == Nibble::kMinimum) {
        total = fma(set1(sums[t][group]), load(numbers.minima[slot]), total);
      }
      store(totals[t], total);
    }
  }

  HMT_INLINE void add_group(size_t group, const uint8_t* data, const GroupNumbers& numbers) {
    // A token's second sum hides the latency of the first; four do not fit into 16 registers.
    constexpr bool kOneSum = kTokens >= 4 && kTileTokens < 8;
    const size_t begin = group * w.tile_columns / kPanelBlock;
    F16v low[kTokens] = {}, high[kTokens] = {};
    for (size_t block = begin; block < begin + w.tile_columns / kPanelBlock; ++block) {
      if (asks) prefetch_after(data + block * 256);
      HMT_UNROLL(4)
      for (size_t quad = 0; quad < 4; ++quad) {
        products.add_line(data + block * 256 + quad * 64, x, block * kPanelBlock + quad * 4, low,
                          kOneSum ? low : high);
      }
    }
    for (size_t t = 0; t < kTokens && !kOneSum; ++t) low[t] = add(low[t], high[t]);
    end_group(group, numbers, low);
  }

  // Groups of 16 columns: one is in the low nibbles of a block, the next in the high ones.
  HMT_INLINE void add_half_groups(size_t group, const uint8_t* data, const GroupNumbers& numbers) {
    F16v low[kTokens] = {}, high[kTokens] = {};
    const size_t block = group / 2;
    if (asks) prefetch_after(data + block * 256);
    HMT_UNROLL(4)
    for (size_t quad = 0; quad < 4; ++quad) {
      products.add_line(data + block * 256 + quad * 64, x, block * kPanelBlock + quad * 4, low,
                        high);
    }
    end_group(group, numbers, low);
    end_group(group + 1, numbers, high);
  }

  HMT_INLINE void run() {
    GroupNumbers numbers;
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    const size_t groups = groups_of(w);
    for (size_t begin = 0; begin < groups; begin += kGroupsAhead) {
      const size_t end = begin + kGroupsAhead < groups ? begin + kGroupsAhead : groups;
      read_groups(w, code_factor(w), panel * panel_groups(w) + begin, end - begin, numbers);
      if (w.tile_columns == 16) {
        for (size_t g = begin; g < end; g += 2) add_half_groups(g, data, numbers);
      } else {
        for (size_t g = begin; g < end; ++g) add_group(g, data, numbers);
      }
    }
  }
};

HMT_INLINE const float* row_of(const Inputs& in, const FloatLayout&, size_t token, float) {
  return in.f32 + token * in.stride;
}
HMT_INLINE const uint16_t* row_of(const Inputs& in, const FloatLayout& layout, size_t token,
                                  uint16_t) {
  return reinterpret_cast<const uint16_t*>(in.arranged + token * layout.bytes());
}

// A tile of `count` tokens from `first`, times a panel; the last token stands in for missing ones.
template <Nibble kNibble, typename Products, size_t kTokens>
__attribute__((noinline)) void float_tile(const Weight& w, const Inputs& in,
                                          const Products& products, size_t first, size_t count,
                                          size_t panel, size_t rows, float* out,
                                          size_t out_stride) {
  const FloatLayout layout(w, in.bf16 != nullptr);
  FloatTile<kNibble, Products, kTokens> tile{
      w, products, panel, asks_ahead(kTokens, first == 0), {}, {}, {}};
  for (size_t t = 0; t < kTokens; ++t) {
    const size_t token = first + (t < count ? t : count - 1);
    tile.x[t] = row_of(in, layout, token, typename Products::Number{});
    tile.sums[t] = layout.sums_bytes == 0
                       ? nullptr
                       : reinterpret_cast<const float*>(in.arranged + token * layout.bytes() +
                                                        layout.pairs_bytes);
  }
  tile.run();
  const size_t width = (rows < kPanelRows ? rows : kPanelRows) * sizeof(float);
  for (size_t t = 0; t < count; ++t) {
    std::memcpy(out + (first + t) * out_stride, tile.totals[t], width);
  }
}

template <Nibble kNibble, typename Products>
void multiply_numbers(const Weight& w, const Inputs& in, size_t first_row, size_t end_row,
                      float* out, size_t out_stride) {
  const Products products{};
  for (size_t token = 0; token < in.tokens; token += kTileTokens) {
    const size_t left = in.tokens - token, count = left < kTileTokens ? left : kTileTokens;
    for (size_t row = first_row; row < end_row; row += kPanelRows) {
      constexpr size_t kMost = kTileTokens;
      auto* tile = float_tile<kNibble, Products, kMost>;
      if (count == 1) tile = float_tile<kNibble, Products, 1>;
      else if (count == 2) tile = float_tile<kNibble, Products, 2>;
      else if (count <= 4 && kMost > 4) tile = float_tile<kNibble, Products, kMost / 2>;
      tile(w, in, products, token, count, row / kPanelRows, end_row - row, out + row - first_row,
           out_stride);
    }
  }
}

template <Nibble kNibble>
void multiply_float_as(const Weight& w, const Inputs& in, size_t first_row, size_t end_row,
                       float* out, size_t out_stride) {
#if defined(HMT_AVX512_BF16)
  if (in.bf16 != nullptr) {
    return multiply_numbers<kNibble, Pairs<kNibble>>(w, in, first_row, end_row, out, out_stride);
  }
#endif
  multiply_numbers<kNibble, Numbers<kNibble>>(w, in, first_row, end_row, out, out_stride);
}

inline void multiply_float(const Weight& w, const Inputs& in, size_t first_row, size_t end_row,
                           float* out, size_t out_stride) {
  switch (nibble_of(w)) {
    case Nibble::kOffset:
      return multiply_float_as<Nibble::kOffset>(w, in, first_row, end_row, out, out_stride);
    case Nibble::kZero:
      return multiply_float_as<Nibble::kZero>(w, in, first_row, end_row, out, out_stride);
    case Nibble::kMinimum:
      return multiply_float_as<Nibble::kMinimum>(w, in, first_row, end_row, out, out_stride);
    case Nibble::kFp4:
      return multiply_float_as<Nibble::kFp4>(w, in, first_row, end_row, out, out_stride);
  }
}

}  // namespace hmt::HMT_ISA
