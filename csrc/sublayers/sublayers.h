// Chains of kernels that a decoder layer always runs in this order, in one call each.
//
// Results are those of the kernels one by one, to the bit.  What is saved is the way from Python
// and back, 3 to 5 microseconds a kernel: with a call for each, the host took 67 microseconds a
// layer, a ninth of a token of a 1B model at 4 bits.
#pragma once

#include <vector>

#include "base/dtype.h"
#include "fused/gated.h"
#include "linear/linear.h"

namespace hmt {

// The weight [width] of a root mean square norm; see fused/norm.h.
struct NormWeight {
  const void* weight;
  DType type;
  float eps, offset;
};

// What attention begins with: a norm, the projections of queries, keys and values, norms of their
// heads where `head_norms` says so, and their rotation.  Where `gated`, each head's query is followed
// by its gate.
struct AttentionInputs {
  NormWeight norm;
  std::vector<Projection> projections;  // query, key, value
  size_t heads, kv_heads, dim;
  bool head_norms;
  NormWeight query_norm, key_norm;  // [dim]
  bool gated = false;

  // Numbers from one query to the next, and of a token.
  size_t query_stride() const { return gated ? 2 * dim : dim; }
  size_t row() const { return heads * query_stride() + 2 * kv_heads * dim; }
};

// Cosines and sines as in fused/rotary.h.
struct Angles {
  const float* cos;
  const float* sin;
  size_t turned;
};

// hidden  [tokens, width], rows without a gap
// heads   [tokens, row()] of hidden's type: queries (and gates), keys, values
void attention_inputs(const AttentionInputs& layer, const ConstMatrix& hidden, const Angles& angles,
                      void* heads, size_t threads);

// hidden += x; hidden += post_norm(down(activation(gate(n)) * up(n))), where n = norm(hidden).
struct FeedForward {
  NormWeight norm;
  std::vector<Projection> gate_up;
  Activation activation;
  Projection down;
  bool has_post_norm;
  NormWeight post_norm;
};

// hidden  [tokens, width] of `type`, rows without a gap, changed in place
// x       the same; null where there is nothing to add
void feed_forward(const FeedForward& layer, DType type, size_t tokens, void* hidden, const void* x,
                  size_t threads);

}  // namespace hmt
