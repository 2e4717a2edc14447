// Panels of 4-bit codes times int8 activations with AMX tiles.  Only for panels.isa.cpp.
//
// A spread panel is 64 bytes for each four columns: up to 16 such lines are a B tile.  A tile of
// activations is 16 tokens of up to 64 columns.  Their product, 16 tokens times 16 rows of one
// group, goes through memory into the same sums as in panels_int8.h.
#pragma once

#include "base/scratch.h"
#include "linear/panels_int8.h"
#include "simd/tiles.h"

namespace hmt::HMT_ISA {

// Whether tiles pay.  Not where tokens have a scale per group of 32, whose products fill half a tile
// and are few for what each costs in vector registers: 512 tokens times [14336, 4096] took 16 Xeon
// cores 21 ms with tiles and 15 without, 8 tokens 0.47 and 0.28.
inline bool tiles_pay(const Weight& w, size_t tokens) {
  return tokens >= 8 && w.scale_columns == 0;
}
constexpr size_t kMostTokens = 256;  // whose sums lie in L1 and L2 at a time

// Tile registers
//   0, 1   products of 16 tokens and 16 rows     2, 3   16 tokens times `columns`
//   4      `columns` times 16 rows               5, 6   as 0 and 2, of the last `rest` tokens
inline TileShapes panel_tiles(size_t columns, size_t rest) {
  const auto bytes = static_cast<uint16_t>(columns);
  const auto lines = static_cast<uint8_t>(columns / 4);
  const auto few = static_cast<uint8_t>(rest == 0 ? 1 : rest);  // a tile has at least one row
  return {1, 0, {}, {64, 64, bytes, bytes, 64, 64, bytes}, {16, 16, 16, 16, lines, few, few}};
}

// products [2][16 tokens][16 rows] of a group of `steps` times `columns` columns; x: 32 tokens.
HMT_INLINE void multiply_tiles(const int8_t* x, size_t stride, const uint8_t* codes,
                               size_t columns, size_t steps, int32_t* products) {
  settle_tile_memory();
  _tile_zero(0);
  _tile_zero(1);
  for (size_t step = 0; step < steps; ++step) {
    _tile_loadd(4, codes + step * columns * kPanelRows, 64);
    _tile_loadd(2, x + step * columns, stride);
    _tile_loadd(3, x + step * columns + 16 * stride, stride);
    _tile_dpbsud(0, 2, 4);
    _tile_dpbsud(1, 3, 4);
  }
  _tile_stored(0, products, 64);
  _tile_stored(1, products + 256, 64);
  settle_tile_memory();
}

HMT_INLINE void multiply_tile_alone(const int8_t* x, size_t stride, const uint8_t* codes,
                                    size_t columns, size_t steps, int32_t* products) {
  settle_tile_memory();
  _tile_zero(0);
  for (size_t step = 0; step < steps; ++step) {
    _tile_loadd(4, codes + step * columns * kPanelRows, 64);
    _tile_loadd(2, x + step * columns, stride);
    _tile_dpbsud(0, 2, 4);
  }
  _tile_stored(0, products, 64);
  settle_tile_memory();
}

// As multiply_tile_alone, of the tokens beyond the last 16.
HMT_INLINE void multiply_tile_rest(const int8_t* x, size_t stride, const uint8_t* codes,
                                   size_t columns, size_t steps, int32_t* products) {
  settle_tile_memory();
  _tile_zero(5);
  for (size_t step = 0; step < steps; ++step) {
    _tile_loadd(4, codes + step * columns * kPanelRows, 64);
    _tile_loadd(6, x + step * columns, stride);
    _tile_dpbsud(5, 6, 4);
  }
  _tile_stored(5, products, 64);
  settle_tile_memory();
}

// Blocks [first, end) of a panel as unsigned codes, 512 bytes each: the columns in order.
template <Nibble kNibble>
void spread_blocks(const uint8_t* data, size_t first, size_t end, uint8_t* out) {
  for (size_t block = first; block < end; ++block, out += 512) {
    for (size_t quad = 0; quad < 4; ++quad) {
      const Line line = load_line(data + block * 256 + quad * 64);
      Line low = low_nibbles(line), high = high_nibbles(line);
      if (kNibble == Nibble::kFp4) {
        low = doubled_e2m1(low);
        high = doubled_e2m1(high);
      }
      _mm512_store_si512(out + quad * 64, low.v);
      _mm512_store_si512(out + 256 + quad * 64, high.v);
    }
  }
}

template <Nibble kNibble>  // as in Int8Tile
struct AmxPanel {
  const Int8Call& call;
  size_t panel;
  size_t first_token;
  float* totals;  // [tokens from first_token, 16]
  GroupNumbers numbers;

  // Adds the products of `count` tokens from `first`, in one group.
  HMT_INLINE void add_products(size_t group, size_t first, size_t count, const int32_t* products) {
    const size_t slot = group % kGroupsAhead;
    const F16v scale = load(numbers.scales[slot]);
    I16v zeros = set1(int32_t{0});
    if (kNibble == Nibble::kZero) {
      zeros = group_zeros(call.w.zeros, panel * call.panel_groups + group);
    }
    for (size_t t = 0; t < count; ++t) {
      const int32_t start = call.starts[(first + t) * call.groups + group];
      float* mine = totals + (first - first_token + t) * 16;
      I16v dots = load(products + t * 16);
      if (kNibble == Nibble::kZero) dots = add(dots, mul(zeros, set1(start)));
      else if (kNibble != Nibble::kMinimum) dots = add(dots, set1(start));
      F16v total = add(load(mine), mul(to_float(dots), scale));
      if (kNibble == Nibble::kMinimum) {
        total = add(total, mul(minimum_factor(start), load(numbers.minima[slot])));
      }
      store(mine, total);
    }
  }

  // Tokens [first, end) times groups [begin, end_group), whose spread codes are `codes`.
  void run(size_t first, size_t end, size_t begin, size_t end_group, const uint8_t* codes) {
    const size_t group_columns = call.w.tile_columns, stride = call.in.stride;
    const size_t columns = group_columns < 64 ? group_columns : 64;
    const size_t steps = group_columns / columns;
    alignas(64) int32_t products[2][512];
    for (size_t token = first; token < end;) {
      const size_t left = end - token, count = left >= 32 ? 32 : left < 16 ? left : 16;
      for (size_t group = begin; group < end_group; ++group) {
        const int8_t* x = call.in.codes + token * stride + group * group_columns;
        const uint8_t* spread = codes + (group - begin) * group_columns * kPanelRows;
        int32_t* target = products[group % 2];
        if (count == 32) multiply_tiles(x, stride, spread, columns, steps, target);
        else if (count == 16) multiply_tile_alone(x, stride, spread, columns, steps, target);
        else multiply_tile_rest(x, stride, spread, columns, steps, target);
        add_products(group, token, count, target);
      }
      token += count;
    }
  }
};

template <Nibble kNibble>
void multiply_amx_panels(const Int8Call& call, size_t first_row, size_t end_row, float* out,
                         size_t out_stride) {
  const Weight& w = call.w;
  const size_t tokens = call.in.tokens, most = kGroupsAhead * w.tile_columns;
  const size_t held = tokens < kMostTokens ? tokens : kMostTokens;
  Scratch scratch(most * kPanelRows + held * 16 * sizeof(float));
  uint8_t* codes = scratch.take<uint8_t>(most * kPanelRows);
  float* totals = scratch.take<float>(held * 16);
  const Tiles tiles(panel_tiles(w.tile_columns < 64 ? w.tile_columns : 64, tokens % 16));
  for (size_t token = 0; token < tokens; token += kMostTokens) {
    const size_t end = token + kMostTokens < tokens ? token + kMostTokens : tokens;
    for (size_t row = first_row; row < end_row; row += kPanelRows) {
      const size_t panel = row / kPanelRows;
      const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
      std::memset(totals, 0, (end - token) * 16 * sizeof(float));
      AmxPanel<kNibble> product{call, panel, token, totals, {}};
      for (size_t begin = 0; begin < call.groups; begin += kGroupsAhead) {
        const size_t left = call.groups - begin;
        const size_t count = left < kGroupsAhead ? left : kGroupsAhead;
        read_groups(w, call.factor, panel * call.panel_groups + begin, count, product.numbers);
        spread_blocks<kNibble>(data, begin * w.tile_columns / kPanelBlock,
                               (begin + count) * w.tile_columns / kPanelBlock, codes);
        product.run(token, end, begin, begin + count, codes);
      }
      const size_t rows = end_row - row < kPanelRows ? end_row - row : kPanelRows;
      for (size_t t = token; t < end; ++t) {
        float lanes[16];
        const F16v total = load(totals + (t - token) * 16);
        store(lanes, mul(total, set1(call.in.scales[t])));
        std::memcpy(out + t * out_stride + row - first_row, lanes, rows * sizeof(float));
      }
    }
  }
}

inline void multiply_amx(const Int8Call& call, Nibble nibble, size_t first_row, size_t end_row,
                         float* out, size_t out_stride) {
  switch (nibble) {
    case Nibble::kOffset:
      return multiply_amx_panels<Nibble::kOffset>(call, first_row, end_row, out, out_stride);
    case Nibble::kZero:
      return multiply_amx_panels<Nibble::kZero>(call, first_row, end_row, out, out_stride);
    case Nibble::kMinimum:
      return multiply_amx_panels<Nibble::kMinimum>(call, first_row, end_row, out, out_stride);
    case Nibble::kFp4:
      return multiply_amx_panels<Nibble::kFp4>(call, first_row, end_row, out, out_stride);
  }
}

}  // namespace hmt::HMT_ISA
