// Memory that a tile is computed in.  Only for *.isa.cpp.
#pragma once

#include <type_traits>

#include "attention/kernels.h"
#include "attention/lanes.h"

namespace hmt::HMT_ISA {

struct Work {
  uint32_t* query;    // [rows, words], or twice the rows in parts of int8
  float* scores;      // [rows, 64]
  uint32_t* weights;  // [rows, 64 / numbers of a word]
  float* totals;      // [rows, 16]: sums of weights by lane
  size_t* first;      // [rows]: positions that a row sees, from ..
  size_t* after;      // .. up to
  uint8_t* keys;      // four pages, where they are not read where they lie
  uint8_t* values;
  // Where products are of int8 numbers:
  float* mixed;          // [2 rows, width]: sums of one block
  float* query_scales;   // [rows]
  int32_t* query_sums;   // [rows, 2]: 128 times the sums of each part
  float* weight_scales;  // [rows]

  // Divides up `memory`, and returns the bytes that takes.
  size_t place(const PageLayout& layout, uint8_t* memory) {
    const size_t width = padded_width(layout);
    const size_t parts = layout.encoding == PageEncoding::kInt8 ? 2 : 1;
    const size_t int8_rows = parts == 2 ? kTileRows : 0;
    size_t used = 0;
    const auto take = [&](auto*& piece, size_t bytes) {
      piece = reinterpret_cast<std::remove_reference_t<decltype(piece)>>(memory + used);
      used += (bytes + 63) / 64 * 64;
    };
    take(query, kTileRows * layout.key_dim * 4);
    take(scores, parts * kTileRows * kBlockTokens * 4);
    take(weights, kTileRows * kBlockTokens * 4);
    take(totals, kTileRows * 16 * 4);
    take(first, kTileRows * sizeof(size_t));
    take(after, kTileRows * sizeof(size_t));
    take(keys, kBlockTokens * layout.key_dim * 4);
    take(values, kBlockTokens * width * 4);
    take(mixed, 2 * int8_rows * width * 4);
    take(query_scales, int8_rows * 4);
    take(query_sums, 2 * int8_rows * 4);
    take(weight_scales, int8_rows * 4);
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

}  // namespace hmt::HMT_ISA
