// Arithmetic as fast as it can be done: products of registers, nothing read from memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/isa.h"

namespace hmt {

enum class PeakOf : int { kInt8, kBF16, kF32 };

// Operations per second, a product and a sum counting as two, on `threads` threads for about
// `seconds`, with the best instruction of the instruction set in use.
double peak_ops(PeakOf kind, std::size_t threads, double seconds);

// Each does `rounds` rounds of independent products, returns the operations that these are, and
// adds to `sink` what depends on all of them.
struct PeakKernels {
  uint64_t (*int8)(std::size_t rounds, float* sink);
  uint64_t (*bf16)(std::size_t rounds, float* sink);  // f32 products where there are no others
  uint64_t (*f32)(std::size_t rounds, float* sink);
};
HMT_TABLES(PeakKernels, peak_kernels)

}  // namespace hmt
