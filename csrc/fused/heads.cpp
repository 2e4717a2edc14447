#include "fused/heads.h"

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {

void multiply_heads(const HeadProducts& products, size_t threads) {
  const HeadKernels& kernels = active(head_kernels_tables());
  const size_t work_size = head_work(products.in);
  const size_t numbers = products.in * products.out * products.tokens;
  share(products.heads, rows_per_grain(numbers), threads, [&](size_t begin, size_t end) {
    Scratch scratch(work_size * sizeof(float));
    kernels.multiply(products, begin, end, scratch.take<float>(work_size));
  });
}

}  // namespace hmt
