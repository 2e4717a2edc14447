// A tile's rows against pages of codes (int8, int4), read where they lie.  Only for *.isa.cpp.
//
// A query is rounded to 15 bits, weights with the scales of their values to 16 (to 15 and a sign
// where scales have signs, in int4); both are cut into two rows of bytes, and products and their
// sums are exact.  Rounding to 8 bits would be twice as fast, but would cost more accuracy than the
// pages' own codes.
#pragma once

#include "attention/code_products.h"
#include "attention/workspace.h"

#if defined(HMT_AVX512)

namespace hmt::HMT_ISA {

// Sums of a row of so many codes of int8 fit into 32 bits.
constexpr size_t kMostInt8Dim = 1024;

// Sixteen numbers of a row from `i` on, zeros beyond its end.
HMT_INLINE F16v some_numbers(const float* row, size_t i, size_t dim) {
  const size_t some = dim - i < 16 ? dim - i : 16;
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << some) - 1), row + i)};
}

// What a row is divided by before it is rounded to whole numbers up to 16383 in size.  A power of
// two where the row has 16 bits a number: then those of bf16 that are not 64 times smaller than the
// greatest one stay as they are.
inline float query_step(const float* row, size_t dim, bool halves) {
  F16v sizes = zero(), nothing = zero();  // which turns NaN if a number is not finite
  for (size_t i = 0; i < dim; i += 16) {
    const F16v numbers = some_numbers(row, i, dim);
    sizes = max(abs(numbers), sizes);
    nothing = fma(numbers, zero(), nothing);
  }
  const float most = greatest(sizes), bad = sum(nothing);
  const uint32_t exponent = to_bits(most) & 0x7f800000u;
  if (!halves || exponent < (20u << 23)) return most / 16383.0f + bad;
  return from_bits(exponent - (13u << 23)) + bad;
}

HMT_INLINE void store_bytes(void* out, __m512i words) {
  const __m128i bytes = _mm512_cvtepi32_epi8(words);
  std::memcpy(out, &bytes, sizeof bytes);
}

// Cuts the rows, and lays the words of a pass side by side, as CodeQuery says.
template <typename Codes>
void load_code_query(const Tile& tile, const Work& work) {
  const size_t dim = tile.pages->layout.key_dim, each = Codes::group(dim);
  const size_t groups = (dim + each - 1) / each;
  const float cap = tile.options->softcap;
  const float scale = cap != 0.0f ? tile.options->scale / cap : tile.options->scale;
  float* row = work.query_row;
  for (size_t r = 0; r < tile.rows; ++r) {
    widen_row(query_row(tile, r), static_cast<int>(tile.query->type), dim, row);
    const float step = query_step(row, dim, tile.query->type != DType::kF32);
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    const F16v factor = set1(inverse <= 1e38f ? inverse : 0.0f);
    work.query_factors[r] = step * scale;
    const size_t first = r / kCodeRows * kCodeRows;
    const size_t rows = tile.rows - first < kCodeRows ? tile.rows - first : kCodeRows;
    uint32_t* words = work.query + first * dim / 2 + 2 * (r - first);
    int32_t* starts = work.query_starts + first * groups + (r - first);
    for (size_t begin = 0; begin < dim; starts += rows) {
      const size_t end = dim - begin < each ? dim : begin + each;
      __m512i total = _mm512_setzero_si512();
      for (; begin < end; begin += 16) {
        const F16v scaled = mul(some_numbers(row, begin, dim), factor);
        // In this order, NaN becomes a bound.
        const I16v codes = to_int(min(max(scaled, set1(-16383.0f)), set1(16383.0f)));
        total = _mm512_add_epi32(total, codes.v);
        uint32_t upper[4], lower[4];
        store_bytes(upper, _mm512_srai_epi32(codes.v, 7));
        store_bytes(lower, _mm512_and_si512(codes.v, _mm512_set1_epi32(127)));
        for (size_t i = 0; i < 4 && begin + 4 * i < dim; ++i, words += 2 * rows) {
          words[0] = upper[i];
          words[1] = lower[i];
        }
      }
      *starts = -Codes::kKeyZero * _mm512_reduce_add_epi32(total);
    }
  }
}

// Scores of one row and a block become weights; the row's sums and total follow a greater top.
inline void weigh_row(const Tile& tile, const Partial& partial, const Work& work, size_t r,
                      size_t base, size_t pages) {
  const size_t width = padded_width(tile.pages->layout), tokens = pages * kPageTokens;
  const float cap = tile.options->softcap;
  float* scores = work.scores + r * kCodeTokens;
  for (size_t i = 0; cap != 0.0f && i < tokens; i += 16) {
    store(scores + i, mul(tanh_of(load(scores + i)), set1(cap)));
  }
  const size_t first = work.first[r] > base ? work.first[r] - base : 0;
  const size_t after = work.after[r] > base ? work.after[r] - base : 0;
  for (size_t i = 0; (first > 0 || after < tokens) && i < tokens; i += 16) {
    const size_t from = first > i ? first - i : 0, to = after > i ? after - i : 0;
    store(scores + i, keep_lanes(load(scores + i), from < 16 ? from : 16, to < 16 ? to : 16));
  }
  F16v most = load(scores);
  for (size_t i = 16; i < tokens; i += 16) most = max(most, load(scores + i));
  const float before = partial.tops[r], top = reference_of(greatest(most), before);
  F16v total = load(work.totals + 16 * r);
  if (top != before) {
    partial.tops[r] = top;
    if (before != kNone) {
      const float factor = weight_of(before - top);
      total = mul(total, set1(factor));
      multiply_row(partial.sums + r * width, width, factor);
    }
  }
  const F16v reference = set1(top == kNone ? 0.0f : top);
  for (size_t i = 0; i < tokens; i += 16) {
    const F16v weights = weight_of(sub(load(scores + i), reference));
    store(scores + i, weights);
    total = add(total, weights);
  }
  store(work.totals + 16 * r, total);
  for (size_t i = tokens; i < kCodeTokens; i += 16) store(scores + i, zero());
}

// Scales of tokens that are not there may be anything.
HMT_INLINE F16v scaled_weights(F16v weights, F16v scales) {
  const __mmask16 seen = _mm512_cmp_ps_mask(weights.v, _mm512_setzero_ps(), _CMP_GT_OQ);
  return {_mm512_maskz_mul_ps(seen, weights.v, scales.v)};
}

// What four pages' words of one row of bytes are stored as: page p has words 4 p to 4 p + 3, where
// packing leaves word w of it at 4 w + p.
HMT_INLINE void store_packed(uint8_t* out, __m512i packed) {
  const __m512i order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, packed));
}

// weights [128] f32, multiplied with their scales, become whole numbers without sign, the greatest
// 65535.
HMT_INLINE void round_weights(const CodeBlock& block, Int8Codes, const float* weights,
                              const float*, uint8_t* bytes, float* scale, int32_t* start) {
  F16v scaled[kCodePages];
  F16v most = zero();
#pragma GCC unroll 8
  for (size_t page = 0; page < kCodePages; ++page) {
    scaled[page] = zero();
    if (page >= block.count) continue;
    const F16v scales = Int8Codes::scales(block.value_scales[page], 0);
    scaled[page] = scaled_weights(load(weights + 16 * page), scales);
    most = max(most, scaled[page]);
  }
  const float top = greatest(most);
  const F16v inverse = set1(top > 1e-33f ? 65535.0f / top : 0.0f);
  *scale = top / 65535.0f;
  *start = 0;
  const __m512i low = _mm512_set1_epi16(255);
#pragma GCC unroll 2
  for (size_t page = 0; page < kCodePages; page += 4) {
    __m512i codes[4];
    for (size_t i = 0; i < 4; ++i) codes[i] = to_int(mul(scaled[page + i], inverse)).v;
    const __m512i one = _mm512_packus_epi32(codes[0], codes[1]);
    const __m512i two = _mm512_packus_epi32(codes[2], codes[3]);
    store_packed(bytes + 16 * page,
                 _mm512_packus_epi16(_mm512_srli_epi16(one, 8), _mm512_srli_epi16(two, 8)));
    store_packed(bytes + kCodeTokens + 16 * page,
                 _mm512_packus_epi16(_mm512_and_si512(one, low), _mm512_and_si512(two, low)));
  }
}

// The same with signs, the greatest 16383 in size; and what 8 times their sum takes away again.
HMT_INLINE void round_weights(const CodeBlock&, Int4Codes, const float* weights,
                              const float* scales, uint8_t* bytes, float* scale, int32_t* start) {
  constexpr int kGreaterSize = 11;
  F16v scaled[kCodePages];
  F16v most = zero();
#pragma GCC unroll 8
  for (size_t page = 0; page < kCodePages; ++page) {
    scaled[page] = mul(load(weights + 16 * page), load(scales + 16 * page));
    most.v = _mm512_range_ps(most.v, scaled[page].v, kGreaterSize);
  }
  const float top = greatest(most);
  const F16v inverse = set1(top > 1e-33f ? 16383.0f / top : 0.0f);
  *scale = top / 16383.0f;
  const __m512i low = _mm512_set1_epi16(127), ones = _mm512_set1_epi16(1);
  __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (size_t page = 0; page < kCodePages; page += 4) {
    __m512i codes[4];
    for (size_t i = 0; i < 4; ++i) codes[i] = to_int(mul(scaled[page + i], inverse)).v;
    const __m512i one = _mm512_packs_epi32(codes[0], codes[1]);
    const __m512i two = _mm512_packs_epi32(codes[2], codes[3]);
    sum = _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(sum, one, ones), two, ones);
    store_packed(bytes + 16 * page,
                 _mm512_packs_epi16(_mm512_srai_epi16(one, 7), _mm512_srai_epi16(two, 7)));
    store_packed(bytes + kCodeTokens + 16 * page,
                 _mm512_packs_epi16(_mm512_and_si512(one, low), _mm512_and_si512(two, low)));
  }
  *start = -Int4Codes::kKeyZero * _mm512_reduce_add_epi32(sum);
}

// scales [groups, 128]: those of a block's values, zeros for pages before `first` and from token
// `seen` on, where memory may hold anything.
inline void spread_value_scales(const CodeBlock& block, Int4Codes, size_t groups, size_t first,
                                size_t seen, float* scales) {
  for (size_t group = 0; group < groups; ++group, scales += kCodeTokens) {
    for (size_t page = 0; page < kCodePages; ++page) {
      const size_t some = page >= first && seen > 16 * page ? seen - 16 * page : 0;
      const auto there = static_cast<__mmask16>(some >= 16 ? 0xffffu : (1u << some) - 1);
      F16v numbers = zero();
      if (some > 0) numbers = Int4Codes::scales(block.value_scales[page], group);
      store(scales + 16 * page, {_mm512_maskz_mov_ps(there, numbers.v)});
    }
  }
}
inline void spread_value_scales(const CodeBlock&, Int8Codes, size_t, size_t, size_t, float*) {}

// Values of a latent layer, out of its keys, in int8: [4, width, 4 tokens].
inline void turn_int8_keys(const uint8_t* keys, size_t value_dim, uint8_t* rows) {
  const __m512i columns_of_four = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  for (size_t column = 0; column < value_dim; column += 16, keys += 256) {
    // Quarter q of a line: four columns of tokens 4 q .. 4 q + 3, by token and then by column.
    __m512i r[4];
    for (size_t i = 0; i < 4; ++i) {
      const size_t first = column + 4 * i;
      const __m512i line = first < value_dim ? _mm512_loadu_si512(keys + 64 * i)
                                             : _mm512_setzero_si512();
      r[i] = _mm512_shuffle_epi8(line, columns_of_four);
    }
    const __m512i a = _mm512_shuffle_i32x4(r[0], r[1], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(r[2], r[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(r[0], r[1], 0xee);
    const __m512i d = _mm512_shuffle_i32x4(r[2], r[3], 0xee);
    const __m512i turned[4] = {
        _mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd),
        _mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd)};
    const size_t some = value_dim - column < 16 ? value_dim - column : 16;
    const auto there = static_cast<__mmask16>((1u << some) - 1);
    for (size_t q = 0; q < 4; ++q) {
      _mm512_mask_storeu_epi32(rows + (q * value_dim + column) * 4, there, turned[q]);
    }
  }
}

// Where a head's parts begin in a page.
struct HeadPlaces {
  HeadPlaces(const PageLayout& layout, size_t head)
      : keys(layout.key_at(head)),
        values(layout.value_at(head)),
        key_scales(layout.key_scales_at(head)),
        value_scales(layout.latent ? key_scales : layout.value_scales_at(head)),
        key_bytes(layout.key_bytes()),
        key_scale_bytes(layout.scale_bytes(layout.key_dim)),
        value_scale_bytes(layout.latent ? 0 : layout.scale_bytes(layout.value_dim)) {}
  size_t keys, values, key_scales, value_scales;
  size_t key_bytes, key_scale_bytes, value_scale_bytes;
};

HMT_INLINE void fetch_bytes(const uint8_t* begin, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) fetch(begin + i);
}

HMT_INLINE void fetch_scales(const HeadPlaces& places, const uint8_t* page) {
  fetch_bytes(page + places.key_scales, places.key_scale_bytes);
  fetch_bytes(page + places.value_scales, places.value_scale_bytes);
}

// The pages `own` of a head.  Meanwhile: their values while their keys are scored, the keys of what
// comes next while values are mixed, and its scales here.
inline CodeBlock code_block(const OneHead& one, const BlockPages& own) {
  const Tile& tile = one.tile;
  const Work& work = one.work;
  const PageLayout& layout = tile.pages->layout;
  const Ahead ahead = one.ahead(own.block, kCodePages);
  const HeadPlaces places(layout, tile.kv_head), next_places(layout, ahead.head);
  CodeBlock block;
  block.count = own.count;
  for (size_t i = 0; i < own.count; ++i) {
    const uint8_t* page = page_at(tile, own.page(i));
    const uint8_t* next = page_at(tile, ahead.page(i));
    block.keys[i] = page + places.keys;
    block.key_scales[i] = page + places.key_scales;
    block.value_scales[i] = page + places.value_scales;
    block.ahead_of_values[i] = next + next_places.keys;
    if (ahead.has(i)) fetch_scales(next_places, next);
    if (layout.latent) {
      uint8_t* turned = work.values + i * kPageTokens * layout.value_dim;
      turn_int8_keys(block.keys[i], layout.value_dim, turned);
      block.values[i] = turned;
      block.ahead_of_keys[i] = block.ahead_of_values[i];
    } else {
      block.values[i] = block.ahead_of_keys[i] = page + places.values;
    }
  }
  return block;
}

// Part `r` of `rows` of what is fetched while weights are made: one core reads a fifth more where
// memory is not idle meanwhile.
HMT_INLINE void fetch_between(const CodeBlock& block, size_t r, size_t rows, size_t bytes) {
  for (size_t i = r * 64; i < bytes; i += rows * 64) {
    fetch(block.ahead_of_keys[block.count - 1] + i);
    fetch(block.ahead_of_values[0] + i);
  }
}

// The block of pages from `page` on against the rows of a head.
template <typename Codes>
void attend_block(const OneHead& one, size_t page) {
  const Tile& tile = one.tile;
  const Work& work = one.work;
  const PageLayout& layout = tile.pages->layout;
  const HeadPlaces places(layout, tile.kv_head);
  const size_t width = padded_width(layout), each = Codes::group(layout.value_dim);
  const size_t groups = (layout.value_dim + each - 1) / each;
  auto* bytes = reinterpret_cast<uint8_t*>(work.weights);
  const CodeQuery query{work.query, work.query_starts, work.query_factors};
  const CodeWeights weights{bytes, work.weight_scales, work.weight_starts, groups};
  const BlockPages own(tile, page, kCodePages);
  const CodeBlock block = code_block(one, own);
  score_codes<Codes>(query, tile.rows, layout.key_dim, block, work.scores);
  const size_t seen = tile.end - page * kPageTokens;
  spread_value_scales(block, Codes(), groups, own.first, seen, work.value_scales);
  for (size_t r = 0; r < tile.rows; ++r) {
    fetch_between(block, r, tile.rows, places.key_bytes);
    weigh_row(tile, one.partial, work, r, page * kPageTokens, own.count);
    for (size_t group = 0; group < groups; ++group) {
      const size_t at = r * groups + group;
      round_weights(block, Codes(), work.scores + r * kCodeTokens,
                    work.value_scales + group * kCodeTokens, bytes + at * 2 * kCodeTokens,
                    work.weight_scales + at, work.weight_starts + at);
    }
  }
  mix_codes<Codes>(weights, tile.rows, block, layout.value_dim, width, one.partial.sums);
}

// begin_rows() has been called.
template <typename Codes>
void attend_codes(const Tile& tile, const Partial& partial, bool prepared, const Work& work) {
  const HeadPlaces places(tile.pages->layout, tile.kv_head);
  const size_t begin = tile.begin / kPageTokens;
  for (size_t i = begin; !prepared && i * kPageTokens < tile.end && i < begin + kCodePages; ++i) {
    fetch_bytes(page_at(tile, i) + places.keys, places.key_bytes);
    fetch_scales(places, page_at(tile, i));
  }
  for (size_t h = 0; h < tile.heads && !prepared; ++h) {
    const OneHead one(tile, partial, work, h);
    load_code_query<Codes>(one.tile, one.work);
  }
  for (size_t base = tile.begin / kCodeTokens * kCodeTokens; base < tile.end; base += kCodeTokens) {
    for (size_t h = 0; h < tile.heads; ++h) {
      attend_block<Codes>(OneHead(tile, partial, work, h), base / kPageTokens);
    }
  }
}

}  // namespace hmt::HMT_ISA

#endif
