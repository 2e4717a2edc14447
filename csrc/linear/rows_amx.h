// Products with AMX tiles: 16 or 32 rows of weights times one or two blocks of 16 tokens.  A tile
// of weights is 16 rows of 64 bytes, a tile of tokens 16 lines (see rows_lanes.h), and their
// product 16 rows of 16 tokens, 64 bytes apart.  Only for rows.isa.cpp.
#pragma once

#include "simd/tiles.h"

namespace hmt::HMT_ISA {
namespace {

// sums[i][j] = (fresh ? 0 : sums[i][j]) + rows [16 i, 16 i + 16) times block j; `count` lines, a
// multiple of 16.  Sums are int32 of int8, or f32 of bf16 pairs.
template <bool kInteger, size_t kRowTiles, size_t kBlocks>
HMT_INLINE void multiply_with_tiles(const uint8_t* weights, size_t row_bytes,
                                    const uint8_t* const* lines, size_t count, bool fresh,
                                    float* const (*sums)[2]) {
  constexpr bool kTwoRows = kRowTiles == 2, kTwoBlocks = kBlocks == 2;
  settle_tile_memory();
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums[0][0], 64);
    if (kTwoBlocks) _tile_loadd(1, sums[0][1], 64);
    if (kTwoRows) _tile_loadd(2, sums[1][0], 64);
    if (kTwoRows && kTwoBlocks) _tile_loadd(3, sums[1][1], 64);
  }
  for (size_t line = 0; line < count; line += 16) {
    const uint8_t* rows = weights + 4 * line;
    _tile_loadd(4, rows, row_bytes);
    _tile_loadd(6, lines[0] + 64 * line, 64);
    if (kTwoBlocks) _tile_loadd(7, lines[1] + 64 * line, 64);
    if (kTwoRows) _tile_loadd(5, rows + 16 * row_bytes, row_bytes);
    if (kInteger) {
      _tile_dpbssd(0, 4, 6);
      if (kTwoBlocks) _tile_dpbssd(1, 4, 7);
      if (kTwoRows) _tile_dpbssd(2, 5, 6);
      if (kTwoRows && kTwoBlocks) _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      if (kTwoBlocks) _tile_dpbf16ps(1, 4, 7);
      if (kTwoRows) _tile_dpbf16ps(2, 5, 6);
      if (kTwoRows && kTwoBlocks) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0][0], 64);
  if (kTwoBlocks) _tile_stored(1, sums[0][1], 64);
  if (kTwoRows) _tile_stored(2, sums[1][0], 64);
  if (kTwoRows && kTwoBlocks) _tile_stored(3, sums[1][1], 64);
  settle_tile_memory();
}

}  // namespace
}  // namespace hmt::HMT_ISA
