// Weights of 4 bits in panels of 16 rows times activations in floats; see panels.isa.cpp.
#include "linear/panels_float.h"

#include "linear/panels_parts.h"

namespace hmt::HMT_ISA {

size_t float_arranged_bytes(const Weight& w, bool bf16) { return FloatLayout(w, bf16).bytes(); }

void arrange_floats(const Weight& w, const Inputs& in, size_t block, uint8_t* arranged) {
  arrange_float(w, in, block, arranged);
}

void multiply_floats(const Weight& w, const Inputs& in, size_t first_row, size_t end_row, float* out,
                     size_t out_stride) {
  multiply_float(w, in, first_row, end_row, out, out_stride);
}

}  // namespace hmt::HMT_ISA
