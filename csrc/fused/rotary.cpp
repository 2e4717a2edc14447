#include "fused/rotary.h"

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {

void rotate(const Rotation& rotation, size_t threads) {
  const RotaryKernels& kernels = active(rotary_kernels_tables());
  size_t numbers = 0;
  for (size_t i = 0; i < rotation.count; ++i) {
    numbers += rotation.groups[i].heads * rotation.groups[i].dim;
  }
  const size_t work_size = rotation_work(rotation.turned);
  share(rotation.tokens, rows_per_grain(numbers), threads, [&](size_t begin, size_t end) {
    Scratch scratch(work_size * sizeof(float));
    kernels.rotate(rotation, begin, end, scratch.take<float>(work_size));
  });
}

}  // namespace hmt
