// What linear.cpp asks of the files that are compiled once per instruction set.
#pragma once

#include "base/dtype.h"
#include "base/isa.h"
#include "linear/weight.h"

namespace hmt {

constexpr size_t kTokenBlock = 16;

// Pieces of about one size in which the tokens of a call are multiplied, up to `most` at a time, a
// multiple of 256.  A small last piece would have all weights unpacked for few tokens; and what is
// arranged for many is not made for few.
struct Pieces {
  size_t tokens, count;

  constexpr Pieces(size_t all, size_t most) : tokens(all), count((all + most - 1) / most) {}
  // The first token of a piece; of piece `count` the end.
  constexpr size_t begin(size_t piece) const {
    const size_t blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
    const size_t token = blocks * piece / count * kTokenBlock;
    return token < tokens ? token : tokens;
  }
};
constexpr size_t kFewestOfPieces = 112;  // where there are several

// Columns that share a scale of tokens rounded to int8, in each form that weights ask for; 0: all.
constexpr size_t kScaleColumns[] = {0, 32, 256};
constexpr size_t kCodeForms = sizeof kScaleColumns / sizeof *kScaleColumns;
constexpr size_t code_form(size_t scale_columns) {
  size_t form = 0;
  while (form + 1 < kCodeForms && kScaleColumns[form] != scale_columns) ++form;
  return form;
}

// Tokens rounded to int8 in one form.
struct TokenCodes {
  const int8_t* codes = nullptr;  // [tokens, stride]
  const float* scales = nullptr;  // [tokens, scale_stride]
  const int32_t* sums = nullptr;  // [tokens, stride / 16]: sums of the codes of 16 columns
  size_t scale_stride = 0;
};

// Activations, in the forms that kernels ask for.  Rows are padded with zeros to a multiple of 64
// columns: `stride` numbers (f32, bf16 or codes).
struct Inputs {
  size_t tokens, columns, stride;
  const float* f32 = nullptr;      // [tokens, stride], where !weight.int8_activations
  const uint16_t* bf16 = nullptr;  // the same where x is bf16, else null
  TokenCodes forms[kCodeForms] = {};  // of int8 activations; those that the call's weights ask for
  // The form that the weight is multiplied with: see `inputs_of`.
  const int8_t* codes = nullptr;
  const float* scales = nullptr;
  const int32_t* sums = nullptr;
  size_t scale_stride = 0;
  const uint8_t* arranged = nullptr;  // what `arrange` made, block after block, or null
};

struct LinearKernels {
  // Bytes that `arrange` writes for a block of 16 tokens; 0 where the kernel takes them as they
  // are.  A multiple of 64.  `tokens` are those of the whole call.
  size_t (*arranged_bytes)(const Weight& weight, size_t tokens, bool bf16);

  // Lays out tokens [block * 16, block * 16 + 16) for `multiply`; those that do not exist are zero.
  // Depends on the weight's encoding only, so that weights of one encoding share it.
  void (*arrange)(const Weight& weight, const Inputs& inputs, size_t block, uint8_t* arranged);

  // out[t * out_stride + (row - first_row)] for all tokens and rows [first_row, end_row), with all
  // scales applied.  first_row is a multiple of 16, and end_row is one or weight.rows.
  void (*multiply)(const Weight& weight, const Inputs& inputs, size_t first_row, size_t end_row,
                   float* out, size_t out_stride);

  // Rows [first, first + count) as numbers: out [count, columns].
  void (*decode)(const Weight& weight, size_t first, size_t count, float* out);
};

struct TokenKernels {
  // See quantize_tokens; one token.
  float (*quantize)(const float* x, size_t columns, int8_t* codes, size_t stride, int32_t* sums);
  // The same with a scale per 32 columns: scales [columns / 32].  columns % 32 == 0.
  void (*quantize_groups)(const float* x, size_t columns, int8_t* codes, size_t stride,
                          int32_t* sums, float* scales);
  // `count` numbers to f32 and from f32 (+ bias where there is one), rounded to nearest even.
  void (*widen)(const void* x, DType type, size_t count, float* out);
  void (*narrow)(const float* x, const void* bias, DType bias_type, size_t count, void* out,
                 DType type);
};

HMT_TABLES(LinearKernels, row_kernels)     // Packing::kRows
HMT_TABLES(LinearKernels, panel_kernels)   // Packing::kPanels
HMT_TABLES(LinearKernels, block_kernels)   // Packing::kBlocks
HMT_TABLES(TokenKernels, token_kernels)

}  // namespace hmt
