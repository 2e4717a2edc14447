// Consecutive decoder layers whose weights, pages and states all lie in memory, for a few tokens: one
// call.
//
// Each layer is the chain that Python runs, of the same kernels, so results are the same to the
// bit.  A token's weights push Python out of every cache: on two Zen 4 cores a layer's four calls
// took the host 60 microseconds in a 1.1B model, and 28 in one that is small enough to stay.  The
// twenty calls of a delta net with experts and a shared one (35B-A3B) took 900 on two Xeon cores.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "experts/experts.h"
#include "sublayers/mixers.h"

namespace hmt {

// An expert that all tokens share.  Where `gated`, its result is multiplied with the sigmoid of one
// number of the token.
struct SharedExpert {
  bool gated;
  Activation activation;
  Projection down;
};

// hidden += x; hidden += the sum of the chosen experts of norm(hidden), chosen by softmax, and of the
// shared one where there is one.
//
// inputs   of the norm: the router; of a shared expert its gate's one row, if gated, and gate and up
struct SparseLayer {
  NormWeight norm;
  std::vector<Projection> inputs;
  size_t top_k;
  bool renormalise;
  Activation activation;
  std::vector<Expert> experts;  // each at the index that is its id
  std::optional<SharedExpert> shared;
};

struct StackLayer {
  std::variant<AttentionLayer, DeltaLayer> mixer;
  std::variant<FeedForward, SparseLayer> second;
};

// The layer's projections but those of routed experts: of the mixer its inputs, what is behind gates
// and decays, and the output; of an FFN gate, up and down; of a sparse layer its inputs, and the
// shared expert's down.
std::vector<Projection*> projections_of(StackLayer& layer);

// Changes the step's hidden states.  `uses` counts how often each expert was read: those of all sparse
// layers, layer after layer.
//
// Takes memory for its intermediate results from the thread, which keeps it: some hundred tokens at
// most.  Returns how many experts were read, over all layers.
size_t run_stack(const std::vector<StackLayer>& layers, const StackStep& step, size_t threads);

}  // namespace hmt
