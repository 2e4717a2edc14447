#include "linear/msd.h"

#include "linear/panels_int8.h"

namespace hmt::HMT_ISA {
namespace {

void split(const int8_t* codes, size_t count, int8_t* high, int8_t* low) {
  for (size_t i = 0; i < count; ++i) {
    const int code = codes[i];
    low[i] = static_cast<int8_t>((code & 15) - 8);
    high[i] = static_cast<int8_t>((code - (code & 15)) / 16);
  }
}

// Two sums for each token, and the sum of the weights' nibbles.
constexpr size_t kHalfTokens = kTileTokens;

template <size_t kTokens>
struct HalvesTile {
  const int8_t* high[kTokens];
  const int8_t* low[kTokens];
  const int32_t* starts[kTokens];  // see group_starts
  float totals[kTokens][16];

  // Adds products with four columns, nibbles of `codes`, that begin with `column`.
  HMT_INLINE void add(const Line& codes, size_t column, I16v (&highs)[kTokens],
                      I16v (&lows)[kTokens], I16v& weights) const {
    const int8_t ones[4] = {1, 1, 1, 1};
    weights = dot(weights, codes, ones);
    HMT_UNROLL(8)
    for (size_t t = 0; t < kTokens; ++t) {
      highs[t] = dot(highs[t], codes, high[t] + column);
      lows[t] = dot(lows[t], codes, low[t] + column);
    }
  }

  // Of weights n - 8 and activations 16 h + l + 8, the sum of products is
  // 16 sum(n h) + sum(n l) + 8 sum(n) - 8 sum(activations).
  HMT_INLINE void end_group(size_t group, F16v scale, const I16v (&highs)[kTokens],
                            const I16v (&lows)[kTokens], I16v weights) {
    for (size_t t = 0; t < kTokens; ++t) {
      const I16v halves = hmt::HMT_ISA::add(mul(highs[t], set1(int32_t{16})), lows[t]);
      const I16v rest = hmt::HMT_ISA::add(mul(weights, set1(int32_t{8})), set1(starts[t][group]));
      const F16v dot = to_float(hmt::HMT_ISA::add(halves, rest));
      store(totals[t], hmt::HMT_ISA::add(load(totals[t]), mul(dot, scale)));
    }
  }

  // Columns [begin, end) of a group, 16 or a multiple of 32.
  HMT_INLINE void run_group(const uint8_t* data, size_t group, size_t begin, size_t end,
                            F16v scale) {
    I16v highs[kTokens], lows[kTokens], weights = set1(int32_t{0});
    for (size_t t = 0; t < kTokens; ++t) highs[t] = lows[t] = set1(int32_t{0});
    for (size_t column = begin; column < end; column += 4) {
      const size_t in_block = column % kPanelBlock;
      const Line line = load_line(data + column / kPanelBlock * 256 + in_block % 16 / 4 * 64);
      add(in_block < 16 ? low_nibbles(line) : high_nibbles(line), column, highs, lows, weights);
    }
    end_group(group, scale, highs, lows, weights);
  }
};

template <size_t kTokens>
void multiply_tokens(const Weight& w, const Inputs& in, const int8_t* high, const int8_t* low,
                     size_t first, size_t count, size_t row, size_t rows, float* out,
                     size_t out_stride) {
  const size_t groups = groups_of(w), panel = row / kPanelRows;
  const auto* starts = reinterpret_cast<const int32_t*>(in.arranged);
  HalvesTile<kTokens> tile{};
  for (size_t t = 0; t < kTokens; ++t) {
    const size_t token = first + (t < count ? t : count - 1);
    tile.high[t] = high + token * in.stride;
    tile.low[t] = low + token * in.stride;
    tile.starts[t] = starts + token * groups;
  }
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
  GroupNumbers numbers;
  for (size_t g = 0; g < groups; ++g) {
    const size_t left = groups - g;
    if (g % kGroupsAhead == 0) {
      read_groups(w, code_factor(w), panel * groups + g, left < kGroupsAhead ? left : kGroupsAhead,
                  numbers);
    }
    tile.run_group(data, g, g * w.tile_columns, (g + 1) * w.tile_columns,
                   load(numbers.scales[g % kGroupsAhead]));
  }
  for (size_t t = 0; t < count; ++t) {
    float lanes[16];
    store(lanes, mul(load(tile.totals[t]), set1(in.scales[first + t])));
    std::memcpy(out + (first + t) * out_stride, lanes, rows * sizeof(float));
  }
}

void multiply(const Weight& w, const Inputs& in, const int8_t* high, const int8_t* low,
              size_t first_row, size_t end_row, float* out, size_t out_stride) {
  for (size_t token = 0; token < in.tokens; token += kHalfTokens) {
    const size_t left = in.tokens - token, count = left < kHalfTokens ? left : kHalfTokens;
    for (size_t row = first_row; row < end_row; row += kPanelRows) {
      const size_t rows = end_row - row < kPanelRows ? end_row - row : kPanelRows;
      float* target = out + row - first_row;
      if (count == 1) {
        multiply_tokens<1>(w, in, high, low, token, count, row, rows, target, out_stride);
      } else {
        multiply_tokens<kHalfTokens>(w, in, high, low, token, count, row, rows, target,
                                     out_stride);
      }
    }
  }
}

}  // namespace

const MsdKernels msd_kernels = {split, multiply};

}  // namespace hmt::HMT_ISA
