// Weights by which a token's residual streams are read, written and mixed (hyper-connections).
#pragma once

#include <cstddef>

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

}  // namespace hmt
