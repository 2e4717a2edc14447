// Blocks of ggml's types unpacked to bytes, 256 columns of a panel at a time.  Only for *.isa.cpp.
#pragma once

#include "linear/block_types.h"
#include "linear/panel_scales.h"

namespace hmt::HMT_ISA {

// What sums of products need besides them, once per group or block; see `arrange_blocks`.
enum class Correction {
  kNone,
  kStarts,  // where they begin, for codes that an offset made unsigned
  kPairs,   // sums of x times minima of groups
  kSums,    // sums of x times a minimum of the block
};

// All that a kernel for several tokens knows of a type.
//   part   columns whose sum of products stays below 2^15, so that it is multiplied with the scale
//          as a pair of 16-bit integers, in one instruction instead of four; else 0
template <size_t kNumbers_, size_t kGroup_, Correction kCorrection_, bool kSigned_, size_t kPart_>
struct BlockForm {
  static constexpr size_t kNumbers = kNumbers_, kGroup = kGroup_, kPart = kPart_;
  static constexpr Correction kCorrection = kCorrection_;
  static constexpr bool kSigned = kSigned_;
  static constexpr bool kMinima =
      kCorrection == Correction::kPairs || kCorrection == Correction::kSums;
  static constexpr size_t kBlocks = kActivationBlock / kNumbers;  // in 256 columns
  static constexpr size_t kScales = kGroup == kNumbers ? 0 : kNumbers / kGroup;
  // Integers that `arrange_blocks` writes for 256 columns of a token, 32 bits each.
  static constexpr size_t kArranged = kCorrection == Correction::kNone    ? 0
                                      : kCorrection == Correction::kPairs ? kScales / 2
                                                                          : 256 / kGroup;
};

constexpr size_t part_of(Code code) {
  // At most 15 * 127 * 16 of Q4_K; of others a whole group.
  const bool fits = code == Code::kQ2_K || code == Code::kQ3_K || code == Code::kQ4_K ||
                    code == Code::kIQ1_M;
  return fits ? 16 : 0;
}
constexpr Correction correction_of(Code code) {
  const BlockShape shape = block_shape(code);
  if (shape.minima) return shape.numbers == 32 ? Correction::kSums : Correction::kPairs;
  return kSignedBytes && shape.offset == 128 ? Correction::kNone : Correction::kStarts;
}
template <typename Type>
using FormOf = BlockForm<Type::kShape.numbers, Type::kShape.group, correction_of(Type::kCode),
                         kSignedBytes && Type::kShape.offset == 128, part_of(Type::kCode)>;

// 256 columns of a panel.
template <typename Form>
struct Unpacked {
  alignas(64) uint8_t codes[64][64];  // of four columns: four bytes of each row
  int32_t scales[Form::kScales + (Form::kScales == 0)][16];
  int32_t minima[Form::kScales / 2 + 1][16];
  float d[Form::kBlocks][16], e[Form::kBlocks][16];
};

inline size_t blocks_of(const Weight& w) {
  return panel_columns(w) / block_shape(w.code).numbers;
}

HMT_INLINE Block block_at(const Weight& w, size_t words, size_t index) {
  return {static_cast<const uint8_t*>(w.data) + index * words * 64,
          static_cast<const uint16_t*>(w.scales) + index * kPanelRows, w.grid};
}

template <typename Type, typename Form>
HMT_INLINE void unpack_scales(const Block& b, size_t place, Unpacked<Form>& out) {
  store(out.d[place], Type::d(b));
  if (Form::kMinima) store(out.e[place], Type::e(b));
  HMT_UNROLL(16)
  for (size_t g = 0; g < Form::kScales; ++g) {
    const I16v scale = Type::scale(b, g);
    store(out.scales[g], Form::kPart != 0 ? bits_in(scale, 0xffff) : scale);
  }
  if (Form::kCorrection != Correction::kPairs) return;
  HMT_UNROLL(4)
  for (size_t k = 0; k < Form::kScales / 4; ++k) {
    store(out.minima[2 * k], Type::pairs(b, k, 0));
    store(out.minima[2 * k + 1], Type::pairs(b, k, 1));
  }
}

template <typename Type, typename Form>
HMT_INLINE void unpack_block(const Block& b, size_t place, Unpacked<Form>& out) {
  constexpr uint32_t kFlip = Form::kSigned ? 0x80808080 : 0;
  uint8_t* codes = out.codes[place * Form::kNumbers / 4];
  Type::codes(b, [&](size_t quad, I16v words) __attribute__((always_inline)) {
    store_words(codes + 64 * quad, Form::kSigned ? differ(words, mask_of(kFlip)) : words);
  });
  unpack_scales<Type>(b, place, out);
}

// Columns [256 first, 256 (first + count)) of a panel, or as many as there are.
template <typename Type>
__attribute__((noinline)) void unpack(const Weight& w, size_t panel, size_t first, size_t count,
                                      Unpacked<FormOf<Type>>* out) {
  using Form = FormOf<Type>;
  const size_t end = w.columns / Form::kNumbers, begin = panel * blocks_of(w);
  for (size_t i = 0; i < count; ++i) {
    for (size_t place = 0; place < Form::kBlocks; ++place) {
      const size_t block = (first + i) * Form::kBlocks + place;
      if (block >= end) return;
      unpack_block<Type>(block_at(w, Type::kShape.words(), begin + block), place, out[i]);
    }
  }
}

// 256 columns as numbers [columns, 16], those of ggml's dequantisers to the last bit.
template <typename Form>
__attribute__((noinline)) void to_numbers(const Unpacked<Form>& from, int32_t offset, size_t columns,
                                          float (*out)[16]) {
  constexpr size_t kGroup = Form::kGroup;
  for (size_t g = 0; g < columns / kGroup; ++g) {
    const size_t block = g * kGroup / Form::kNumbers;
    F16v scale = load(from.d[block]), minimum = zero();
    if (Form::kScales != 0) {
      const I16v integer = load(from.scales[g]);
      scale = mul(scale, to_float(Form::kPart != 0 ? sar(shl(integer, 16), 16) : integer));
    }
    if (Form::kCorrection == Correction::kSums) minimum = load(from.e[block]);
    if (Form::kCorrection == Correction::kPairs) {
      const I16v pair = load(from.minima[g / 4 * 2 + g % 2]);
      minimum = mul(load(from.e[block]), to_float(bits_in(g % 4 < 2 ? pair : shr(pair, 16), 255)));
    }
    for (size_t quad = g * kGroup / 4; quad < (g + 1) * kGroup / 4; ++quad) {
      const I16v words = load_words(from.codes[quad]);
      for (int k = 0; k < 4; ++k) {
        const I16v code = Form::kSigned ? signed_byte(words, k)
                                        : sub(bits_in(shr(words, 8 * k), 255), set1(offset));
        F16v number = mul(to_float(code), scale);
        if (Form::kMinima) number = add(number, minimum);
        store(out[4 * quad + static_cast<size_t>(k)], number);
      }
    }
  }
}

}  // namespace hmt::HMT_ISA
