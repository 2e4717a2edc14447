// Kernels on raw pointers.  Arrays are dense and row-major; nothing is allocated that outlives a
// call.  `threads` is how many may compute, the caller's included.  Results do not depend on it,
// nor on the other tokens of the call.
#pragma once

#include <cstddef>
#include <cstdint>

// Loops are written so that compilers vectorise them; the best version for the machine is chosen
// when the library is loaded.
#ifdef HMT_HAVE_TARGET_CLONES
#define HMT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HMT_CLONES
#endif

namespace hmt {

using std::size_t;

// Rounds each token to int8 with one scale: scale = max|x| / 127, codes -127..127, ties to even.
//   x [tokens, columns], codes [tokens, columns], scales [tokens]
void quantize_tokens(const float* x, size_t tokens, size_t columns, int8_t* codes, float* scales);

// out = (x rounded by quantize_tokens) times the transpose of int8 weights.  Exact up to the
// multiplications with the row's and the token's scale; columns <= 132104 so that int32 suffices.
//   x [tokens, columns], weights [rows, columns], scales [rows], out [tokens, rows]
void linear_int8(const float* x, size_t tokens, const int8_t* weights, const float* scales,
                 size_t rows, size_t columns, float* out, size_t threads);

// The same for int4 weights, two codes (each + 8) in a byte, the even column in the low nibble.
// Group g's exact dot product times its scale is added to sum g mod 16 in ascending order; the 16
// sums are folded in halves.  group is 32, 64 or 128 and divides columns.
//   weights [rows, columns / 2], scales [rows, columns / group]
void linear_int4(const float* x, size_t tokens, const uint8_t* weights, const float* scales,
                 size_t rows, size_t columns, size_t group, float* out, size_t threads);

// Weights [rows, columns] in some encoding, with one f32 scale per tile of numbers, and what a
// number is: its code times the scale, rounded once.
//   kFp8    float8 e4m3fn; NaN codes are read as 480: whoever loads weights checks
//   kInt8   tiles of one row
//   kInt4   tiles of one row and 32, 64 or 128 columns; bytes as in linear_int4
enum class Code : int { kFp8, kInt8, kInt4 };
struct Encoded {
  Code code;
  const void* data;
  const float* scales;  // [ceil(rows / tile_rows), ceil(columns / tile_columns)]
  size_t columns, tile_rows, tile_columns;
};

// Rows [first, first + rows) as numbers: out [rows, columns].
void dequantize(const Encoded& weights, size_t first, size_t rows, float* out, size_t threads);

// out = x times the transpose of the weights, products and sums in f32.
//   x [tokens, columns], out [tokens, rows]
void linear_float(const float* x, size_t tokens, const Encoded& weights, size_t rows, float* out,
                  size_t threads);

// The same for bfloat16 weights [rows, columns].
void linear_bf16(const float* x, size_t tokens, const uint16_t* weights, size_t rows,
                 size_t columns, float* out, size_t threads);

// The sum, modulo 2^64, of the buffer's 64-bit words; reads every one once, on the whole pool.
uint64_t sum_words(const uint64_t* words, size_t count);

}  // namespace hmt
