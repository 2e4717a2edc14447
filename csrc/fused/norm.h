// Root mean square norms (arXiv 1910.07467), alone, after an addition, and before a quantisation; and
// the addition that comes without a norm.
//
// Sums of squares are added in one order on every instruction set, so that all of them round alike.
#pragma once

#include "base/dtype.h"
#include "base/isa.h"
#include "linear/linear.h"

namespace hmt {

using std::size_t;

// x [tokens, heads, width] over its last dimension; heads is 1 for a norm of whole tokens.  Head h
// of token t begins `token_stride * t + head_stride * h` numbers after the first one.  x and out
// are of `type` and may be the same memory.
struct Norm {
  DType type;
  size_t tokens, heads, width;
  const void* x;
  size_t x_token_stride, x_head_stride;
  void* out;
  size_t out_token_stride, out_head_stride;
  const void* weight;  // [width]
  DType weight_type;
  float eps, offset;
  // Null, or [tokens, heads, width] with the strides of x: x is added to it first, rounded to
  // `type`, in place, and the sum is what is normed.
  void* residual;
};

// With offset 0, x / rms is rounded to `type` and multiplied with the weight in `type`; otherwise
// with (offset + weight) in f32, and rounded last.
void rms_norm(const Norm& norm, size_t threads);

// The same, and the codes of the rounded result.  heads is 1, and codes.stride % 64 == 0.
void rms_norm_quantize(const Norm& norm, const CodeRows& codes, size_t threads);

// sum += x, `count` numbers of `type`, each sum rounded to it.
void add(DType type, size_t count, const void* x, void* sum, size_t threads);

struct NormKernels {
  // Tokens [begin, end).  `wide` is null, or f32 [width]: the last row's rounded result.
  void (*rms_norm)(const Norm& norm, size_t begin, size_t end, float* wide);
  void (*add)(DType type, size_t count, const void* x, void* sum);
};
HMT_TABLES(NormKernels, norm_kernels)

}  // namespace hmt
