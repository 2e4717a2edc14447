// Linear layers on bfloat16 weights.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "thread_pool.h"

namespace hmt {
namespace {

constexpr size_t kLanes = 64;  // independent sums: four registers of 16 floats hide the latency

inline __attribute__((always_inline)) float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

HMT_CLONES void dots_bf16(const float* x, const uint16_t* weights, size_t begin, size_t end,
                          size_t columns, float* out) {
  for (size_t row = begin; row < end; ++row) {
    const uint16_t* w = weights + row * columns;
    float lanes[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) {
      for (size_t k = 0; k < kLanes; ++k) lanes[k] += x[i + k] * from_bf16(w[i + k]);
    }
    for (size_t k = 0; i < columns; ++i, ++k) lanes[k] += x[i] * from_bf16(w[i]);
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
      for (size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    }
    out[row] = lanes[0];
  }
}

}  // namespace

void linear_bf16(const float* x, size_t tokens, const uint16_t* weights, size_t rows,
                 size_t columns, float* out) {
  const size_t row_bytes = std::max<size_t>(1, columns * 2 * tokens);
  const size_t grain =
      rows * row_bytes < (size_t{256} << 10) ? rows : std::max<size_t>(4, (size_t{64} << 10) / row_bytes);
  ThreadPool::instance().run(rows, grain, [&](size_t begin, size_t end) {
    for (size_t t = 0; t < tokens; ++t) {
      dots_bf16(x + t * columns, weights, begin, end, columns, out + t * rows);
    }
  });
}

}  // namespace hmt
