// Mixture of experts: all chosen experts of all tokens in one call.
#pragma once

#include "base/dtype.h"
#include "experts/kernels.h"
#include "linear/linear.h"

namespace hmt {

// down(activation(gate(x)) * up(x)).  Gate and up have the same rows, and down as many columns.
struct Expert {
  int64_t id;  // what routings call it
  Projection gate, up, down;
};

// An expert without its first rows of gate and up, and without the columns of down that they go to.
// Its weights are `weights`, in panels like those of the expert, and borrow their memory.  `skipped`
// is a multiple of 32 and of the groups of down.
Expert rest_of(const Expert& expert, size_t skipped, Weight (&weights)[3]);

// Which experts each token goes to, no expert twice.
struct ExpertChoice {
  const int64_t* experts;  // [tokens, top_k], not negative
  const float* scales;     // [tokens, top_k]: what outputs are multiplied with
  size_t top_k;
};

// Where outputs are added up.
struct ExpertSum {
  float* total;   // [tokens, stride]
  size_t stride;  // at least the rows of down
  bool fresh;     // begin with zero, not with what is there
  Matrix result;  // total in another type, written last, where `data` is not null
};

// Adds scale * expert(x_t) to total_t, for each token t and each of its experts that is given here.
//
//   experts  in ascending order of ids; weights may lie anywhere
//   x        [tokens, columns of gate]; f32, bf16 or f16
//
// Rounds where layers called one after the other would: gate, up, activation, product and output,
// each to the type of x.  Outputs are added in f32 in ascending order of experts.  So results
// depend neither on threads, nor on other tokens, nor on how experts are spread over several calls
// that go through them in ascending order.
void routed_experts(const Expert* experts, size_t count, const ExpertChoice& routing,
                    const ConstMatrix& x, Activation activation, const ExpertSum& sum,
                    size_t threads);

}  // namespace hmt
