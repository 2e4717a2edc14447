// What experts need of the files that are compiled once per instruction set.
#pragma once

#include "base/dtype.h"
#include "base/isa.h"
#include "fused/gated.h"

namespace hmt {

using std::size_t;

struct ExpertKernels {
  // out = activation(gate) * up for `count` numbers; gate, up, the activation and the product are
  // each rounded to `type`, as `gated` of fused/gated.h does.  Changes gate.
  void (*gated)(float* gate, const float* up, size_t count, Activation activation, void* out,
                DType type);
  // total += x * scale, product and sum rounded separately.
  void (*add_scaled)(float* total, const void* x, DType type, float scale, size_t count);
};

HMT_TABLES(ExpertKernels, expert_kernels)

}  // namespace hmt
