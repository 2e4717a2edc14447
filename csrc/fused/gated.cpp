#include "fused/gated.h"

#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {

void gated(const Gated& call, size_t threads) {
  const GatedKernels& kernels = active(gated_kernels_tables());
  share(call.tokens, rows_per_grain(call.width), threads,
        [&](size_t begin, size_t end) { kernels.gated(call, begin, end); });
}

}  // namespace hmt
