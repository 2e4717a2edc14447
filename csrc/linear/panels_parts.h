// What panels_float.isa.cpp compiles for panels.isa.cpp.
#pragma once

#include "linear/kernels.h"

namespace hmt::HMT_ISA {

// See LinearKernels: for activations that are floats.
size_t float_arranged_bytes(const Weight& w, bool bf16);
void arrange_floats(const Weight& w, const Inputs& in, size_t block, uint8_t* arranged);
void multiply_floats(const Weight& w, const Inputs& in, size_t first_row, size_t end_row, float* out,
                     size_t out_stride);

}  // namespace hmt::HMT_ISA
