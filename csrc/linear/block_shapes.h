// Sizes of the blocks of ggml's types, as files have them (ggml's ggml-common.h).
#pragma once

#include "linear/weight.h"

namespace hmt {

// Columns that share a scale where activations are rounded to int8 for Packing::kBlocks.
constexpr size_t kActivationBlock = 256;

// numbers  columns of a block
// bytes    of a block
// group    columns that share an integer scale
// offset   what makes codes unsigned; 128 where they take a whole int8
// minima   whether a group has a minimum; offset is 0 then
//
// Of bytes that are no whole words, the two of an f16 scale are taken out.
struct BlockShape {
  size_t numbers, bytes, group;
  int32_t offset;
  bool minima;

  constexpr size_t words() const { return bytes / 4; }
  constexpr bool takes_scale() const { return bytes % 4 != 0; }
};

constexpr BlockShape block_shape(Code code) {
  switch (code) {
    case Code::kQ5_0: return {32, 22, 32, 16, false};
    case Code::kQ5_1: return {32, 24, 32, 0, true};
    case Code::kQ8_0: return {32, 34, 32, 128, false};
    case Code::kQ2_K: return {256, 84, 16, 0, true};
    case Code::kQ3_K: return {256, 110, 16, 4, false};
    case Code::kQ4_K: return {256, 144, 32, 0, true};
    case Code::kQ5_K: return {256, 176, 32, 0, true};
    case Code::kQ6_K: return {256, 210, 16, 32, false};
    case Code::kIQ4_NL: return {32, 18, 32, 128, false};
    case Code::kIQ4_XS: return {256, 136, 32, 128, false};
    case Code::kIQ2_XXS: return {256, 66, 32, 128, false};
    case Code::kIQ2_XS: return {256, 74, 16, 128, false};
    case Code::kIQ2_S: return {256, 82, 16, 128, false};
    case Code::kIQ3_XXS: return {256, 98, 32, 128, false};
    case Code::kIQ3_S: return {256, 110, 32, 128, false};
    case Code::kIQ1_S: return {256, 50, 32, 9, false};
    case Code::kIQ1_M: return {256, 56, 16, 9, false};
    case Code::kTQ1_0: return {256, 54, 256, 1, false};
    case Code::kTQ2_0: return {256, 66, 256, 1, false};
    default: return {};
  }
}

// Bytes of a row of any weight, without scales that lie apart.
constexpr size_t row_bytes(const Weight& w) {
  switch (w.code) {
    case Code::kF32: return w.columns * 4;
    case Code::kBF16:
    case Code::kF16: return w.columns * 2;
    case Code::kFp8:
    case Code::kInt8: return w.columns;
    case Code::kInt4:
    case Code::kFp4: return w.columns / 2;
    default: break;
  }
  const BlockShape shape = block_shape(w.code);
  return w.columns / shape.numbers * shape.words() * 4;
}

}  // namespace hmt
