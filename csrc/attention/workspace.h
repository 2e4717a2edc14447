// Memory that a tile is computed in.  Only for *.isa.cpp.
#pragma once

#include <type_traits>

#include "attention/kernels.h"
#include "attention/lanes.h"

namespace hmt::HMT_ISA {

// Positions that are scored before their values are mixed where products are of codes: eight pages.
constexpr size_t kCodePages = 8;
constexpr size_t kCodeTokens = kCodePages * kPageTokens;

struct Work {
  uint32_t* query;    // [rows, words], or in bytes of codes
  float* scores;      // [rows, 64], or 128 where products are of codes
  uint32_t* weights;  // [rows, 64 / numbers of a word], or in bytes [rows, groups, 2, 128]
  float* totals;      // [rows, 16]: sums of weights by lane
  size_t* first;      // [rows]: positions that a row sees, from ..
  size_t* after;      // .. up to
  uint8_t* keys;      // four pages, where they are not read where they lie
  uint8_t* values;
  // Where products are of codes:
  float* query_row;        // [key_dim]
  float* query_factors;    // [rows]
  int32_t* query_starts;   // [rows, groups of keys]
  float* weight_scales;    // [rows, groups of values]
  int32_t* weight_starts;  // [rows, groups of values]
  float* value_scales;     // [groups of values, 128], of int4

  // Divides up `memory`, and returns the bytes that takes.
  size_t place(const PageLayout& layout, uint8_t* memory) {
    const size_t width = padded_width(layout);
    const bool codes = layout.codes();
    const size_t code_rows = codes ? kTileRows : 0, tokens = codes ? kCodeTokens : kBlockTokens;
    const size_t key_groups = layout.scales(layout.key_dim);
    const size_t value_groups = layout.scales(layout.value_dim);
    size_t used = 0;
    const auto take = [&](auto*& piece, size_t bytes) {
      piece = reinterpret_cast<std::remove_reference_t<decltype(piece)>>(memory + used);
      used += (bytes + 63) / 64 * 64;
    };
    take(query, kTileRows * layout.key_dim * 4);
    take(scores, kTileRows * tokens * 4);
    take(weights, kTileRows * (codes ? value_groups * 2 * tokens : tokens * 4));
    take(totals, kTileRows * 16 * 4);
    take(first, kTileRows * sizeof(size_t));
    take(after, kTileRows * sizeof(size_t));
    take(keys, kBlockTokens * layout.key_dim * 4);
    take(values, kBlockTokens * width * 4);
    take(query_row, codes ? layout.key_dim * 4 : 0);
    take(query_factors, code_rows * 4);
    take(query_starts, code_rows * key_groups * 4);
    take(weight_scales, code_rows * value_groups * 4);
    take(weight_starts, code_rows * value_groups * 4);
    take(value_scales, codes ? value_groups * kCodeTokens * 4 : 0);
    return used;
  }
};

inline const uint8_t* query_row(const Tile& tile, size_t r) {
  const size_t row = tile.first_row + r, head = tile.kv_head * tile.group + row % tile.group;
  const size_t token = tile.run->offset + row / tile.group;
  const HeadRows& query = *tile.query;
  const size_t bytes = query.type == DType::kF32 ? 4 : 2;
  return static_cast<const uint8_t*>(query.data) +
         (token * query.token_stride + head * query.head_stride) * bytes;
}

HMT_INLINE const uint8_t* page_at(const Tile& tile, size_t page) {
  return tile.pages->data + static_cast<size_t>(tile.run->table[page]) * tile.pages->stride;
}

inline void begin_rows(const Tile& tile, const Partial& partial, const Work& work) {
  const size_t rows = tile.heads * tile.rows;
  const size_t width = padded_width(tile.pages->layout), window = tile.options->window;
  for (size_t i = 0; i < rows * width; ++i) partial.sums[i] = 0.0f;
  for (size_t i = 0; i < rows * 16; ++i) work.totals[i] = 0.0f;
  for (size_t r = 0; r < rows; ++r) partial.tops[r] = kNone;
  for (size_t r = 0; r < tile.rows; ++r) {
    const size_t after = tile.run->start + (tile.first_row + r) / tile.group + 1;
    const size_t first = window != 0 && after > window ? after - window : 0;
    work.first[r] = first > tile.begin ? first : tile.begin;
    work.after[r] = after < tile.end ? after : tile.end;
  }
}

// Pages of a block that a tile has; blocks begin at multiples of their size.  The nearest page of the
// tile stands for another one, to be read and masked.
struct BlockPages {
  BlockPages(const Tile& tile, size_t block, size_t pages) : block(block) {
    const size_t begin = tile.begin / kPageTokens;
    const size_t end = (tile.end + kPageTokens - 1) / kPageTokens;
    first = begin > block ? begin - block : 0;
    count = end - block < pages ? end - block : pages;
  }
  size_t page(size_t i) const {
    return block + (i < first ? first : i < count ? i : count - 1);
  }
  bool has(size_t i) const { return i >= first && i < count; }
  size_t block;         // its first page
  size_t first, count;  // those that the tile has: [first, count) of the block
};

// What is fetched while something else is computed: pages from `first` on, of one head.
struct Ahead {
  size_t head, first, begin, last;
  // The first and last page stand for those before and behind them.
  size_t page(size_t i) const {
    const size_t number = first + i < last ? first + i : last;
    return number > begin ? number : begin;
  }
  bool has(size_t i) const { return first + i >= begin && first + i <= last; }
};

// Head `h` of a tile's heads, and where it is computed.
struct OneHead {
  OneHead(const Tile& all, const Partial& sums_of_all, const Work& work_of_all, size_t h)
      : tile(all), partial(sums_of_all), work(work_of_all) {
    const PageLayout& layout = all.pages->layout;
    const size_t row = h * all.rows;
    tile.kv_head += h;
    tile.heads = 1;
    partial.sums += row * padded_width(layout);
    partial.tops += row;
    partial.totals += row;
    work.query += row * layout.key_dim;
    work.totals += row * 16;
    work.query_factors += row;
    work.query_starts += row * layout.scales(layout.key_dim);
    next = h + 1 < all.heads ? tile.kv_head + 1 : all.kv_head;
  }
  // While a block of `pages` pages from `first` on is computed: the same pages of the next head,
  // whose numbers lie right behind this one's, and after the last head the next block.  On two busy
  // Intel cores, against each head going through all pages alone, pages in memory came in faster
  // (bf16 15 to 25%, int8 11 to 19%), and pages in caches up to 40% slower.
  Ahead ahead(size_t first, size_t pages) const {
    return {next, next > tile.kv_head ? first : first + pages, tile.begin / kPageTokens,
            (tile.fetched - 1) / kPageTokens};
  }
  Tile tile;
  Partial partial;
  Work work;
  size_t next;  // head
};

// What scores are compared with after a block: its greatest one, where that is much more than what
// they were compared with `before`.  Multiplying sums whenever a score is a little greater took a
// sixth of a prompt's time, as each chunk begins anew; numbers of f32 have room for e^8.
HMT_INLINE float reference_of(float greatest_score, float before) {
  return greatest_score > before + 8.0f ? greatest_score : before;
}

inline void multiply_row(float* row, size_t count, float factor) {
  for (size_t i = 0; i < count; i += 16) store(row + i, mul(load(row + i), set1(factor)));
}

}  // namespace hmt::HMT_ISA
