#include "experimental/msd.h"

#include <algorithm>

#include "base/thread_pool.h"
#include "linear/inputs.h"

namespace hmt {

void msd_linear(const Weight& weight, const ConstMatrix& x, const Matrix& out, size_t threads) {
  if (x.rows == 0) return;
  Needs needs;
  needs.add(weight, x);
  Scratch scratch(needs.bytes(x));
  Inputs inputs = inputs_of(weight, prepare(x, needs, scratch, threads));
  size_t block_bytes = 0;
  inputs.arranged = needs.arranged(0, weight, inputs, block_bytes, scratch, threads);
  const size_t count = inputs.tokens * inputs.stride;
  Scratch room_for_halves(2 * count);
  int8_t* halves = room_for_halves.take<int8_t>(2 * count);
  const MsdKernels& kernels = active(msd_kernels_tables());
  kernels.split(inputs.codes, count, halves);
  constexpr size_t kRows = 64;
  const size_t ranges = (weight.rows + kRows - 1) / kRows;
  share(ranges, 1, threads, [&](size_t begin, size_t end) {
    for (size_t range = begin; range < end; ++range) {
      const size_t first = range * kRows, last = std::min(first + kRows, weight.rows);
      Scratch room(x.rows * (last - first) * sizeof(float));
      float* results = room.take<float>(x.rows * (last - first));
      kernels.multiply(weight, inputs, halves, first, last, results, last - first);
      for (size_t t = 0; t < x.rows; ++t) {
        char* target =
            static_cast<char*>(out.data) + (t * out.stride + first) * bytes_of(out.type);
        active(token_kernels_tables())
            .narrow(results + t * (last - first), nullptr, DType::kF32, last - first, target,
                    out.type);
      }
    }
  });
}

}  // namespace hmt
