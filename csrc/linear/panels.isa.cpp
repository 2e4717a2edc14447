// Weights of 4 bits in panels of 16 rows: int4 groups, NVFP4, MXFP4.  Their products with floats are
// compiled by themselves, in panels_float.isa.cpp: both take a compiler a minute where it sanitizes.
#include "linear/panel_decode.h"
#include "linear/panels_int8.h"
#include "linear/panels_parts.h"
#if defined(HMT_AMX)
#include "linear/panels_amx.h"
#endif

namespace hmt::HMT_ISA {
namespace {

size_t arranged_bytes(const Weight& w, size_t, bool bf16) {
  const size_t each =
      w.int8_activations ? groups_of(w) * sizeof(int32_t) : float_arranged_bytes(w, bf16);
  return each * kTokenBlock;
}

void arrange(const Weight& w, const Inputs& in, size_t block, uint8_t* arranged) {
  if (w.int8_activations) {
    group_starts(w, in, block, reinterpret_cast<int32_t*>(arranged));
  } else {
    arrange_floats(w, in, block, arranged);
  }
}

void multiply(const Weight& w, const Inputs& in, size_t first_row, size_t end_row, float* out,
              size_t out_stride) {
  if (!w.int8_activations) return multiply_floats(w, in, first_row, end_row, out, out_stride);
  const auto* starts = reinterpret_cast<const int32_t*>(in.arranged);
  const Int8Call call{w, in, starts, groups_of(w), panel_groups(w), code_factor(w)};
#if defined(HMT_AMX)
  if (tiles_pay(w, in.tokens)) {
    return multiply_amx(call, nibble_of(w), first_row, end_row, out, out_stride);
  }
#endif
  multiply_int8(call, nibble_of(w), first_row, end_row, out, out_stride);
}

}  // namespace

const LinearKernels panel_kernels = {arranged_bytes, arrange, multiply, decode_panels};

}  // namespace hmt::HMT_ISA
