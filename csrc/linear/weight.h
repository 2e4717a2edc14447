// One weight matrix as it lies in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hmt {

using std::size_t;

// What a stored code stands for, before scales.
enum class Code : int {
  kF32,
  kBF16,
  kF16,
  kFp8,   // float8 e4m3fn; its NaN codes are read as 480: whoever loads weights checks
  kInt8,  // -128..127
  kInt4,  // a nibble 0..15, minus 8, or minus the zero point
  kFp4,   // a nibble of e2m1 (OCP MX): 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives
  // ggml's types: see kBlocks.
  kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kIQ2_XXS, kIQ2_XS,
  kIQ2_S, kIQ3_XXS, kIQ3_S, kIQ1_S, kIQ1_M, kTQ1_0, kTQ2_0
};

// How codes lie in memory.
//
// kRows     row-major [rows, columns], as checkpoints publish them.  Not for 4-bit codes.
// kPanels   only for 4-bit codes.  Sixteen rows form a panel, so that one register holds the same
//           four columns of all of them; columns come in blocks of 32, and columns % 32 == 0:
//
//               data    uint8 [ceil(rows / 16), columns / 32, 4, 16, 4]
//               scales        [ceil(rows / 16), columns / tile_columns, 16]
//               zeros   uint8 [ceil(rows / 16), columns / tile_columns, 16], if there are any
//
//           Byte (p, b, j, r, i) holds, for row 16 p + r, column 32 b + 4 j + i in its low nibble
//           and column 32 b + 16 + 4 j + i in its high nibble.  Rows that do not exist hold zeros.
//           A panel is also the B tile that AMX multiplies with, once its nibbles are spread.
// kBlocks   ggml's blocks as a file has them, of a panel's sixteen rows together, transposed by
//           words of 32 bits; block_shapes.h has their sizes:
//
//               data    uint8 [ceil(rows / 16), columns / numbers, words, 16, 4]
//               scales  f16 [ceil(rows / 16), columns / numbers, 16], where bytes are no words
//
//           Byte (p, b, w, r, i) is byte 4 w + i of block b of row 16 p + r, once its f16 scale was
//           taken out.  Rows that do not exist hold zeros.
enum class Packing : int { kRows, kPanels, kBlocks };

enum class Scales : int { kNone, kF32, kBF16, kF16, kE4M3, kE8M0 };

// The number at (row, column) is
//
//     code * scale[row / tile_rows, column / tile_columns] * factor            without zeros
//     (nibble - zero) * scale * factor                                         kInt4 with zeros
//     code * scale * factor + minimum                                          with minima
//
// kRows: scales [ceil(rows / tile_rows), ceil(columns / tile_columns)], f32.  One scale per row is
// tile_columns == columns.  Only kInt8 has minima, and tile_rows is 1 then.
// 4-bit codes: tile_rows is 1, tile_columns 16, 32, 64 or 128.
// kBlocks: (d * scale) * code + e * minimum, with floats d and e of a block and integers of a group;
// tile_columns are the block's.
struct Weight {
  Code code;
  Packing packing;
  size_t rows, columns;
  const void* data;
  Scales scale_type;
  const void* scales;
  size_t tile_rows, tile_columns;
  const uint8_t* zeros;  // or null
  const void* minima;    // in the type and shape of the scales, or null
  float factor;
  bool int8_activations;  // multiply with activations rounded to int8, else as they are
  // Columns that share a scale of int8 activations: kPanels with tile_columns 32: 32 or 0, kBlocks:
  // 256, or 32 where blocks have 32 columns; 0: all of a token.
  size_t scale_columns = 0;
  // Columns of a panel in memory, where `columns` are some of them, neighbours; 0: the same.
  size_t panel_columns = 0;
  // Of types that look codes up: uint8 [entries, 8 or 4], kIQ1_*: 8 times the number, plus 8; others:
  // the magnitude plus 128.  Behind them the same by the rank of a number among those that there are,
  // in as few bits as ranks need: uint8 [entries] of the first half of each entry, from bit 0 on, and
  // of the second; where entries have 8 numbers uint8 [entries, 4] of two at a time, from bit 2 on.
  const uint32_t* grid = nullptr;
};

constexpr size_t kPanelRows = 16;
constexpr size_t kPanelBlock = 32;  // columns

}  // namespace hmt
