// Blocks of ggml's types times activations rounded to int8 with a scale per 256 columns, or per
// block of 32.  Only for blocks.isa.cpp.
//
// Rows lie in lanes: a word holds four codes of each of 16 rows, and a token's four are broadcast to
// all lanes.  One token is multiplied with blocks as they are unpacked; several with a panel whose
// bytes were unpacked to a cache before, by kernels that know no type.
#pragma once

#include "base/scratch.h"
#include "linear/blocks_unpack.h"

namespace hmt::HMT_ISA {

inline size_t activation_blocks(size_t columns) {
  return (columns + kActivationBlock - 1) / kActivationBlock;
}

// What sums of products need of a token, kArranged integers for each 256 columns:
//   kStarts  of each group minus the offset times the sum of x
//   kPairs   sums of x in groups 4 k, 4 k + 2, 4 k + 1, 4 k + 3, as 16-bit integers
//   kSums    of each block the sum of x
template <typename Form>
void arrange_token(const Inputs& in, size_t token, int32_t offset, int32_t* out) {
  constexpr size_t kPieces = Form::kGroup / 16, kGroups = 256 / Form::kGroup;
  const int32_t* sums = in.sums + token * (in.stride / 16);
  const size_t all = in.columns / Form::kGroup;
  for (size_t first = 0; first < all; first += kGroups, out += Form::kArranged) {
    int32_t totals[kGroups] = {};
    for (size_t g = 0; g < kGroups && first + g < all; ++g) {
      for (size_t p = 0; p < kPieces; ++p) totals[g] += sums[(first + g) * kPieces + p];
    }
    if (Form::kCorrection != Correction::kPairs) {
      const int32_t factor = Form::kCorrection == Correction::kSums ? 1 : -offset;
      for (size_t g = 0; g < kGroups; ++g) out[g] = totals[g] * factor;
      continue;
    }
    int16_t ordered[kGroups];
    for (size_t g = 0; g < kGroups; ++g) {
      const size_t from = g % 4 == 1 ? g + 1 : g % 4 == 2 ? g - 1 : g;
      ordered[g] = static_cast<int16_t>(totals[from % kGroups]);
    }
    std::memcpy(out, ordered, sizeof ordered);
  }
}

template <typename Form>
HMT_INLINE I16v dot_codes(I16v sum, I16v codes, int32_t x) {
  return Form::kSigned ? dot_signed_bytes(sum, codes, x) : dot_bytes(sum, codes, x);
}

// A call's constants.
struct BlockCall {
  const Weight& w;
  const Inputs& in;
  const int8_t* codes;      // [tokens, codes_stride], in the order of the weight's numbers
  size_t codes_stride;
  const int32_t* arranged;  // [tokens, arranged_stride], superblocks * kArranged of them
  size_t arranged_stride;
  size_t superblocks;       // of 256 columns
  size_t scales_each;       // of a token for 256 columns: 1, or 8

  // Where the token's scale for a block is.
  HMT_INLINE size_t scale_at(size_t part, size_t place) const {
    return scales_each == 1 ? part : part * scales_each + place;
  }
};

// One token times a panel.
template <typename Type>
struct OneToken {
  using Form = FormOf<Type>;
  static constexpr size_t kStep = Form::kPart != 0 ? Form::kPart : Form::kGroup;
  static constexpr size_t kSteps = Form::kNumbers / kStep;

  // Asks for what comes later while it computes: 36 requests at once would wait for each other.
  static HMT_INLINE I16v sum_of(const Block& b, const int8_t* x, const int32_t* arranged,
                                uintptr_t later) {
    constexpr size_t kQuads = Form::kNumbers / 4, kWords = Type::kShape.words();
    I16v sums[kSteps];
    HMT_UNROLL(16)
    for (size_t i = 0; i < kSteps; ++i) {
      const bool starts = Form::kCorrection == Correction::kStarts && i * kStep % Form::kGroup == 0;
      sums[i] = starts ? set1(arranged[i * kStep / Form::kGroup]) : set1(int32_t{0});
    }
    Type::codes(b, [&](size_t quad, I16v words) __attribute__((always_inline)) {
      I16v& sum = sums[quad * 4 / kStep];
      const I16v codes = Form::kSigned ? differ(words, mask_of(0x80808080)) : words;
      sum = dot_codes<Form>(sum, codes, word_at(x + 4 * quad));
      const size_t line = quad * kWords / kQuads;
      if (later != 0 && line != (quad + kQuads - 1) * kWords / kQuads - kWords) {
        __builtin_prefetch(reinterpret_cast<const void*>(later + 64 * line));
      }
    });
    if (Form::kScales == 0) return sums[0];
    I16v total = set1(int32_t{0});
    HMT_UNROLL(16)
    for (size_t g = 0; g < Form::kScales; ++g) {
      const I16v scale = Type::scale(b, g);
      if (Form::kPart == 0) {
        total = add(total, mul(scale, sums[g]));
        continue;
      }
      const I16v low = bits_in(scale, 0xffff);
      for (size_t i = 0; i < Form::kGroup / kStep; ++i) {
        total = dot_pairs(total, low, sums[g * (Form::kGroup / kStep) + i]);
      }
    }
    return total;
  }

  static HMT_INLINE I16v minima_of(const Block& b, const int32_t* arranged) {
    I16v total = set1(int32_t{0});
    HMT_UNROLL(4)
    for (size_t k = 0; k < Form::kScales / 4; ++k) {
      total = dot_pairs(total, Type::pairs(b, k, 0), arranged[2 * k]);
      total = dot_pairs(total, Type::pairs(b, k, 1), arranged[2 * k + 1]);
    }
    return total;
  }

  // Panels [panel, panel + count), by turns: such a processor's own prefetching follows a stream per
  // page, so two of them bring more.
  static __attribute__((noinline)) void run(const BlockCall& call, size_t panel, size_t count,
                                            float (*out)[16]) {
    const Weight& w = call.w;
    const size_t blocks = w.columns / Form::kNumbers, row = blocks_of(w);
    const bool asks = asks_ahead(1, true);
    for (size_t p = 0; p < count; ++p) store(out[p], zero());
    for (size_t i = 0; i < blocks; ++i) {
      const size_t part = i / Form::kBlocks, place = i % Form::kBlocks;
      const int32_t* arranged = call.arranged + part * Form::kArranged +
                                (Form::kBlocks == 1 ? 0 : place);
      const int8_t* x = call.codes + i * Form::kNumbers;
      const F16v scale = set1(call.in.scales[call.scale_at(part, place)]);
      for (size_t p = 0; p < count; ++p) {
        const Block b = block_at(w, Type::kShape.words(), (panel + p) * row + i);
        add_block(b, x, arranged, scale, asks, out[p]);
      }
    }
  }

  static HMT_INLINE void add_block(const Block& b, const int8_t* x, const int32_t* arranged,
                                   F16v scale, bool asks, float* out) {
    // As a number, since it may lie beyond the array.
    const auto address = reinterpret_cast<uintptr_t>(b.data);
    const I16v products = sum_of(b, x, arranged, asks ? address + kBytesAhead : 0);
    F16v total = add(load(out), mul(to_float(products), mul(Type::d(b), scale)));
    if (Form::kCorrection == Correction::kPairs) {
      total = add(total, mul(to_float(minima_of(b, arranged)), mul(Type::e(b), scale)));
    }
    if (Form::kCorrection == Correction::kSums) {
      const F16v sum = set1(static_cast<float>(arranged[0]));
      total = add(total, mul(sum, mul(Type::e(b), scale)));
    }
    store(out, total);
  }
};

// kTokens tokens times kPanels panels that were unpacked, 256 columns at a time.
template <typename Form, size_t kTokens, size_t kPanels>
struct BlockTile {
  const Unpacked<Form>* panels[kPanels];
  const int8_t* x[kTokens];
  const float* scales[kTokens];
  size_t scales_each;  // see BlockCall
  const int32_t* arranged[kTokens];
  float* totals[kPanels];  // [tokens, 16], in L1

  using Sums = I16v[kTokens][kPanels];

  // Adds the products of columns [4 first, 4 end).
  HMT_INLINE void add_quads(size_t part, size_t first, size_t end, Sums& sums) const {
    HMT_UNROLL(8)
    for (size_t quad = first; quad < end; ++quad) {
      I16v codes[kPanels];
      HMT_UNROLL(2)
      for (size_t p = 0; p < kPanels; ++p) codes[p] = load_words(panels[p][part].codes[quad]);
      HMT_UNROLL(8)
      for (size_t t = 0; t < kTokens; ++t) {
        const int32_t four = word_at(x[t] + part * kActivationBlock + 4 * quad);
        HMT_UNROLL(2)
        for (size_t p = 0; p < kPanels; ++p) sums[t][p] = dot_codes<Form>(sums[t][p], codes[p], four);
      }
    }
  }

  HMT_INLINE void begin(size_t at, bool starts, Sums& sums) const {
    HMT_UNROLL(8)
    for (size_t t = 0; t < kTokens; ++t) {
      HMT_UNROLL(2)
      for (size_t p = 0; p < kPanels; ++p) {
        sums[t][p] = starts && Form::kCorrection == Correction::kStarts ? set1(arranged[t][at])
                                                                        : set1(int32_t{0});
      }
    }
  }

  // Sums over the groups of a block.
  HMT_INLINE void add_groups(size_t part, Sums& totals_of) const {
    constexpr size_t kStep = Form::kPart != 0 ? Form::kPart : Form::kGroup;
    begin(0, false, totals_of);
    for (size_t g = 0; g < Form::kScales; ++g) {
      HMT_UNROLL(2)
      for (size_t column = 0; column < Form::kGroup; column += kStep) {
        Sums sums;
        begin(part * Form::kArranged + g, column == 0, sums);
        const size_t quad = (g * Form::kGroup + column) / 4;
        add_quads(part, quad, quad + kStep / 4, sums);
        HMT_UNROLL(2)
        for (size_t p = 0; p < kPanels; ++p) {
          const I16v scale = load(panels[p][part].scales[g]);
          HMT_UNROLL(8)
          for (size_t t = 0; t < kTokens; ++t) {
            totals_of[t][p] = Form::kPart != 0 ? dot_pairs(totals_of[t][p], scale, sums[t][p])
                                               : add(totals_of[t][p], mul(scale, sums[t][p]));
          }
        }
      }
    }
  }

  HMT_INLINE void add_minima(size_t part, size_t p, size_t t, F16v e, F16v& total) const {
    const int32_t* sums = arranged[t] + part * Form::kArranged;
    I16v products = set1(int32_t{0});
    for (size_t k = 0; k < Form::kScales / 2; ++k) {
      products = dot_pairs(products, load(panels[p][part].minima[k]), sums[k]);
    }
    total = add(total, mul(to_float(products), mul(e, set1(scales[t][part]))));
  }

  HMT_INLINE void end_block(size_t part, size_t place, const Sums& sums) const {
    HMT_UNROLL(2)
    for (size_t p = 0; p < kPanels; ++p) {
      const Unpacked<Form>& from = panels[p][part];
      const F16v d = load(from.d[place]);
      HMT_UNROLL(8)
      for (size_t t = 0; t < kTokens; ++t) {
        const F16v scale = set1(scales[t][scales_each == 1 ? part : part * scales_each + place]);
        F16v total = load(totals[p] + 16 * t);
        total = add(total, mul(to_float(sums[t][p]), mul(d, scale)));
        if (Form::kCorrection == Correction::kPairs) {
          add_minima(part, p, t, load(from.e[place]), total);
        }
        if (Form::kCorrection == Correction::kSums) {
          const F16v sum = set1(static_cast<float>(arranged[t][part * Form::kArranged + place]));
          total = add(total, mul(sum, mul(load(from.e[place]), scale)));
        }
        store(totals[p] + 16 * t, total);
      }
    }
  }

  // `columns` columns from the first of the panels on.
  HMT_INLINE void run(size_t columns) const {
    for (size_t block = 0; block < columns / Form::kNumbers; ++block) {
      const size_t part = block / Form::kBlocks, place = block % Form::kBlocks;
      Sums sums;
      if (Form::kScales != 0) {
        add_groups(part, sums);
      } else {
        begin(part * Form::kArranged + place, true, sums);
        // Eight words at a time, as loops are unrolled.
        for (size_t quad = 0; quad < Form::kNumbers / 4; quad += 8) {
          const size_t at = place * Form::kNumbers / 4 + quad;
          add_quads(part, at, at + 8, sums);
        }
      }
      end_block(part, place, sums);
    }
  }
};

// Tokens [first, first + count), fewer than kTokens only at the end, where the last stands in.
template <typename Form, size_t kTokens, size_t kPanels>
__attribute__((noinline)) void block_tile(const BlockCall& call, size_t first, size_t count,
                                          size_t part, size_t columns,
                                          const Unpacked<Form>* const* panels,
                                          float* const* totals) {
  BlockTile<Form, kTokens, kPanels> tile;
  tile.scales_each = call.scales_each;
  alignas(64) float own[kPanels][kTokens * 16];
  for (size_t t = 0; t < kTokens; ++t) {
    const size_t token = first + (t < count ? t : count - 1);
    tile.x[t] = call.codes + token * call.codes_stride + part * kActivationBlock;
    tile.scales[t] = call.in.scales + token * call.in.scale_stride + part * call.scales_each;
    tile.arranged[t] = call.arranged + token * call.arranged_stride + part * Form::kArranged;
  }
  for (size_t p = 0; p < kPanels; ++p) {
    tile.panels[p] = panels[p];
    tile.totals[p] = own[p];
    for (size_t t = 0; t < kTokens; ++t) {
      store(own[p] + 16 * t, load(totals[p] + 16 * (first + (t < count ? t : count - 1))));
    }
  }
  tile.run(columns);
  for (size_t p = 0; p < kPanels; ++p) {
    std::memcpy(totals[p] + 16 * first, own[p], count * 16 * sizeof(float));
  }
}

#if defined(HMT_AVX512)
constexpr size_t kBlockTokens = 6, kBlockPanels = 2;
#elif defined(HMT_AVX2)
constexpr size_t kBlockTokens = 4, kBlockPanels = 1;
#else
constexpr size_t kBlockTokens = 2, kBlockPanels = 1;
#endif

template <typename Form>
void block_tiles(const BlockCall& call, size_t part, size_t columns, size_t count,
                 const Unpacked<Form>* const* panels, float* const* totals) {
  constexpr size_t kMost = kBlockTokens;
  for (size_t token = 0; token < call.in.tokens; token += kMost) {
    const size_t left = call.in.tokens - token, tokens = left < kMost ? left : kMost;
    size_t p = 0;
    for (; kBlockPanels == 2 && p + 2 <= count; p += 2) {
      auto* tile = block_tile<Form, kMost, kBlockPanels>;
      if (tokens <= 2) tile = block_tile<Form, 2, kBlockPanels>;
      else if (tokens <= 4 && kMost > 4) tile = block_tile<Form, 4, kBlockPanels>;
      tile(call, token, tokens, part, columns, panels + p, totals + p);
    }
    for (; p < count; ++p) {
      auto* tile = block_tile<Form, kMost, 1>;
      if (tokens <= 2) tile = block_tile<Form, 2, 1>;
      tile(call, token, tokens, part, columns, panels + p, totals + p);
    }
  }
}

// Panels that share a tile of tokens in L1, and how much of their columns is unpacked at a time: so
// much that a tile's sums are loaded seldom, so little that it stays in L2, or in L1 with few tokens.
constexpr size_t kPanelsTogether = 4;
constexpr size_t kPartsForMany = 16, kPartsForFew = 2;  // of 256 columns

inline void write_rows(const float* totals, size_t tokens, size_t rows, float* out, size_t stride) {
  const size_t width = (rows < kPanelRows ? rows : kPanelRows) * sizeof(float);
  for (size_t t = 0; t < tokens; ++t) std::memcpy(out + t * stride, totals + 16 * t, width);
}

// `tiles` multiplies all tokens with panels that were unpacked.
template <typename Form, typename Unpack, typename Tiles>
void multiply_unpacked(const BlockCall& call, const Unpack& unpack_some, const Tiles& tiles,
                       size_t first_row, size_t end_row, float* out, size_t stride) {
  const size_t tokens = call.in.tokens;
  const size_t most = tokens > kTokenBlock ? kPartsForMany : kPartsForFew;
  const size_t parts = call.superblocks < most ? call.superblocks : most;
  Scratch scratch(kPanelsTogether * (parts * sizeof(Unpacked<Form>) + tokens * 64));
  auto* memory = scratch.take<Unpacked<Form>>(kPanelsTogether * parts);
  float* sums = scratch.take<float>(kPanelsTogether * tokens * 16);
  for (size_t row = first_row; row < end_row; row += kPanelsTogether * kPanelRows) {
    const size_t left = (end_row - row + kPanelRows - 1) / kPanelRows;
    const size_t count = left < kPanelsTogether ? left : kPanelsTogether;
    std::memset(sums, 0, count * tokens * 64);
    const Unpacked<Form>* panels[kPanelsTogether];
    float* totals[kPanelsTogether];
    for (size_t part = 0; part < call.superblocks; part += parts) {
      const size_t rest = call.superblocks - part, some = rest < parts ? rest : parts;
      for (size_t p = 0; p < count; ++p) {
        panels[p] = memory + p * parts;
        totals[p] = sums + p * tokens * 16;
        unpack_some(call.w, row / kPanelRows + p, part, some, memory + p * parts);
      }
      const size_t end = (part + some) * kActivationBlock;
      const size_t columns = (end < call.w.columns ? end : call.w.columns) - part * kActivationBlock;
      tiles(part, columns, count, panels, totals);
    }
    for (size_t p = 0; p < count; ++p) {
      const size_t begin = row + p * kPanelRows;
      write_rows(totals[p], tokens, end_row - begin, out + begin - first_row, stride);
    }
  }
}

template <typename Form, typename Unpack>
void multiply_int8_blocks(const BlockCall& call, const Unpack& unpack_some, size_t first_row,
                          size_t end_row, float* out, size_t stride) {
  multiply_unpacked<Form>(
      call, unpack_some,
      [&](size_t part, size_t columns, size_t count, const Unpacked<Form>* const* panels,
          float* const* totals) { block_tiles<Form>(call, part, columns, count, panels, totals); },
      first_row, end_row, out, stride);
}

template <typename Type>
void multiply_one_token(const BlockCall& call, size_t first_row, size_t end_row, float* out) {
  const size_t together = reads_far_ahead() ? 1 : 2;
  for (size_t row = first_row; row < end_row; row += together * kPanelRows) {
    const size_t left = (end_row - row + kPanelRows - 1) / kPanelRows;
    const size_t count = left < together ? left : together;
    alignas(64) float lanes[2][16];
    OneToken<Type>::run(call, row / kPanelRows, count, lanes);
    for (size_t p = 0; p < count; ++p) {
      const size_t begin = row + p * kPanelRows;
      write_rows(lanes[p], 1, end_row - begin, out + begin - first_row, 0);
    }
  }
}

}  // namespace hmt::HMT_ISA
