#include "experimental/msd.h"

#include "linear/panels_int8.h"

namespace hmt::HMT_ISA {
namespace {

// 32 columns at a time, so that one address serves both halves.
constexpr size_t kHalf = kPanelBlock;

void split(const int8_t* codes, size_t count, int8_t* halves) {
  for (size_t block = 0; block < count; block += kHalf, halves += 2 * kHalf) {
    for (size_t i = 0; i < kHalf; ++i) {
      const int code = codes[block + i];
      halves[i] = static_cast<int8_t>((code - (code & 15)) / 16);
      halves[kHalf + i] = static_cast<int8_t>((code & 15) - 8);
    }
  }
}

// The products of one group so far.
template <size_t kTokens>
struct HalfSums {
  I16v high[kTokens], low[kTokens];
  I16v weights;  // the sum of nibbles

  HMT_INLINE void clear() {
    weights = set1(int32_t{0});
    for (size_t t = 0; t < kTokens; ++t) high[t] = low[t] = weights;
  }
};

template <size_t kTokens>
struct HalvesTile {
  const int8_t* halves[kTokens];
  const int32_t* starts[kTokens];  // see group_starts
  float totals[kTokens][16];

  // Adds products with four columns of a block, whose halves begin at `offset`.
  HMT_INLINE void add(const Line& codes, size_t offset, HalfSums<kTokens>& sums) const {
    const int8_t ones[4] = {1, 1, 1, 1};
    sums.weights = dot(sums.weights, codes, ones);
    HMT_UNROLL(8)
    for (size_t t = 0; t < kTokens; ++t) {
      const int8_t* high = halves[t] + offset;
      sums.high[t] = dot(sums.high[t], codes, high);
      sums.low[t] = dot(sums.low[t], codes, high + kHalf);
    }
  }

  // Of weights n - 8 and activations 16 h + l + 8, the sum of products is
  // 16 sum(n h) + sum(n l) + 8 sum(n) - 8 sum(activations).
  HMT_INLINE void end_group(size_t group, F16v scale, const HalfSums<kTokens>& sums) {
    const I16v weights = mul(sums.weights, set1(int32_t{8}));
    for (size_t t = 0; t < kTokens; ++t) {
      const I16v highs = mul(sums.high[t], set1(int32_t{16}));
      const I16v rest = hmt::HMT_ISA::add(weights, set1(starts[t][group]));
      const I16v both = hmt::HMT_ISA::add(hmt::HMT_ISA::add(highs, sums.low[t]), rest);
      store(totals[t], hmt::HMT_ISA::add(load(totals[t]), mul(to_float(both), scale)));
    }
  }

  // A block of 32 columns; groups of 16 end in its middle.
  HMT_INLINE void add_block(const uint8_t* block, size_t offset, HalfSums<kTokens>& even,
                            HalfSums<kTokens>& odd) const {
    HMT_UNROLL(4)
    for (size_t quad = 0; quad < 4; ++quad) {
      const Line line = load_line(block + quad * 64);
      add(low_nibbles(line), offset + 4 * quad, even);
      add(high_nibbles(line), offset + 16 + 4 * quad, odd);
    }
  }

  template <bool kSixteen>
  HMT_INLINE void run(const Weight& w, size_t panel) {
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    const size_t groups = groups_of(w), each = kSixteen ? 2 : 1;
    const size_t blocks = kSixteen ? 1 : w.tile_columns / kPanelBlock;
    GroupNumbers numbers;
    for (size_t g = 0, block = 0; g < groups; g += each) {
      const size_t slot = g % kGroupsAhead, left = groups - g;
      if (slot == 0) {
        read_groups(w, code_factor(w), panel * panel_groups(w) + g,
                    left < kGroupsAhead ? left : kGroupsAhead, numbers);
      }
      HalfSums<kTokens> even, odd;
      even.clear();
      if (kSixteen) odd.clear();
      for (size_t i = 0; i < blocks; ++i, ++block) {
        add_block(data + block * 256, block * 2 * kHalf, even, kSixteen ? odd : even);
      }
      end_group(g, load(numbers.scales[slot]), even);
      if (kSixteen) end_group(g + 1, load(numbers.scales[slot + 1]), odd);
    }
  }
};

template <size_t kTokens>
void multiply_tokens(const Weight& w, const Inputs& in, const int8_t* halves,
                     size_t first, size_t count, size_t row, size_t rows, float* out,
                     size_t out_stride) {
  const size_t groups = groups_of(w), panel = row / kPanelRows;
  const auto* starts = reinterpret_cast<const int32_t*>(in.arranged);
  HalvesTile<kTokens> tile{};
  for (size_t t = 0; t < kTokens; ++t) {
    const size_t token = first + (t < count ? t : count - 1);
    tile.halves[t] = halves + token * 2 * in.stride;
    tile.starts[t] = starts + token * groups;
  }
  if (w.tile_columns == 16) tile.template run<true>(w, panel);
  else tile.template run<false>(w, panel);
  for (size_t t = 0; t < count; ++t) {
    float lanes[16];
    store(lanes, mul(load(tile.totals[t]), set1(in.scales[first + t])));
    std::memcpy(out + (first + t) * out_stride, lanes, rows * sizeof(float));
  }
}

void multiply(const Weight& w, const Inputs& in, const int8_t* halves,
              size_t first_row, size_t end_row, float* out, size_t out_stride) {
  for (size_t token = 0; token < in.tokens; token += kTileTokens) {
    const size_t left = in.tokens - token, count = left < kTileTokens ? left : kTileTokens;
    for (size_t row = first_row; row < end_row; row += kPanelRows) {
      const size_t rows = end_row - row < kPanelRows ? end_row - row : kPanelRows;
      float* target = out + row - first_row;
      if (count == 1) {
        multiply_tokens<1>(w, in, halves, token, count, row, rows, target, out_stride);
      } else {
        multiply_tokens<kTileTokens>(w, in, halves, token, count, row, rows, target,
                                     out_stride);
      }
    }
  }
}

}  // namespace

const MsdKernels msd_kernels = {split, multiply};

}  // namespace hmt::HMT_ISA
