// Unpacked blocks of ggml's types times int8 activations with AMX tiles.  Only for blocks.isa.cpp.
//
// A group's bytes of a panel are a B tile as they are.  Its products of up to 32 tokens go through L1
// to the sums over groups, which are those of blocks_int8.h.
#pragma once

#include "linear/blocks_int8.h"
#include "linear/panels_amx.h"

namespace hmt::HMT_ISA {

constexpr size_t kAmxBlockTokens = 8;  // from which on tiles pay

template <typename Form>
struct AmxBlocks {
  static constexpr size_t kColumns = Form::kGroup < 64 ? Form::kGroup : 64;  // of a tile
  static constexpr size_t kGroups = 256 / Form::kGroup;

  AmxBlocks(const BlockCall& c, const Unpacked<Form>& f, size_t p) : call(c), from(f), part(p) {}

  const BlockCall& call;
  const Unpacked<Form>& from;  // 256 columns
  size_t part;
  alignas(64) int32_t products[kGroups][512];  // not initialised

  HMT_INLINE I16v group(size_t g, size_t t, const int32_t* arranged) const {
    const I16v sum = load(products[g] + 16 * t);
    return Form::kCorrection == Correction::kStarts ? add(sum, set1(arranged[g])) : sum;
  }

  HMT_INLINE I16v block_sum(size_t place, size_t t, const int32_t* arranged) const {
    if (Form::kScales == 0) return group(place, t, arranged);
    I16v total = set1(int32_t{0});
    HMT_UNROLL(16)
    for (size_t g = 0; g < Form::kScales; ++g) {
      I16v scale = load(from.scales[g]);
      if (Form::kPart != 0) scale = sar(shl(scale, 16), 16);
      total = add(total, mul(scale, group(g, t, arranged)));
    }
    return total;
  }

  HMT_INLINE void end_token(size_t t, size_t token, size_t blocks, float* totals) const {
    const int32_t* arranged =
        call.arranged + token * call.arranged_stride + part * Form::kArranged;
    const float* scales = call.in.scales + token * call.in.scale_stride;
    F16v total = load(totals);
    for (size_t place = 0; place < blocks; ++place) {
      const I16v sum = block_sum(place, t, arranged);
      const F16v scale = set1(scales[call.scale_at(part, place)]);
      total = add(total, mul(to_float(sum), mul(load(from.d[place]), scale)));
      if (!Form::kMinima) continue;
      const F16v e = mul(load(from.e[place]), scale);
      if (Form::kCorrection == Correction::kSums) {
        total = add(total, mul(set1(static_cast<float>(arranged[place])), e));
        continue;
      }
      I16v minima = set1(int32_t{0});
      for (size_t k = 0; k < Form::kScales / 2; ++k) {
        minima = dot_pairs(minima, load(from.minima[k]), arranged[k]);
      }
      total = add(total, mul(to_float(minima), e));
    }
    store(totals, total);
  }

  // `columns` of the 256 exist; totals [tokens, 16].
  void run(size_t columns, float* totals) {
    const size_t tokens = call.in.tokens, stride = call.codes_stride;
    for (size_t token = 0; token < tokens;) {
      const size_t left = tokens - token, count = left >= 32 ? 32 : left < 16 ? left : 16;
      const int8_t* x = call.codes + token * stride + part * kActivationBlock;
      for (size_t g = 0; g < columns / Form::kGroup; ++g) {
        const int8_t* mine = x + g * Form::kGroup;
        const uint8_t* codes = from.codes[g * Form::kGroup / 4];
        constexpr size_t kSteps = Form::kGroup / kColumns;
        if (count == 32) multiply_tiles(mine, stride, codes, kColumns, kSteps, products[g]);
        else if (count == 16) multiply_tile_alone(mine, stride, codes, kColumns, kSteps, products[g]);
        else multiply_tile_rest(mine, stride, codes, kColumns, kSteps, products[g]);
      }
      for (size_t t = 0; t < count; ++t) {
        end_token(t, token + t, columns / Form::kNumbers, totals + 16 * (token + t));
      }
      token += count;
    }
  }
};

template <typename Form, typename Unpack>
void multiply_amx_blocks(const BlockCall& call, const Unpack& unpack_some, size_t first_row,
                         size_t end_row, float* out, size_t stride) {
  const PanelTiles tiles(AmxBlocks<Form>::kColumns, call.in.tokens % 16);
  multiply_unpacked<Form>(
      call, unpack_some,
      [&](size_t part, size_t columns, size_t count, const Unpacked<Form>* const* panels,
          float* const* totals) {
        for (size_t p = 0; p < count; ++p) {
          for (size_t done = 0; done < columns; done += kActivationBlock) {
            const size_t left = columns - done;
            const size_t at = done / kActivationBlock;
            AmxBlocks<Form> blocks(call, panels[p][at], part + at);
            blocks.run(left < kActivationBlock ? left : kActivationBlock, totals[p]);
          }
        }
      },
      first_row, end_row, out, stride);
}

}  // namespace hmt::HMT_ISA
