// What attention.cpp asks of the files that are compiled once per instruction set.
#pragma once

#include "attention/attention.h"
#include "base/isa.h"

namespace hmt {

// Positions that are scored before their values are mixed: four pages.
constexpr std::size_t kBlockPages = 4;
constexpr std::size_t kBlockTokens = kBlockPages * kPageTokens;
constexpr std::size_t kTileRows = 64;
// Positions whose softmax is summed up on its own, from multiples of this number on: what a row's
// sums are must not depend on who computes them.
constexpr std::size_t kChunkTokens = 256;

// Some rows of a run against some of its positions, for `heads` KV heads from kv_head on.  Row i of
// a run is, for KV head h, token i / group and head h * group + i % group.
struct Tile {
  const Pages* pages;
  const PagedRun* run;
  const HeadRows* query;
  const AttentionOptions* options;
  std::size_t kv_head, heads, group;
  std::size_t first_row, rows;  // heads * rows is at most kTileRows
  std::size_t begin, end;       // positions; `begin` is a multiple of 16
  std::size_t fetched;          // positions up to this one are fetched ahead
};

// Softmax of a tile's rows that is not divided by its total yet.
struct Partial {
  float* sums;    // [heads, rows, padded_width()]: values weighted by exp(score - top)
  float* tops;    // [heads, rows]: about the greatest score, -infinity where nothing was seen
  float* totals;  // [heads, rows]: sum of exp(score - top)
};

inline constexpr std::size_t padded_width(const PageLayout& layout) {
  return (layout.value_dim + 15) / 16 * 16;
}

struct AttentionKernels {
  // Memory that `attend` works in.
  std::size_t (*work_bytes)(const PageLayout& layout);
  // The tile's positions lie in one chunk.  A row's partial depends on the positions of the chunk
  // that the row sees, not on those that the tile's other rows see.  `prepared`: `work` has the
  // queries of the same rows from the call before.
  void (*attend)(const Tile& tile, const Partial& partial, bool prepared, uint8_t* work);
  // Adds to masses[p], for each page p from tile.begin / 16 on, the sum of exp(score - log) over the
  // tile's rows, whose logs are `logs`, and the page's positions: whole pages that all rows see.
  void (*masses)(const Tile& tile, const float* logs, float* masses, uint8_t* work);
  // `all` becomes the partial of both.  A part that sees nothing changes no bit, on either side.
  void (*merge)(const Tile& tile, const Partial& all, const Partial& part);
  // Divides and writes the rows; q_heads are those of `result`.
  void (*finish)(const Tile& tile, const Partial& partial, std::size_t q_heads,
                 const AttentionResult& result);
};
HMT_TABLES(AttentionKernels, attention_kernels)

struct PageKernels {
  // Writes `tokens` tokens of all heads to slots [slot, slot + tokens) of one page.
  void (*write)(const PageLayout& layout, uint8_t* page, std::size_t slot, std::size_t tokens,
                const HeadRows& key, const HeadRows& value, float* row);
};
HMT_TABLES(PageKernels, page_kernels)

}  // namespace hmt
