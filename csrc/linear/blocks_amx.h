// Unpacked blocks of 32 numbers times int8 activations with AMX tiles.  Only for blocks.isa.cpp.
//
// A block's bytes of a panel are a B tile as they are, and fill half of one.  Its products of up to
// 32 tokens go through L1 to be multiplied with their scales, as in blocks_int8.h.
#pragma once

#include "linear/blocks_int8.h"
#include "linear/panels_amx.h"

namespace hmt::HMT_ISA {

constexpr size_t kAmxBlockTokens = 16;  // from which on tiles pay

template <typename Form>
struct AmxBlocks {
  static_assert(Form::kNumbers == 32, "see blocks_folded.h for others");
  static constexpr size_t kColumns = 32;

  AmxBlocks(const BlockCall& c, const Unpacked<Form>& f, size_t p) : call(c), from(f), part(p) {}

  const BlockCall& call;
  const Unpacked<Form>& from;  // 256 columns
  size_t part;
  alignas(64) int32_t products[kActivationBlock / kColumns][512];  // not initialised

  HMT_INLINE void end_token(size_t t, size_t token, size_t blocks, float* totals) const {
    const int32_t* arranged =
        call.arranged + token * call.arranged_stride + part * Form::kArranged;
    const float* scales = call.in.scales + token * call.in.scale_stride;
    F16v total = load(totals);
    for (size_t place = 0; place < blocks; ++place) {
      I16v sum = load(products[place] + 16 * t);
      if (Form::kCorrection == Correction::kStarts) sum = add(sum, set1(arranged[place]));
      const F16v scale = set1(scales[call.scale_at(part, place)]);
      total = add(total, mul(to_float(sum), mul(load(from.d[place]), scale)));
      if (!Form::kMinima) continue;
      const F16v e = mul(load(from.e[place]), scale);
      total = add(total, mul(set1(static_cast<float>(arranged[place])), e));
    }
    store(totals, total);
  }

  // `columns` of the 256 exist; totals [tokens, 16].
  void run(size_t columns, float* totals) {
    const size_t tokens = call.in.tokens, stride = call.codes_stride;
    for (size_t token = 0; token < tokens;) {
      const size_t left = tokens - token, count = left >= 32 ? 32 : left < 16 ? left : 16;
      const int8_t* x = call.codes + token * stride + part * kActivationBlock;
      for (size_t g = 0; g < columns / kColumns; ++g) {
        const int8_t* mine = x + g * kColumns;
        const uint8_t* codes = from.codes[g * kColumns / 4];
        if (count == 32) multiply_tiles(mine, stride, codes, kColumns, 1, products[g]);
        else if (count == 16) multiply_tile_alone(mine, stride, codes, kColumns, 1, products[g]);
        else multiply_tile_rest(mine, stride, codes, kColumns, 1, products[g]);
      }
      for (size_t t = 0; t < count; ++t) {
        end_token(t, token + t, columns / kColumns, totals + 16 * (token + t));
      }
      token += count;
    }
  }
};

template <typename Form, typename Unpack>
void multiply_amx_blocks(const BlockCall& call, const Unpack& unpack_some, size_t first_row,
                         size_t end_row, float* out, size_t stride) {
  const Tiles tiles(panel_tiles(AmxBlocks<Form>::kColumns, call.in.tokens % 16));
  multiply_unpacked<Form>(
      call, unpack_some,
      [&](size_t part, size_t columns, size_t count, const Unpacked<Form>* const* panels,
          float* const* totals) {
        // All panels in turn, while their tokens' codes are in L2.
        for (size_t done = 0; done < columns; done += kActivationBlock) {
          const size_t left = columns - done, at = done / kActivationBlock;
          for (size_t p = 0; p < count; ++p) {
            AmxBlocks<Form> blocks(call, panels[p][at], part + at);
            blocks.run(left < kActivationBlock ? left : kActivationBlock, totals[p]);
          }
        }
      },
      first_row, end_row, out, stride);
}

}  // namespace hmt::HMT_ISA
