// Which experts each token goes to.
#pragma once

#include "base/dtype.h"
#include "base/isa.h"

namespace hmt {

using std::size_t;

// logits [tokens, experts] of `type`, rows `stride` numbers apart.
//
// Experts are ranked by their logit, or with `sigmoid` by the sigmoid of it plus `bias`; NaN ranks
// above everything, equal ones by the lower index.  Experts lie in `groups` equal groups; with more
// than one, only experts of the `kept_groups` best groups take part.  A group ranks as its best
// expert does, or with `sigmoid` by the sum of its two best.
//
// A chosen expert's scale is its softmax over all experts, or with `sigmoid` its sigmoid without
// the bias; divided by the sum of the chosen ones if `renormalise`; times `factor`.  All in f32.
struct Routing {
  DType type;
  size_t tokens, experts, chosen;
  const void* logits;
  size_t stride;
  bool sigmoid;
  const float* bias;  // [experts], with `sigmoid`
  size_t groups, kept_groups;
  bool renormalise;
  float factor;
  int64_t* indices;  // [tokens, chosen], best first; chosen <= kept_groups * experts / groups
  float* scales;     // [tokens, chosen]
};

void route(const Routing& routing, size_t threads);

struct RoutingKernels {
  // Tokens [begin, end).  `work` has 2 * (experts + 16) + groups floats, `ranks` as many as the
  // larger of `chosen` and `kept_groups`.
  void (*route)(const Routing& routing, size_t begin, size_t end, float* work, uint64_t* ranks);
};
HMT_TABLES(RoutingKernels, routing_kernels)

}  // namespace hmt
