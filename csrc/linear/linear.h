// Linear layers: out = x times the transpose of weights, in any encoding.
//
// Results do not depend on `threads` nor on the other tokens of a call.  (Products with float
// activations may differ in their last bits between few and many tokens.)
#pragma once

#include <functional>
#include <vector>

#include "base/dtype.h"
#include "linear/low_rank.h"
#include "linear/weight.h"

namespace hmt {

// One of several weights that are multiplied with the same x.
struct Projection {
  const Weight* weight;
  const void* bias;  // [rows] of type bias_type, or null
  DType bias_type;
  const std::vector<LowRank>* added = nullptr;  // what adapters add to some rows; null for nothing
};

// out[:, o_i : o_i + rows_i] = x weights_i^T + bias_i, where o_i are the rows before.
//   x [tokens, columns], out [tokens, at least the sum of all rows]; f32, bf16 or f16
//
// Activations as they are: products and sums in f32 (bf16 x with bf16 weights may round pairs of
// products as VDPBF16PS does).  int8 activations: see `quantize_tokens`; the sum of products over a
// group of columns is an exact integer, times the group's scale (and factor) in f32; groups are
// added in f32 in ascending order; times the token's scale; plus bias in f32; then rounded.  So the
// result is the same to the bit on every instruction set.  Packing::kBlocks: blocks of columns take
// the place of groups, and the scale of x is multiplied with theirs.  So it is in panels where x has
// a scale per group.  See `linear_int8_blocks` and `linear_int8_groups` in
// kernels/reference/matmul.py.
//
// What adapters add is added to the rounded result: see low_rank.h.
void linear(const Projection* projections, size_t count, const ConstMatrix& x, const Matrix& out,
            size_t threads);

// Tokens rounded to int8, as quantize_tokens makes them: with one scale each where scale_columns
// is 0, else with one per so many columns, the last perhaps fewer.
struct CodeRows {
  int8_t* codes;  // [tokens, stride]
  size_t stride;
  float* scales;  // [tokens, scale_stride]
  int32_t* sums;  // [tokens, stride / 16]
  size_t scale_columns, scale_stride;

  // Rounds token t, whose numbers are x.
  void fill(size_t t, const float* x, size_t columns) const;
};

// `linear` of weights that all take int8 activations in one form, and have nothing `added`, where
// `write` fills in the codes; x only says how many tokens and columns there are.
void linear_of_codes(const Projection* projections, size_t count, const ConstMatrix& x,
                     const Matrix& out, const std::function<void(const CodeRows&)>& write,
                     size_t threads);

// Rows [first, first + out.rows) as numbers, each computed in f32 and rounded once.
void dequantize(const Weight& weight, size_t first, const Matrix& out, size_t threads);

// Rounds each token to int8: scale = max|x| / 127, codes -127..127, ties to even, zero beyond the
// columns.  sums may be null; see CodeRows.
void quantize_tokens(const ConstMatrix& x, const CodeRows& rows, size_t threads);

}  // namespace hmt
