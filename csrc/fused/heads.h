// Products of each head's numbers with a matrix of its own, for few tokens.
#pragma once

#include "base/dtype.h"
#include "base/isa.h"

namespace hmt {

using std::size_t;

// out[t, h] = x[t, h] matrix[h], added up in f32 and rounded once to `type`.
//
// x        [tokens, heads, in]; a head's numbers side by side
// matrix   [heads, in, out]; neighbours along `out` side by side, or, if `transposed`, along `in`;
//          rows of it (columns, if transposed) `stride` numbers apart
// out      [tokens, heads, out], contiguous
struct HeadProducts {
  DType type;
  size_t tokens, heads, in, out;
  const void* x;
  size_t x_token_stride, x_head_stride;
  const void* matrix;
  size_t head_stride, stride;
  bool transposed;
  void* result;
};

void multiply_heads(const HeadProducts& products, size_t threads);

struct HeadKernels {
  // Heads [begin, end).  `work` is f32 [head_work(in)].
  void (*multiply)(const HeadProducts& products, size_t begin, size_t end, float* work);
};
HMT_TABLES(HeadKernels, head_kernels)

// A head's numbers, widened, with room to write whole registers.
inline size_t head_work(size_t in) { return in + 16; }

}  // namespace hmt
