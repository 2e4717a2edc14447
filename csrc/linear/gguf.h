// Rows of blocks of GGUF files brought into panels (Packing::kPanels and kBlocks), in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hmt {

using std::size_t;

// Blocks change their places only: what is taken out of each lies apart, and the rest is transposed
// by words of 32 bits, sixteen rows together.
struct GgufRows {
  const uint8_t* blocks;       // [rows, count, bytes]
  size_t rows, count, bytes;
  size_t turned;               // rows of a head whose halves were published by turns, else 0
  size_t taken_at;             // where in a block the bytes are that are taken out
  size_t taken_bytes;          // of scales, and the same again of minima; 0: nothing is
  uint8_t* data;               // [panels, count, words, 16, 4]
  uint8_t *scales, *minima;    // [panels, count, 16, taken_bytes], or null
};

void pack_gguf(const GgufRows& rows, size_t threads);

}  // namespace hmt
