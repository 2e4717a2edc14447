// In which form products read a tile's numbers: FloatPages, where everything is spread to f32, and
// Bf16Pages, where pages are read where they lie.  Codes have codes.h.  Only for *.isa.cpp.
//
// A form says where keys and values are taken from, and has four steps of a block:
//     load_query, once for the tile
//     score     products of queries and keys
//     scores    16 of them, of a row and a page, in f32
//     weights   keeps the weights of a row for `mix`
//     mix       adds the block's weighted values to the sums
#pragma once

#include "attention/kernels.h"
#include "attention/lanes.h"
#include "attention/products.h"
#include "attention/decode_pages.h"
#include "attention/workspace.h"

namespace hmt::HMT_ISA {

// What forms share whose words are multiplied to f32.
template <typename WordsOfForm>
struct FloatProducts {
  using Words = WordsOfForm;
  static constexpr size_t kNumbers = Words::kNumbers;
  static constexpr bool kHidesTokens = true;  // a weight of 0 times what is not a number

  static void score(const Tile& tile, const Block& block, const Work& work) {
    const size_t lines = tile.pages->layout.key_dim / kNumbers;
    hmt::HMT_ISA::score<Words>(work.query, tile.rows, lines, block, work.scores);
  }
  HMT_INLINE static F16v scores(const Block&, const Work& work, size_t r, size_t page) {
    return load(work.scores + r * kBlockTokens + page * kPageTokens);
  }
  HMT_INLINE static void weights(const Block&, const Work& work, size_t r, const F16v* weights) {
    uint32_t* words = work.weights + r * kBlockTokens / kNumbers;
    for (size_t page = 0; page < kBlockPages; ++page) {
      Words::store_weights(words, page, weights[page]);
    }
  }
  static void mix(const Tile& tile, const Block& block, const Work& work, float* sums) {
    const size_t width = padded_width(tile.pages->layout);
    hmt::HMT_ISA::mix<Words>(work.weights, tile.rows, block, width, sums);
  }
};

struct FloatPages : FloatProducts<FloatWords> {
  static bool keys_in_place(const PageLayout& layout) {
    return layout.encoding == PageEncoding::kF32;
  }
  static bool values_in_place(const PageLayout& layout) {
    return keys_in_place(layout) && !layout.latent && layout.value_dim % 16 == 0;
  }
  static void load_query(const Tile& tile, const Work& work) {
    const size_t dim = tile.pages->layout.key_dim;
    for (size_t r = 0; r < tile.rows; ++r) {
      widen_row(query_row(tile, r), static_cast<int>(tile.query->type), dim,
                reinterpret_cast<float*>(work.query) + r * dim);
    }
  }
  static void spread_all_values(const PageLayout& layout, const uint8_t* page, size_t head,
                                float* rows) {
    using E = PageEncoding;
    const size_t width = padded_width(layout);
    switch (layout.encoding) {
      case E::kF32: return spread_values<E::kF32>(layout, page, head, width, rows);
      case E::kBF16: return spread_values<E::kBF16>(layout, page, head, width, rows);
      case E::kF16: return spread_values<E::kF16>(layout, page, head, width, rows);
      case E::kInt8: return spread_values<E::kInt8>(layout, page, head, width, rows);
      case E::kInt4: return spread_values<E::kInt4>(layout, page, head, width, rows);
      case E::kFp8: return spread_values<E::kFp8>(layout, page, head, width, rows);
    }
  }
  static void keys(const PageLayout& layout, const uint8_t* page, size_t head, uint8_t* out) {
    auto* lines = reinterpret_cast<float*>(out);
    switch (layout.encoding) {
      case PageEncoding::kF32: return spread_keys<PageEncoding::kF32>(layout, page, head, lines);
      case PageEncoding::kBF16: return spread_keys<PageEncoding::kBF16>(layout, page, head, lines);
      case PageEncoding::kF16: return spread_keys<PageEncoding::kF16>(layout, page, head, lines);
      case PageEncoding::kInt8: return spread_keys<PageEncoding::kInt8>(layout, page, head, lines);
      case PageEncoding::kInt4: return spread_keys<PageEncoding::kInt4>(layout, page, head, lines);
      case PageEncoding::kFp8: return spread_keys<PageEncoding::kFp8>(layout, page, head, lines);
    }
  }
  // keys: as made above, or where they lie.  Tokens from `seen` on become zeros.
  static void values(const PageLayout& layout, const uint8_t* page, const uint8_t* keys,
                     size_t head, size_t seen, uint8_t* out) {
    auto* rows = reinterpret_cast<float*>(out);
    const size_t width = padded_width(layout);
    if (layout.latent) {
      turn_keys(reinterpret_cast<const float*>(keys), layout.value_dim, width, rows);
    } else {
      spread_all_values(layout, page, head, rows);
    }
    for (size_t i = seen * width; i < kPageTokens * width; ++i) rows[i] = 0.0f;
  }
};

#if defined(HMT_AVX512_BF16)
struct Bf16Pages : FloatProducts<Bf16Words> {
  static bool keys_in_place(const PageLayout&) { return true; }
  static bool values_in_place(const PageLayout& layout) {
    return !layout.latent && layout.value_dim % 16 == 0;
  }
  static void load_query(const Tile& tile, const Work& work) {
    const size_t dim = tile.pages->layout.key_dim;
    for (size_t r = 0; r < tile.rows; ++r) {
      std::memcpy(work.query + r * dim / 2, query_row(tile, r), dim * 2);
    }
  }
  static void keys(const PageLayout&, const uint8_t*, size_t, uint8_t*) {}
  static void values(const PageLayout& layout, const uint8_t* page, const uint8_t* keys,
                     size_t head, size_t seen, uint8_t* out) {
    auto* rows = reinterpret_cast<uint16_t*>(out);
    const size_t width = padded_width(layout);
    if (layout.latent) {
      turn_bf16_keys(keys, layout.value_dim, width, rows);
    } else {
      copy_bf16_values(page + layout.value_at(head), layout.value_dim, width, rows);
    }
    hide_bf16_tokens(seen, width, rows);
  }
};
#endif

}  // namespace hmt::HMT_ISA
