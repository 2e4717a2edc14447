// A tile's rows against pages of codes (int8, int4) that are read where they lie.  Only for
// *.isa.cpp.
//
// A query is rounded to 15 bits, weights with the scales of their values to 16 (to 15 and a sign
// where scales have signs, in int4); both are cut into two rows of bytes, and products and their
// sums are exact.  Rounding to 8 bits would be twice as fast, but would cost more accuracy than the
// pages' own codes.
#pragma once

#include "attention/code_products.h"
#include "attention/work.h"

#if defined(HMT_AVX512)

namespace hmt::HMT_ISA {

// Sums of a row of so many codes of int8 fit into 32 bits.
constexpr size_t kMostInt8Dim = 1024;

// What a row is divided by before it is rounded to whole numbers up to 16383 in size.  A power of
// two where the row has 16 bits a number: then those of bf16 that are not 64 times smaller than the
// greatest one stay as they are.
inline float query_step(const float* row, size_t dim, bool halves) {
  float most = 0.0f, nothing = 0.0f;  // which turns NaN if a number is not finite
  for (size_t i = 0; i < dim; ++i) {
    const float size = row[i] < 0.0f ? -row[i] : row[i];
    most = size > most ? size : most;
    nothing += row[i] * 0.0f;
  }
  const uint32_t exponent = to_bits(most) & 0x7f800000u;
  if (!halves || exponent < (20u << 23)) return most / 16383.0f + nothing;
  return from_bits(exponent - (13u << 23)) + nothing;
}

// upper * 128 + lower is the row in steps of 1 / inverse.
inline void split_query(const float* row, size_t dim, float inverse, int8_t* upper,
                        int8_t* lower) {
  for (size_t begin = 0; begin < dim; begin += 16) {
    const size_t count = dim - begin < 16 ? dim - begin : 16;
    float numbers[16] = {};
    int32_t codes[16];
    std::memcpy(numbers, row + begin, count * sizeof(float));
    const F16v scaled = mul(load(numbers), set1(inverse));
    // In this order, NaN becomes a bound.
    store(codes, to_int(min(max(scaled, set1(-16383.0f)), set1(16383.0f))));
    for (size_t i = 0; i < count; ++i) {
      upper[begin + i] = static_cast<int8_t>(codes[i] >> 7);
      lower[begin + i] = static_cast<int8_t>(codes[i] & 127);
    }
  }
}

// Where byte i of a row's codes is in the order in which lines are read: in a word of int4, numbers
// 0 to 3 and 4 to 7 are in different lines, which come one after the other.  So in their own order.
template <typename Codes>
void load_code_query(const Tile& tile, const Work& work) {
  const size_t dim = tile.pages->layout.key_dim, each = Codes::group(dim);
  const size_t groups = (dim + each - 1) / each;
  const float cap = tile.options->softcap;
  const float scale = cap != 0.0f ? tile.options->scale / cap : tile.options->scale;
  float* row = work.query_row;
  auto* upper = reinterpret_cast<int8_t*>(row + dim);
  int8_t* lower = upper + dim;
  for (size_t r = 0; r < tile.rows; ++r) {
    widen_row(query_row(tile, r), static_cast<int>(tile.query->type), dim, row);
    const float step = query_step(row, dim, tile.query->type != DType::kF32);
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    work.query_factors[r] = step * scale;
    split_query(row, dim, inverse <= 1e38f ? inverse : 0.0f, upper, lower);
    const size_t first = r / kCodeRows * kCodeRows;
    const size_t rows = tile.rows - first < kCodeRows ? tile.rows - first : kCodeRows;
    uint32_t* words = work.query + first * dim / 2 + 2 * (r - first);
    for (size_t i = 0; i < dim; i += 4, words += 2 * rows) {
      std::memcpy(words, upper + i, 4);
      std::memcpy(words + 1, lower + i, 4);
    }
    int32_t* starts = work.query_starts + first * groups + (r - first);
    for (size_t group = 0; group < groups; ++group, starts += rows) {
      int32_t total = 0;
      for (size_t i = group * each; i < dim && i < (group + 1) * each; ++i) {
        total += 128 * upper[i] + lower[i];
      }
      *starts = -Codes::kKeyZero * total;
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
  const float greatest_score = greatest(most), before = partial.tops[r];
  const float top = greatest_score > before ? greatest_score : before;
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
}

// Scales of tokens that are not there may be anything.
HMT_INLINE F16v scaled_weights(F16v weights, F16v scales) {
  const __mmask16 seen = _mm512_cmp_ps_mask(weights.v, _mm512_setzero_ps(), _CMP_GT_OQ);
  return {_mm512_maskz_mul_ps(seen, weights.v, scales.v)};
}

HMT_INLINE void store_bytes(uint8_t* out, __m512i words) {
  const __m128i bytes = _mm512_cvtepi32_epi8(words);
  std::memcpy(out, &bytes, sizeof bytes);
}

// weights [128] f32 become whole numbers without sign, the greatest 65535.
HMT_INLINE void round_weights(const CodeBlock& block, Int8Codes, float* weights, size_t,
                              uint8_t* bytes, float* scale, int32_t* start) {
  F16v most = zero();
  for (size_t page = 0; page < block.count; ++page) {
    const F16v scales = Int8Codes::scales(block.value_scales[page], 0);
    const F16v scaled = scaled_weights(load(weights + 16 * page), scales);
    most = max(most, scaled);
    store(weights + 16 * page, scaled);
  }
  const float top = greatest(most);
  const F16v inverse = set1(top > 1e-33f ? 65535.0f / top : 0.0f);
  *scale = top / 65535.0f;
  *start = 0;
  for (size_t page = 0; page < block.count; ++page) {
    const F16v number = min(mul(load(weights + 16 * page), inverse), set1(65535.0f));
    const __m512i codes = _mm512_cvtps_epi32(number.v);
    store_bytes(bytes + 16 * page, _mm512_srli_epi32(codes, 8));
    store_bytes(bytes + kCodeTokens + 16 * page, codes);
  }
}

// The same with signs, the greatest 16383 in size; and what 8 times their sum takes away again.
HMT_INLINE void round_weights(const CodeBlock& block, Int4Codes, float* weights, size_t group,
                              uint8_t* bytes, float* scale, int32_t* start) {
  F16v scaled[kCodePages];
  F16v most = zero();
  for (size_t page = 0; page < block.count; ++page) {
    const F16v scales = Int4Codes::scales(block.value_scales[page], group);
    scaled[page] = scaled_weights(load(weights + 16 * page), scales);
    most = max(most, abs(scaled[page]));
  }
  const float top = greatest(most);
  const F16v inverse = set1(top > 1e-33f ? 16383.0f / top : 0.0f);
  *scale = top / 16383.0f;
  __m512i sum = _mm512_setzero_si512();
  for (size_t page = 0; page < block.count; ++page) {
    const F16v number = max(min(mul(scaled[page], inverse), set1(16383.0f)), set1(-16383.0f));
    const __m512i codes = _mm512_cvtps_epi32(number.v);
    sum = _mm512_add_epi32(sum, codes);
    store_bytes(bytes + 16 * page, _mm512_srai_epi32(codes, 7));
    store_bytes(bytes + kCodeTokens + 16 * page,
                _mm512_and_si512(codes, _mm512_set1_epi32(127)));
  }
  *start = -Int4Codes::kKeyZero * _mm512_reduce_add_epi32(sum);
}

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

struct PagePlaces {
  const uint8_t *keys, *values, *key_scales, *value_scales;
};

inline PagePlaces places_of(const Tile& tile, size_t number) {
  const PageLayout& layout = tile.pages->layout;
  const size_t head = tile.kv_head;
  const uint8_t* page = tile.pages->data +
                        static_cast<size_t>(tile.run->table[number]) * tile.pages->stride;
  const uint8_t* scales = page + layout.key_scales_at(head);
  return {page + layout.key_at(head), page + layout.value_at(head), scales,
          layout.latent ? scales : page + layout.value_scales_at(head)};
}

HMT_INLINE void fetch_bytes(const uint8_t* begin, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) fetch(begin + i);
}

// Pages [first, first + count).  Meanwhile: the values of the block while its keys are scored, the
// next one's keys while its values are mixed, and its scales here.
template <typename Codes>
CodeBlock code_block(const Tile& tile, size_t first, size_t count, const Work& work) {
  const PageLayout& layout = tile.pages->layout;
  const size_t last = (tile.end - 1) / kPageTokens;
  CodeBlock block;
  block.count = count;
  for (size_t i = 0; i < count; ++i) {
    const PagePlaces here = places_of(tile, first + i);
    const size_t ahead = first + kCodePages + i;
    const PagePlaces next = places_of(tile, ahead <= last ? ahead : last);
    block.keys[i] = here.keys;
    block.key_scales[i] = here.key_scales;
    block.value_scales[i] = here.value_scales;
    block.ahead_of_values[i] = next.keys;
    fetch_bytes(next.key_scales, layout.scale_bytes(layout.key_dim));
    if (layout.latent) {
      uint8_t* turned = work.values + i * kPageTokens * layout.value_dim;
      turn_int8_keys(here.keys, layout.value_dim, turned);
      block.values[i] = turned;
      block.ahead_of_keys[i] = next.keys;
    } else {
      fetch_bytes(next.value_scales, layout.scale_bytes(layout.value_dim));
      block.values[i] = block.ahead_of_keys[i] = here.values;
    }
  }
  return block;
}

// begin_rows() has been called.
template <typename Codes>
void attend_codes(const Tile& tile, const Partial& partial, const Work& work) {
  const PageLayout& layout = tile.pages->layout;
  const size_t width = padded_width(layout), each = Codes::group(layout.value_dim);
  const size_t groups = (layout.value_dim + each - 1) / each;
  const size_t end_page = (tile.end + kPageTokens - 1) / kPageTokens;
  size_t page = tile.begin / kPageTokens;
  for (size_t i = page; i < end_page && i < page + kCodePages; ++i) {
    const PagePlaces here = places_of(tile, i);
    fetch_bytes(here.keys, layout.key_bytes());
    fetch_bytes(here.key_scales, layout.scale_bytes(layout.key_dim));
    fetch_bytes(here.value_scales, layout.scale_bytes(layout.value_dim));
  }
  load_code_query<Codes>(tile, work);
  const CodeQuery query{work.query, work.query_starts, work.query_factors};
  auto* bytes = reinterpret_cast<uint8_t*>(work.weights);
  const CodeWeights weights{bytes, work.weight_scales, work.weight_starts, groups};
  for (; page < end_page; page += kCodePages) {
    const size_t count = end_page - page < kCodePages ? end_page - page : kCodePages;
    const CodeBlock block = code_block<Codes>(tile, page, count, work);
    score_codes<Codes>(query, tile.rows, layout.key_dim, block, work.scores);
    for (size_t r = 0; r < tile.rows; ++r) {
      weigh_row(tile, partial, work, r, page * kPageTokens, count);
      for (size_t group = 0; group < groups; ++group) {
        const size_t at = r * groups + group;
        round_weights(block, Codes(), work.scores + r * kCodeTokens, group,
                      bytes + at * 2 * kCodeTokens, work.weight_scales + at,
                      work.weight_starts + at);
      }
    }
    mix_codes<Codes>(weights, tile.rows, block, layout.value_dim, width, partial.sums);
  }
}

}  // namespace hmt::HMT_ISA

#endif
