// Blocks of 256 numbers times many tokens' int8 activations, with AMX tiles.  Only for
// blocks.isa.cpp.
//
// The scales of a block's groups are integers, so the sum over groups of scale * (sum of codes * x)
// is the sum of (scale * code) * x: the same integer.  A panel's blocks are unpacked to such products
// once for all tokens, split into two planes of bytes where 8 bits do not hold them.  Tiles then
// multiply 64 columns at a time, and a block's sum becomes a float once, as everywhere else.  (Groups
// of 32 or 16 columns would fill half or a quarter of a tile, and each group's products would go
// through memory to be multiplied with its scale.)
//
// A block's sum of x times minima comes from tiles of bf16.  Minima have at most 6 bits; a sum of 16
// codes is split into a multiple of 32 and the rest, of at most 7 and 5 bits.  All are exact in bf16,
// and all sums, below 2^24, exact in f32.
//
// 512 tokens times [14336, 4096] on 16 Xeon cores, in TMAC/s, before (group by group) and so: Q4_K 1.5
// and 4.0, Q6_K 0.9 and 4.7, Q2_K 0.8 and 5.6, Q3_K 0.9 and 6.4, IQ4_XS 1.6 and 4.4, IQ2_XXS 1.7 and
// 4.1; products of tiles in registers alone: 26 of one plane.  On a core of its own a step of Q4_K
// takes 438 cycles: its 18 products 288, storing their sums 80, ending tokens 70.
#pragma once

#include "linear/blocks_int8.h"
#include "linear/blocks_lookup.h"
#include "simd/tiles.h"

namespace hmt::HMT_ISA {

// Planes of bytes that hold scale * code for every block; 0: no integer scales of 256 columns.
//   Q2_K  15 * 3     Q3_K  -32 * -4 = 128 at most, -124 at least     TQ1_0, TQ2_0  1 * -1..2
//   Q6_K  -128 * -32 = 4096 is the largest of the others; IQ1_*  15 * 9 = 135 the smallest
constexpr size_t planes_of(Code code) {
  if (block_shape(code).numbers != 256) return 0;
  const bool fits = code == Code::kQ2_K || code == Code::kQ3_K || code == Code::kTQ1_0 ||
                    code == Code::kTQ2_0;
  return fits ? 1 : 2;
}

// 256 columns of a panel.
//   planes   1: minus scale * code, which unlike the product of Q3_K has no 128; 2: its low bytes,
//            unsigned, and its high bytes.  Of four columns: four bytes of each row, as tiles ask.
//   minima   of 16 columns: of each row twice, in bf16
//   d        with the sign of `planes`
template <size_t kPlanes, bool kMinima>
struct FoldedPanel {
  alignas(64) uint8_t planes[kPlanes][64][64];
  int32_t minima[kMinima ? 16 : 1][16];
  float d[16], e[16];
};
template <typename Type>
using FoldedOf = FoldedPanel<planes_of(Type::kCode), FormOf<Type>::kMinima>;

// A column's codes and the next but one's, times a scale, as 16-bit integers.
struct CodeProducts {
  I16v even, odd;
};

// Multiplies the codes of a group with its scale.
template <typename Form>
struct GroupScale {
  I16v even, odd, offsets;  // the scale beside even or odd codes; the offset times the scale

  HMT_INLINE GroupScale(const Unpacked<Form>& from, size_t g, int32_t offset) {
    const I16v scale = Form::kScales == 0 ? set1(int32_t{1}) : load(from.scales[g]);
    const I16v byte = bits_in(scale, 255);
    even = either(byte, shl(byte, 16));
    odd = shl(even, 8);
    const I16v product = bits_in(mul(sar(shl(scale, 24), 24), set1(offset)), 0xffff);
    offsets = either(product, shl(product, 16));
  }
  HMT_INLINE CodeProducts times(I16v codes) const {
    return {{_mm512_sub_epi16(_mm512_maddubs_epi16(codes.v, even.v), offsets.v)},
            {_mm512_sub_epi16(_mm512_maddubs_epi16(codes.v, odd.v), offsets.v)}};
  }
};

template <typename Form, size_t kPlanes>
__attribute__((noinline)) void fold(const Unpacked<Form>& from, int32_t offset,
                                    FoldedPanel<kPlanes, Form::kMinima>& out) {
  constexpr size_t kQuads = Form::kGroup / 4;
  const I16v none = set1(int32_t{0});
  for (size_t g = 0; g < 64 / kQuads; ++g) {
    const GroupScale<Form> scale(from, g, offset);
    HMT_UNROLL(4)
    for (size_t quad = g * kQuads; quad < (g + 1) * kQuads; ++quad) {
      CodeProducts products = scale.times(load_words(from.codes[quad]));
      if (kPlanes == 1) {
        products.even = {_mm512_sub_epi16(none.v, products.even.v)};
        products.odd = {_mm512_sub_epi16(none.v, products.odd.v)};
      } else {
        const __m512i high = _mm512_srli_epi16(products.even.v, 8);
        store_words(out.planes[kPlanes - 1][quad], {select(0x00ff00ff, high, products.odd.v)});
      }
      const __m512i odd = _mm512_slli_epi16(products.odd.v, 8);
      store_words(out.planes[0][quad], {select(0x00ff00ff, products.even.v, odd)});
    }
  }
  const F16v d = load(from.d[0]);
  store(out.d, kPlanes == 1 ? sub(zero(), d) : d);
  if (!Form::kMinima) return;
  store(out.e, load(from.e[0]));
  for (size_t i = 0; i < 16; ++i) {
    const size_t g = 16 * i / Form::kGroup;
    const I16v pair = load(from.minima[g / 4 * 2 + g % 2]);
    const I16v minimum = bits_in(g % 4 < 2 ? pair : shr(pair, 16), 255);
    const I16v number = bits(to_float(minimum));
    store(out.minima[i], either(number, shr(number, 16)));
  }
}

// 256 columns of 16 tokens, with zeros for those that do not exist.
//   codes    int8 [4][16 tokens][64]
//   scales   f32 [16 tokens]
//   sums     of 16 columns each, as two bf16: [16 tokens][16], where a type has minima
struct TokenTile {
  static constexpr size_t kScales = 4096, kSums = kScales + 64;
  static constexpr size_t bytes(bool minima) { return minima ? kSums + 1024 : kSums; }
};

template <typename Type>
HMT_INLINE __m512i codes_in_order(const int8_t* codes) {
  if constexpr (Lookup<Type>::kUnpacks) return in_order<Lookup<Type>::kOrder>(codes);
  else return _mm512_loadu_si512(codes);
}

HMT_INLINE void store_sums(const int32_t* sums, uint8_t* out) {
  const I16v all = load(sums), high = bits_in(all, ~uint32_t{31});
  const I16v first = shr(bits(to_float(high)), 16);
  store_words(out, either(first, bits_in(bits(to_float(sub(all, high))), 0xffff0000)));
}

// Block `block` of tokens as a TokenTile for each 256 columns.
template <typename Type>
void arrange_tiles(const Inputs& in, size_t block, uint8_t* out) {
  constexpr bool kMinima = FormOf<Type>::kMinima;
  constexpr size_t kBytes = TokenTile::bytes(kMinima);
  const size_t parts = in.columns / kActivationBlock, first = block * kTokenBlock;
  const size_t count = in.tokens - first < kTokenBlock ? in.tokens - first : kTokenBlock;
  if (count < kTokenBlock) std::memset(out, 0, parts * kBytes);
  for (size_t t = 0; t < count; ++t) {
    const size_t token = first + t;
    const int8_t* codes = in.codes + token * in.stride;
    const int32_t* sums = in.sums + token * (in.stride / 16);
    for (size_t part = 0; part < parts; ++part) {
      uint8_t* tile = out + part * kBytes;
      HMT_UNROLL(4)
      for (size_t step = 0; step < 4; ++step) {
        _mm512_store_si512(tile + 1024 * step + 64 * t,
                           codes_in_order<Type>(codes + part * kActivationBlock + 64 * step));
      }
      std::memcpy(tile + TokenTile::kScales + 4 * t, in.scales + token * in.scale_stride + part, 4);
      if (kMinima) store_sums(sums + 16 * part, tile + TokenTile::kSums + 64 * t);
    }
  }
}

// 256 columns of up to 32 tokens times one panel of two planes, or two panels of one plane: four
// products of tiles, of 64 columns each, for four loads.
template <size_t kPlanes, bool kMinima>
struct FoldedStep {
  static constexpr size_t kPanels = 3 - kPlanes;

  const FoldedPanel<kPlanes, kMinima>* panels[kPanels];
  float* totals[kPanels];    // of the first token
  const uint8_t* tokens[2];  // a TokenTile, or two
  size_t count;              // of tokens: 16 or 32, or 0
};

// Multiplies step after step.  What vector registers do for a step is spread over the products of the
// next one's tiles.
template <size_t kPlanes, bool kMinima>
class FoldedSteps {
 public:
  using Step = FoldedStep<kPlanes, kMinima>;

  void run(const Step& step) {
    if (step.count == 32 && before_.count == 32) {
      multiply<2, true>(step);
    } else {
      end();
      if (step.count == 32) multiply<2, false>(step);
      else multiply<1, false>(step);
    }
    before_ = step;
  }

  // Ends the tokens of the step that came last.
  void end() {
    for (size_t first = 0; first < before_.count; first += 8) end_tokens(first);
    before_.count = 0;
  }

 private:
  template <size_t kTiles, bool kEnds>
  __attribute__((noinline)) void multiply(const Step& step) {
    constexpr bool kTwo = kTiles == 2;
    const uint8_t *first = step.tokens[0], *second = step.tokens[kTiles - 1];
    const uint8_t* low = step.panels[0]->planes[0][0];
    const uint8_t* high = step.panels[Step::kPanels - 1]->planes[kPlanes - 1][0];
    settle_tile_memory();
    _tile_zero(0);
    if (kTwo) _tile_zero(1);
    _tile_zero(2);
    if (kTwo) _tile_zero(3);
    HMT_UNROLL(4)
    for (size_t i = 0; i < 4; ++i) {
      _tile_loadd(4, first + 1024 * i, 64);
      _tile_loadd(6, low + 1024 * i, 64);
      if (kPlanes == 1) _tile_dpbssd(0, 4, 6);
      else _tile_dpbsud(0, 4, 6);
      if (kTwo) _tile_loadd(5, second + 1024 * i, 64);
      if (kTwo && kPlanes == 1) _tile_dpbssd(1, 5, 6);
      else if (kTwo) _tile_dpbsud(1, 5, 6);
      _tile_loadd(7, high + 1024 * i, 64);
      _tile_dpbssd(2, 4, 7);
      if (kTwo) _tile_dpbssd(3, 5, 7);
      if (kEnds) end_tokens(8 * i);
    }
    settle_tile_memory();
    _tile_stored(0, sums_[0], 64);
    if (kTwo) _tile_stored(1, sums_[0] + 256, 64);
    _tile_stored(2, sums_[1], 64);
    if (kTwo) _tile_stored(3, sums_[1] + 256, 64);
    if (kMinima) multiply_minima<kTiles>(step);
    settle_tile_memory();
  }

  template <size_t kTiles>
  HMT_INLINE void multiply_minima(const Step& step) {
    constexpr bool kTwo = kTiles == 2, kBoth = Step::kPanels == 2;
    float* last = minima_[kBoth ? Step::kPanels - 1 : 0];
    _tile_zero(0);
    if (kTwo) _tile_zero(1);
    if (kBoth) _tile_zero(2);
    if (kBoth && kTwo) _tile_zero(3);
    _tile_loadd(4, step.tokens[0] + TokenTile::kSums, 64);
    _tile_loadd(6, step.panels[0]->minima, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwo) _tile_loadd(5, step.tokens[1] + TokenTile::kSums, 64);
    if (kTwo) _tile_dpbf16ps(1, 5, 6);
    if (kBoth) _tile_loadd(7, step.panels[Step::kPanels - 1]->minima, 64);
    if (kBoth) _tile_dpbf16ps(2, 4, 7);
    if (kBoth && kTwo) _tile_dpbf16ps(3, 5, 7);
    _tile_stored(0, minima_[0], 64);
    if (kTwo) _tile_stored(1, minima_[0] + 256, 64);
    if (kBoth) _tile_stored(2, last, 64);
    if (kBoth && kTwo) _tile_stored(3, last + 256, 64);
  }

  // Adds the products of tokens [first, first + 8) of the step before to their totals.
  HMT_INLINE void end_tokens(size_t first) const {
    const uint8_t* scales = before_.tokens[first / 16] + TokenTile::kScales + first % 16 * 4;
    HMT_UNROLL(2)
    for (size_t p = 0; p < Step::kPanels; ++p) {
      const F16v d = load(before_.panels[p]->d), e = load(before_.panels[p]->e);
      const int32_t *low = sums_[p] + 16 * first, *high = sums_[1] + 16 * first;
      const float* minima = minima_[kMinima ? p : 0] + 16 * first;
      float* totals = before_.totals[p] + 16 * first;
      HMT_UNROLL(8)
      for (size_t t = 0; t < 8; ++t) {
        const F16v scale = set1(from_bits(static_cast<uint32_t>(word_at(scales + 4 * t))));
        I16v sum = load(low + 16 * t);
        if (kPlanes == 2) sum = add(sum, shl(load(high + 16 * t), 8));
        F16v total = add(load(totals + 16 * t), mul(to_float(sum), mul(d, scale)));
        if (kMinima) total = add(total, mul(load(minima + 16 * t), mul(e, scale)));
        store(totals + 16 * t, total);
      }
    }
    settle_tile_memory();
  }

  // Products of the step before: [32 tokens][16 rows] of each plane or panel.
  alignas(64) int32_t sums_[2][512];
  alignas(64) float minima_[kMinima ? Step::kPanels : 1][512];
  Step before_{};
};

// Panels whose folded bytes for 256 columns, and whose totals, lie in L2 beside the tokens' tiles for
// these columns; and steps whose panels lie in L1 while tokens pass.
constexpr size_t kFoldedPanels = 8, kStepsTogether = 2;

template <size_t kPlanes, bool kMinima>
class FoldedRange {
 public:
  using Panel = FoldedPanel<kPlanes, kMinima>;
  using Step = FoldedStep<kPlanes, kMinima>;
  using Fold = void (*)(const Weight& weight, size_t panel, size_t part, Panel& out);

  FoldedRange(const BlockCall& call, Fold fold)
      : call_(call), fold_(fold), blocks_((call.in.tokens + kTokenBlock - 1) / kTokenBlock) {}

  void multiply(size_t first_row, size_t end_row, float* out, size_t stride) {
    const size_t each = blocks_ * 256;  // totals of a panel
    Scratch scratch(kFoldedPanels * sizeof(Panel) + (kFoldedPanels + 1) * each * sizeof(float));
    panels_ = scratch.take<Panel>(kFoldedPanels);
    totals_ = scratch.take<float>((kFoldedPanels + 1) * each);
    const Tiles tiles;
    for (size_t row = first_row; row < end_row; row += kFoldedPanels * kPanelRows) {
      const size_t left = (end_row - row + kPanelRows - 1) / kPanelRows;
      const size_t count = left < kFoldedPanels ? left : kFoldedPanels;
      std::memset(totals_, 0, count * each * sizeof(float));
      for (size_t part = 0; part < call_.superblocks; ++part) {
        for (size_t p = 0; p < count; ++p) fold_(call_.w, row / kPanelRows + p, part, panels_[p]);
        settle_tile_memory(panels_);
        multiply_part(row / kPanelRows, part, count);
      }
      for (size_t p = 0; p < count; ++p) {
        const size_t begin = row + p * kPanelRows;
        write_rows(totals_ + p * each, call_.in.tokens, end_row - begin, out + begin - first_row,
                   stride);
      }
    }
  }

 private:
  void multiply_part(size_t first_panel, size_t part, size_t count) {
    constexpr size_t kTogether = kStepsTogether * Step::kPanels;
    for (size_t p = 0; p < count; p += kTogether) {
      const size_t end = p + kTogether < count ? p + kTogether : count;
      for (size_t block = 0; block < blocks_; block += 2) {
        ask_ahead(first_panel + p, end - p, part, block);
        for (size_t q = p; q < end; q += Step::kPanels) steps_.run(step_of(q, end, part, block));
      }
    }
    steps_.end();
  }

  Step step_of(size_t panel, size_t end, size_t part, size_t block) const {
    Step step{};
    step.count = block + 1 < blocks_ ? 32 : 16;
    for (size_t p = 0; p < Step::kPanels; ++p) {
      const bool exists = panel + p < end;  // else the sums go to totals that are not read
      step.panels[p] = panels_ + (exists ? panel + p : panel);
      step.totals[p] = totals_ + ((exists ? panel + p : kFoldedPanels) * blocks_ + block) * 256;
    }
    const size_t bytes = TokenTile::bytes(kMinima);
    for (size_t t = 0; t < step.count / 16; ++t) {
      step.tokens[t] = call_.in.arranged + ((block + t) * call_.superblocks + part) * bytes;
    }
    return step;
  }

  // Asks for a share of the next 256 columns of some panels; all of them are read before.
  void ask_ahead(size_t panel, size_t count, size_t part, size_t block) const {
    const size_t words = block_shape(call_.w.code).words(), steps = (blocks_ + 1) / 2;
    if (part + 1 == call_.superblocks) return;
    for (size_t p = 0; p < count; ++p) {
      const Block next = block_at(call_.w, words, (panel + p) * blocks_of(call_.w) + part + 1);
      const size_t step = block / 2;
      for (size_t line = step * words / steps; line < (step + 1) * words / steps; ++line) {
        __builtin_prefetch(next.data + 64 * line, 0, 2);
      }
    }
  }

  const BlockCall& call_;
  Fold fold_;
  size_t blocks_;  // of 16 tokens
  Panel* panels_ = nullptr;
  float* totals_ = nullptr;  // [kFoldedPanels + 1, blocks_, 16, 16]
  FoldedSteps<kPlanes, kMinima> steps_;
};

template <typename Type>
__attribute__((noinline)) void fold_panel(const Weight& w, size_t panel, size_t part,
                                          FoldedOf<Type>& out) {
  Unpacked<FormOf<Type>> unpacked;
  if constexpr (Lookup<Type>::kUnpacks) unpack_by_lookup<Type>(w, panel, part, 1, &unpacked);
  else unpack<Type>(w, panel, part, 1, &unpacked);
  fold(unpacked, Type::kShape.offset, out);
}

template <typename Type>
void multiply_folded(const BlockCall& call, size_t first_row, size_t end_row, float* out,
                     size_t stride) {
  FoldedRange<planes_of(Type::kCode), FormOf<Type>::kMinima> range(call, fold_panel<Type>);
  range.multiply(first_row, end_row, out, stride);
}

}  // namespace hmt::HMT_ISA
