// Blocks of GGUF files (ggml's ggml-common.h) brought into the form that kernels read, in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/isa.h"

namespace hmt {

using std::size_t;

enum class Ggml : int {
  kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kMXFP4
};

// Rows that are unpacked, and where to: all of a Weight in the format that Python's
// quant/importers/gguf.py has for the type.
struct GgmlRows {
  const uint8_t* blocks;  // [rows, bytes of a row]
  size_t rows, columns;
  size_t turned;          // rows of a head whose halves were published by turns, else 0
  uint8_t* data;          // 4 bits: panels; others: int8 [rows, columns]
  void* scales;           // f32; of Q4_0 and Q4_1 f16; of MXFP4 uint8
  void* minima;           // the same, or null
};

struct GgmlKernels {
  // Rows of 16 from 16 * first on: `count` of them, the last perhaps not full.
  void (*unpack)(Ggml kind, const GgmlRows& rows, size_t first, size_t count);
};
HMT_TABLES(GgmlKernels, ggml_kernels)

// All rows.  Numbers are those of ggml's dequantisers to the last bit of f32.
void unpack_ggml(Ggml kind, const GgmlRows& rows, size_t threads);

}  // namespace hmt
