// Weights of 4 bits in panels of 16 rows: int4 groups, NVFP4, MXFP4.
#include "linear/panel_decode.h"
#include "linear/panels_float.h"
#include "linear/panels_int8.h"

namespace hmt::HMT_ISA {
namespace {

size_t arranged_bytes(const Weight& w, size_t, bool bf16) {
  const size_t each =
      w.int8_activations ? groups_of(w) * sizeof(int32_t) : FloatLayout(w, bf16).bytes();
  return each * kTokenBlock;
}

void arrange(const Weight& w, const Inputs& in, size_t block, uint8_t* arranged) {
  if (w.int8_activations) {
    group_starts(w, in, block, reinterpret_cast<int32_t*>(arranged));
  } else {
    arrange_float(w, in, block, arranged);
  }
}

void multiply(const Weight& w, const Inputs& in, size_t first_row, size_t end_row, float* out,
              size_t out_stride) {
  if (w.int8_activations) {
    multiply_int8(w, in, first_row, end_row, out, out_stride);
  } else {
    multiply_float(w, in, first_row, end_row, out, out_stride);
  }
}

}  // namespace

const LinearKernels panel_kernels = {arranged_bytes, arrange, multiply, decode_panels};

}  // namespace hmt::HMT_ISA
