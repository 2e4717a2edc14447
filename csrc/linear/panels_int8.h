// Panels of 4-bit codes times activations rounded to int8.  Only for panels.isa.cpp.
//
// Rows lie in lanes: a line of 64 bytes holds four columns of 16 rows in its low nibbles and four
// in its high ones, and each token's four codes are broadcast to all lanes.  A tile of tokens is
// multiplied with one or two panels, over all columns, so that codes are spread once per tile.
#pragma once

#include "linear/panel_scales.h"
#include "simd/words.h"

namespace hmt::HMT_ISA {

#if defined(HMT_AVX512)
struct Line { __m512i v; };

HMT_INLINE Line load_line(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
HMT_INLINE Line low_nibbles(Line a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
HMT_INLINE Line high_nibbles(Line a) { return low_nibbles({_mm512_srli_epi16(a.v, 4)}); }
HMT_INLINE Line doubled_e2m1(Line nibbles) {
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles.v)};
}
HMT_INLINE I16v dot(I16v sum, Line codes, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return {_mm512_dpbusd_epi32(sum.v, codes.v, _mm512_set1_epi32(four))};
}
HMT_INLINE I16v dot(I16v sum, Line low, Line high, const int8_t* x_low, const int8_t* x_high) {
  return dot(dot(sum, low, x_low), high, x_high);
}
#elif defined(HMT_AVX2)
struct Line { __m256i lo, hi; };

HMT_INLINE Line load_line(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
HMT_INLINE Line low_nibbles(Line a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
HMT_INLINE Line high_nibbles(Line a) {
  return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)});
}
HMT_INLINE Line doubled_e2m1(Line nibbles) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return {_mm256_shuffle_epi8(table, nibbles.lo), _mm256_shuffle_epi8(table, nibbles.hi)};
}
HMT_INLINE __m256i spread(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return _mm256_set1_epi32(four);
}
// Codes are 0..24, so pairs of products, and sums of two such pairs, stay far below 2^15.
HMT_INLINE I16v dot(I16v sum, Line codes, const int8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1), four = spread(x);
  return {
      _mm256_add_epi32(sum.lo, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.lo, four), ones)),
      _mm256_add_epi32(sum.hi, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.hi, four), ones))};
}
HMT_INLINE __m256i dot_half(__m256i sum, __m256i low, __m256i high, __m256i x, __m256i y) {
  const __m256i pairs =
      _mm256_add_epi16(_mm256_maddubs_epi16(low, x), _mm256_maddubs_epi16(high, y));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
HMT_INLINE I16v dot(I16v sum, Line low, Line high, const int8_t* x_low, const int8_t* x_high) {
  const __m256i x = spread(x_low), y = spread(x_high);
  return {dot_half(sum.lo, low.lo, high.lo, x, y), dot_half(sum.hi, low.hi, high.hi, x, y)};
}
#else
struct Line { uint8_t v[64]; };

HMT_INLINE Line load_line(const uint8_t* p) {
  Line line;
  std::memcpy(line.v, p, sizeof line.v);
  return line;
}
HMT_INLINE Line low_nibbles(Line a) {
  for (uint8_t& byte : a.v) byte &= 15;
  return a;
}
HMT_INLINE Line high_nibbles(Line a) {
  for (uint8_t& byte : a.v) byte = static_cast<uint8_t>(byte >> 4);
  return a;
}
HMT_INLINE Line doubled_e2m1(Line nibbles) {
  for (uint8_t& byte : nibbles.v) byte = static_cast<uint8_t>(kDoubledE2M1[byte] + kFp4Offset);
  return nibbles;
}
// Not inlined: a tile has many of them.
__attribute__((noinline)) inline void add_products(const Line& codes, const int8_t* x, I16v& sum) {
  for (size_t r = 0; r < 16; ++r) {
    sum.v[r] += codes.v[4 * r] * x[0] + codes.v[4 * r + 1] * x[1] + codes.v[4 * r + 2] * x[2] +
                codes.v[4 * r + 3] * x[3];
  }
}
HMT_INLINE I16v dot(I16v sum, const Line& codes, const int8_t* x) {
  add_products(codes, x, sum);
  return sum;
}
HMT_INLINE I16v dot(I16v sum, const Line& low, const Line& high, const int8_t* x_low,
                    const int8_t* x_high) {
  add_products(low, x_low, sum);
  add_products(high, x_high, sum);
  return sum;
}
#endif

// What stays the same for all tiles of a call.
struct Int8Call {
  const Weight& w;
  const Inputs& in;
  const int32_t* starts;  // [tokens, groups], see `group_starts`; with minima the bits of floats
  size_t groups, panel_groups;
  float factor;
};

// Where a sum of products with unsigned codes begins, so that it ends as that of signed ones: minus
// the offset times the sum of the token's codes in the group.  Zero points differ from row to row,
// so there it is minus the sum; with minima, the sum itself.
inline int32_t start_factor(Nibble nibble) {
  if (nibble == Nibble::kOffset) return -8;
  if (nibble == Nibble::kFp4) return -kFp4Offset;
  return nibble == Nibble::kZero ? -1 : 1;
}

// What a group's minimum is multiplied with, once for all panels: the sum of codes, times x's scale
// where it has one per group.
inline void scale_sums(const float* scales, size_t groups, int32_t* starts) {
  for (size_t g = 0; g < groups; ++g) {
    const float sum = static_cast<float>(starts[g]);
    const float scaled = scales != nullptr ? sum * scales[g] : sum;
    std::memcpy(starts + g, &scaled, sizeof scaled);
  }
}
HMT_INLINE F16v minimum_factor(const int32_t& start) {
  float factor;
  std::memcpy(&factor, &start, sizeof factor);
  return set1(factor);
}

// Of the tokens of a block: [16, groups]; rows of tokens that do not exist are left as they are.
inline void group_starts(const Weight& w, const Inputs& in, size_t block, int32_t* starts) {
  const size_t groups = groups_of(w), pieces = w.tile_columns / 16;
  const int32_t factor = start_factor(nibble_of(w));
  for (size_t i = 0; i < kTokenBlock && block * kTokenBlock + i < in.tokens; ++i) {
    const int32_t* sums = in.sums + (block * kTokenBlock + i) * (in.stride / 16);
    int32_t* mine = starts + i * groups;
    if (pieces == 1) {
      for (size_t g = 0; g < groups; ++g) mine[g] = sums[g] * factor;
    } else if (pieces == 2) {
      for (size_t g = 0; g < groups; ++g) mine[g] = (sums[2 * g] + sums[2 * g + 1]) * factor;
    } else {
      for (size_t g = 0; g < groups; ++g) {
        int32_t total = 0;
        for (size_t p = 0; p < pieces; ++p) total += sums[g * pieces + p];
        mine[g] = total * factor;
      }
    }
    if (nibble_of(w) == Nibble::kMinimum) {
      const float* scales = in.scales + (block * kTokenBlock + i) * in.scale_stride;
      scale_sums(w.scale_columns != 0 ? scales : nullptr, groups, mine);
    }
  }
}

// A tile: kTokens tokens times kPanels panels beginning with `panel`.
// kScaled: x has a scale per group, else one per token that is multiplied with last.
template <Nibble kNibble, bool kScaled, size_t kTokens, size_t kPanels>
struct Int8Tile {
  const Int8Call& call;
  const int8_t* x[kTokens];
  const int32_t* starts[kTokens];
  const float* scales[kTokens];  // kScaled: of groups
  const uint8_t* data;
  size_t panel;
  bool asks;  // for codes ahead of time
  // In registers where they fit, else in L1: one load and store for eight products.
  float totals[kTokens][kPanels][16];

  HMT_INLINE Line codes(Line nibbles) const {
    return kNibble == Nibble::kFp4 ? doubled_e2m1(nibbles) : nibbles;
  }

  HMT_INLINE void begin_group(size_t group, I16v (&sums)[kTokens][kPanels]) const {
    for (size_t p = 0; p < kPanels; ++p) {
      I16v zeros = set1(int32_t{0});
      if (kNibble == Nibble::kZero) {
        zeros = group_zeros(call.w.zeros, (panel + p) * call.panel_groups + group);
      }
      for (size_t t = 0; t < kTokens; ++t) {
        if (kNibble == Nibble::kMinimum) sums[t][p] = set1(int32_t{0});
        else if (kNibble == Nibble::kZero) sums[t][p] = mul(zeros, set1(starts[t][group]));
        else sums[t][p] = set1(starts[t][group]);
      }
    }
  }

  HMT_INLINE void end_group(size_t group, const GroupNumbers (&numbers)[kPanels],
                            const I16v (&sums)[kTokens][kPanels]) {
    const size_t slot = group % kGroupsAhead;
    for (size_t p = 0; p < kPanels; ++p) {
      const F16v scale = load(numbers[p].scales[slot]);
      for (size_t t = 0; t < kTokens; ++t) {
        const F16v factor = kScaled ? mul(scale, set1(scales[t][group])) : scale;
        F16v total = add(load(totals[t][p]), mul(to_float(sums[t][p]), factor));
        if (kNibble == Nibble::kMinimum) {
          const F16v minimum = load(numbers[p].minima[slot]);
          total = add(total, mul(minimum_factor(starts[t][group]), minimum));
        }
        store(totals[t][p], total);
      }
    }
  }

  HMT_INLINE void prefetch(size_t block) const {
    constexpr size_t kAhead = kTokens == 1 && kPanels == 2 ? kBytesAheadInPairs : kBytesAhead;
    for (size_t p = 0; p < kPanels && asks; ++p) {
      prefetch_after(data + p * panel_bytes(call.w) + block * 256, kAhead);
    }
  }

  HMT_INLINE void add_block(size_t block, I16v (&sums)[kTokens][kPanels]) const {
    prefetch(block);
    HMT_UNROLL(4)
    for (size_t quad = 0; quad < 4; ++quad) {
      Line low[kPanels], high[kPanels];
      HMT_UNROLL(2)
      for (size_t p = 0; p < kPanels; ++p) {
        const Line line = load_line(data + p * panel_bytes(call.w) + block * 256 + quad * 64);
        low[p] = codes(low_nibbles(line));
        high[p] = codes(high_nibbles(line));
      }
      HMT_UNROLL(8)
      for (size_t t = 0; t < kTokens; ++t) {
        const int8_t* four = x[t] + block * kPanelBlock + quad * 4;
        HMT_UNROLL(2)
        for (size_t p = 0; p < kPanels; ++p) {
          sums[t][p] = dot(sums[t][p], low[p], high[p], four, four + 16);
        }
      }
    }
  }

  // Groups of 16 columns: one is in the low nibbles of a block, the next in the high ones.
  HMT_INLINE void add_half_groups(size_t block, const GroupNumbers (&numbers)[kPanels]) {
    I16v even[kTokens][kPanels], odd[kTokens][kPanels];
    prefetch(block);
    begin_group(2 * block, even);
    begin_group(2 * block + 1, odd);
    HMT_UNROLL(4)
    for (size_t quad = 0; quad < 4; ++quad) {
      HMT_UNROLL(2)
      for (size_t p = 0; p < kPanels; ++p) {
        const Line line = load_line(data + p * panel_bytes(call.w) + block * 256 + quad * 64);
        const Line low = codes(low_nibbles(line)), high = codes(high_nibbles(line));
        HMT_UNROLL(8)
        for (size_t t = 0; t < kTokens; ++t) {
          const int8_t* four = x[t] + block * kPanelBlock + quad * 4;
          even[t][p] = dot(even[t][p], low, four);
          odd[t][p] = dot(odd[t][p], high, four + 16);
        }
      }
    }
    end_group(2 * block, numbers, even);
    end_group(2 * block + 1, numbers, odd);
  }

  template <size_t kGroup>  // 16, 32, or 0 for any multiple of 32
  HMT_INLINE void run() {
    GroupNumbers numbers[kPanels];
    const size_t blocks_per_group = kGroup == 32 ? 1 : call.w.tile_columns / kPanelBlock;
    for (size_t begin = 0; begin < call.groups; begin += kGroupsAhead) {
      const size_t left = call.groups - begin;
      const size_t end = begin + (left < kGroupsAhead ? left : kGroupsAhead);
      for (size_t p = 0; p < kPanels; ++p) {
        read_groups(call.w, call.factor, (panel + p) * call.panel_groups + begin, end - begin,
                    numbers[p]);
      }
      if (kGroup == 16) {
        for (size_t block = begin / 2; block < end / 2; ++block) add_half_groups(block, numbers);
        continue;
      }
      for (size_t group = begin; group < end; ++group) {
        I16v sums[kTokens][kPanels];
        begin_group(group, sums);
        for (size_t i = 0; i < blocks_per_group; ++i) add_block(group * blocks_per_group + i, sums);
        end_group(group, numbers, sums);
      }
    }
  }
};

// Tokens [first, first + count) times panels; the last token stands in for those beyond it.
template <Nibble kNibble, bool kScaled, size_t kGroup, size_t kTokens, size_t kPanels>
__attribute__((noinline)) void multiply_tile(const Int8Call& call, size_t first, size_t count,
                                             size_t panel, size_t rows, float* out,
                                             size_t out_stride) {
  const uint8_t* data = static_cast<const uint8_t*>(call.w.data) + panel * panel_bytes(call.w);
  Int8Tile<kNibble, kScaled, kTokens, kPanels> tile{
      call, {}, {}, {}, data, panel, asks_ahead(kTokens, first == 0), {}};
  for (size_t t = 0; t < kTokens; ++t) {
    const size_t token = first + (t < count ? t : count - 1);
    tile.x[t] = call.in.codes + token * call.in.stride;
    tile.starts[t] = call.starts + token * call.groups;
    tile.scales[t] = call.in.scales + token * call.in.scale_stride;
  }
  tile.template run<kGroup>();
  for (size_t t = 0; t < count; ++t) {
    const F16v scale = set1(tile.scales[t][0]);
    float* target = out + (first + t) * out_stride;
    for (size_t p = 0; p < kPanels && rows > p * kPanelRows; ++p) {
      const F16v total = load(tile.totals[t][p]);
      const F16v result = kScaled ? total : mul(total, scale);
      if (rows >= (p + 1) * kPanelRows) {
        store(target + p * kPanelRows, result);
      } else {
        float lanes[16];
        store(lanes, result);
        std::memcpy(target + p * kPanelRows, lanes, (rows - p * kPanelRows) * sizeof(float));
      }
    }
  }
}

// The largest tile that the registers hold.  Groups of 16 keep two sums for each token and panel.
#if defined(HMT_AVX512)
constexpr size_t kTileTokens = 8, kTilePanels = 2;
#elif defined(HMT_AVX2)
constexpr size_t kTileTokens = 4, kTilePanels = 1;
#else
constexpr size_t kTileTokens = 2, kTilePanels = 1;
#endif

// One tile of up to kTileTokens tokens, as few registers as `count` needs; `panels` is 1 or 2.
template <Nibble kNibble, bool kScaled, size_t kGroup>
void multiply_panels(const Int8Call& call, size_t first, size_t count, size_t panel,
                     size_t panels, size_t rows, float* out, size_t stride) {
  constexpr size_t kMost = kTileTokens, kWide = kGroup == 16 ? 1 : kTilePanels;
  if (kWide == 2 && panels == 2 && count > 6) {
    return multiply_tile<kNibble, kScaled, kGroup, kMost, kWide>(call, first, count, panel, rows,
                                                                 out, stride);
  }
  if (kWide == 2 && panels == 2 && count == 1 && !reads_far_ahead()) {
    return multiply_tile<kNibble, kScaled, kGroup, 1, kWide>(call, first, count, panel, rows, out,
                                                             stride);
  }
  for (size_t p = 0; p < panels; ++p) {
    auto* tile = multiply_tile<kNibble, kScaled, kGroup, kMost, 1>;
    if (count == 1) tile = multiply_tile<kNibble, kScaled, kGroup, 1, 1>;
    else if (count == 2) tile = multiply_tile<kNibble, kScaled, kGroup, 2, 1>;
    else if (count <= 4 && kMost > 4) tile = multiply_tile<kNibble, kScaled, kGroup, kMost / 2, 1>;
    else if (count <= 6 && kMost > 6)
      tile = multiply_tile<kNibble, kScaled, kGroup, kMost / 4 * 3, 1>;
    tile(call, first, count, panel + p, rows - p * kPanelRows, out + p * kPanelRows, stride);
  }
}

template <Nibble kNibble, bool kScaled, size_t kGroup>
void multiply_codes(const Int8Call& call, size_t first_row, size_t end_row, float* out,
                    size_t out_stride) {
  for (size_t token = 0; token < call.in.tokens; token += kTileTokens) {
    const size_t left = call.in.tokens - token;
    const size_t count = left < kTileTokens ? left : kTileTokens;
    for (size_t row = first_row; row < end_row; row += 2 * kPanelRows) {
      const size_t rows = end_row - row;
      const size_t panels = rows > kPanelRows ? 2 : 1;
      multiply_panels<kNibble, kScaled, kGroup>(call, token, count, row / kPanelRows, panels, rows,
                                                out + row - first_row, out_stride);
    }
  }
}

template <Nibble kNibble>
void multiply_groups(const Int8Call& call, size_t first_row, size_t end_row, float* out,
                     size_t out_stride) {
  if (call.w.scale_columns != 0) {
    multiply_codes<kNibble, true, 32>(call, first_row, end_row, out, out_stride);
  } else if (call.w.tile_columns == 16) {
    multiply_codes<kNibble, false, 16>(call, first_row, end_row, out, out_stride);
  } else if (call.w.tile_columns == 32) {
    multiply_codes<kNibble, false, 32>(call, first_row, end_row, out, out_stride);
  } else {
    multiply_codes<kNibble, false, 0>(call, first_row, end_row, out, out_stride);
  }
}

inline void multiply_int8(const Int8Call& call, Nibble nibble, size_t first_row,
                              size_t end_row, float* out, size_t out_stride) {
  switch (nibble) {
    case Nibble::kOffset:
      return multiply_groups<Nibble::kOffset>(call, first_row, end_row, out, out_stride);
    case Nibble::kZero:
      return multiply_groups<Nibble::kZero>(call, first_row, end_row, out, out_stride);
    case Nibble::kMinimum:
      return multiply_groups<Nibble::kMinimum>(call, first_row, end_row, out, out_stride);
    case Nibble::kFp4:
      return multiply_groups<Nibble::kFp4>(call, first_row, end_row, out, out_stride);
  }
}

}  // namespace hmt::HMT_ISA
