// The middle of a gated feed-forward network (arXiv 2002.05202): activation(gate) * up.
#pragma once

#include "base/dtype.h"
#include "base/isa.h"

namespace hmt {

using std::size_t;

enum class Activation : int {
  kSilu,      // x / (1 + e^-x)
  kGelu,      // x / 2 (1 + erf(x / sqrt 2))
  kGeluTanh,  // x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  kClampedSwish,  // y / (1 + e^-1.702y), y = min(x, 7); `up` becomes 1 + max(-7, min(up, 7))
  kRelu,  // max(x, 0)
  kSigmoid,  // 1 / (1 + e^-x)
  kClampedSilu,  // silu of min(x, 10); `up` becomes max(-10, min(up, 10))
};

// gate, up and out are [tokens, width] of `type`, with row strides in numbers.
struct Gated {
  DType type;
  Activation activation;
  size_t tokens, width;
  const void* gate;
  size_t gate_stride;
  const void* up;
  size_t up_stride;
  void* out;
  size_t out_stride;
  bool one_gate = false;  // a token's only number of `gate` is that of its whole row
};

// The activation is computed in f32, to some units in the last place, and rounded to `type`; so is
// the product.
void gated(const Gated& call, size_t threads);

struct GatedKernels {
  void (*gated)(const Gated& call, size_t begin, size_t end);  // tokens [begin, end)
};
HMT_TABLES(GatedKernels, gated_kernels)

}  // namespace hmt
