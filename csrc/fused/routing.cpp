#include "fused/routing.h"

#include <algorithm>

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {

void route(const Routing& routing, size_t threads) {
  const RoutingKernels& kernels = active(routing_kernels_tables());
  const size_t floats = 2 * (routing.experts + 16) + routing.groups;
  const size_t ranks = std::max(routing.chosen, routing.kept_groups);
  // An expert takes about as long as eight numbers elsewhere.
  share(routing.tokens, rows_per_grain(8 * routing.experts), threads,
        [&](size_t begin, size_t end) {
          Scratch scratch(Scratch::round(floats * sizeof(float)) + ranks * sizeof(uint64_t));
          float* work = scratch.take<float>(floats);
          kernels.route(routing, begin, end, work, scratch.take<uint64_t>(ranks));
        });
}

}  // namespace hmt
