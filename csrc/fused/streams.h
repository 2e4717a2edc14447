// Weights by which a token's residual streams are read, written and mixed (hyper-connections).
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "base/isa.h"

namespace hmt {

// products   f32 [tokens, streams * (streams + 2)]: for reading, for writing, for the mixture
// base       f32 of as many, added to products times scale [3], one number for each of the three
// read, spread   f32 [tokens, streams]
// mixed      f32 [tokens, streams, streams], after `iterations` of columns and rows
struct StreamMixes {
  std::size_t tokens, streams, iterations;
  float eps;
  const float* products;
  const float* base;
  const float* scale;
  float* read;
  float* spread;
  float* mixed;
};

// Every sum goes from the first number to the last, so that a token's bits are its own.
void mix_streams(const StreamMixes& call);

// Rows [tokens, streams * width] of `type`, and numbers of a token's streams in f32.
//
// x        [tokens, width] of `type`: what is read, or, where `mixed` is there, what is written
// weights  [tokens, streams]: x is the sum of weights times streams, or is multiplied with them
// mixed    [tokens, streams, streams], or null: out of stream k is weights[k] * x, and then the sum
//          of mixed[j, k] times stream j is added, one after the other
struct Streams {
  DType type;
  std::size_t tokens, streams, width;
  const void* rows;
  const float* weights;
  const float* mixed;
  void* x;
  void* out;
};

// Rounded once, at the end.
void read_streams(const Streams& call, std::size_t threads);
void write_streams(const Streams& call, std::size_t threads);

struct StreamKernels {
  void (*read)(const Streams& call, std::size_t begin, std::size_t end);  // tokens [begin, end)
  void (*write)(const Streams& call, std::size_t begin, std::size_t end);
};
HMT_TABLES(StreamKernels, stream_kernels)

}  // namespace hmt
