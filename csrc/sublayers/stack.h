// Consecutive decoder layers whose weights and pages all lie in memory, for a few tokens: one call.
//
// Each layer is the chain that Python runs, of the same kernels, so results are the same to the
// bit.  A token's weights push Python out of every cache: on two Zen 4 cores a layer's four calls
// took the host 60 microseconds in a 1.1B model, and 28 in one that is small enough to stay.
#pragma once

#include <variant>
#include <vector>

#include "attention/attention.h"
#include "experts/experts.h"
#include "sublayers/sublayers.h"

namespace hmt {

// x = post_norm(output(attention(attention_inputs(hidden))))
struct AttentionLayer {
  AttentionInputs inputs;
  size_t angles;  // which of the call's angles turn its heads
  Pages pages;    // of heads as wide as inputs.dim
  AttentionOptions options;
  Projection output;
  bool has_post_norm;
  NormWeight post_norm;
};

// hidden += x; hidden += the sum of the chosen experts of norm(hidden), chosen by softmax.
struct SparseLayer {
  NormWeight norm;
  Projection router;
  size_t top_k;
  bool renormalise;
  Activation activation;
  std::vector<Expert> experts;  // each at the index that is its id
};

struct StackLayer {
  AttentionLayer attention;
  std::variant<FeedForward, SparseLayer> second;
};

// The tokens of a step: x [tokens, width] of `type` without gaps, changed in place.  `uses` counts
// how often each expert was read: those of all sparse layers, layer after layer.
struct StackStep {
  DType type;
  size_t tokens, width;
  void* hidden;
  const PagedRun* runs;
  size_t run_count;
  const Angles* angles;
  int64_t* uses;
};

// Takes memory for its intermediate results from the thread, which keeps it: some hundred tokens at
// most.  Returns how many experts were read, over all layers.
size_t run_stack(const std::vector<StackLayer>& layers, const StackStep& step, size_t threads);

}  // namespace hmt
