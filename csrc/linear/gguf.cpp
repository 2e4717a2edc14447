#include "linear/gguf.h"

#include <algorithm>

#include "base/thread_pool.h"

namespace hmt {

void unpack_ggml(Ggml kind, const GgmlRows& rows, size_t threads) {
  constexpr size_t kRows = 16, kNumbers = size_t{1} << 17;  // enough work to hand out
  const GgmlKernels& kernels = active(ggml_kernels_tables());
  const size_t grain = std::max<size_t>(1, kNumbers / kRows / std::max<size_t>(1, rows.columns));
  share((rows.rows + kRows - 1) / kRows, grain, threads,
        [&](size_t begin, size_t end) { kernels.unpack(kind, rows, begin, end - begin); });
}

}  // namespace hmt
