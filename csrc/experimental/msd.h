// Multi-scale decomposition: an int8 activation as two of 4 bits, x = 16 high + low + 8 with both
// halves in -8..7, so that processors that multiply 4-bit integers faster than bytes could use it.
// Equal to the direct product to the bit.  With bytes as the narrowest products it does twice the
// work: on Zen 4 it took 1.5 times as long for one token, for 256 tokens 2.2 times with groups of
// 128 and 2.6 times with groups of 32.
#pragma once

#include "base/isa.h"
#include "linear/kernels.h"

namespace hmt {

// out = x weight^T for weights kInt4 in panels, without zeros and minima, and int8 activations.
//   x [tokens, columns], out [tokens, at least rows]; f32, bf16 or f16
// The same bits as `linear` gives.
void msd_linear(const Weight& weight, const ConstMatrix& x, const Matrix& out, size_t threads);

struct MsdKernels {
  // The halves of `count` codes, a multiple of 32: of each 32, first the high ones, then the low.
  void (*split)(const int8_t* codes, size_t count, int8_t* halves);

  // As LinearKernels::multiply, with `inputs` arranged for it; halves [tokens, 2 * stride].
  void (*multiply)(const Weight& weight, const Inputs& inputs, const int8_t* halves,
                   size_t first_row, size_t end_row, float* out, size_t out_stride);
};
HMT_TABLES(MsdKernels, msd_kernels)

}  // namespace hmt
