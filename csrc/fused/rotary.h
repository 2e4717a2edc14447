// Rotary positions (arXiv 2104.09864): the first numbers of every head turned in pairs.
#pragma once

#include "base/dtype.h"
#include "base/isa.h"

namespace hmt {

using std::size_t;

// [tokens, heads, dim]; head h of token t begins `token_stride * t + head_stride * h` numbers after
// the first one.  x and out may be the same memory, with the same strides.
struct Heads {
  size_t heads, dim;
  const void* x;
  size_t x_token_stride, x_head_stride;
  void* out;
  size_t out_token_stride, out_head_stride;
};

// Turns `count` groups of heads (queries and keys) by the same angles.
//
// cos, sin   f32 [tokens, turned], each angle twice, as [angles, angles]
// turned     numbers per head that turn; those after them are copied
//
// Pairs are (i, i + turned / 2), or (2 i, 2 i + 1) when interleaved; then the result has the first
// numbers of all pairs before the second ones.  Cosines, sines, products and sums are each rounded
// to `type`, so the result equals torch's in that type to the bit.
struct Rotation {
  DType type;
  size_t tokens, turned;
  const float* cos;
  const float* sin;
  bool interleaved;
  const Heads* groups;
  size_t count;
};

void rotate(const Rotation& rotation, size_t threads);

struct RotaryKernels {
  // Tokens [begin, end).  `work` is f32 [rotation_work(turned)].
  void (*rotate)(const Rotation& rotation, size_t begin, size_t end, float* work);
};
HMT_TABLES(RotaryKernels, rotary_kernels)

// Cosines, sines and the numbers of a head, each with room to read whole registers.
inline size_t rotation_work(size_t turned) { return 2 * (turned / 2 + 16) + turned + 32; }

}  // namespace hmt
