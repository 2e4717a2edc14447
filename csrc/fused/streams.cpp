#include "fused/streams.h"

#include <cmath>

#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Each row of a matrix [n, n] becomes its softmax plus eps.
void soften(float* matrix, std::size_t n, float eps) {
  for (float* row = matrix; row < matrix + n * n; row += n) {
    float top = row[0], total = 0.0f;
    for (std::size_t k = 1; k < n; ++k) top = row[k] > top ? row[k] : top;
    for (std::size_t k = 0; k < n; ++k) total += row[k] = std::exp(row[k] - top);
    for (std::size_t k = 0; k < n; ++k) row[k] = row[k] / total + eps;
  }
}

// Divides what lies `step` apart by its sum plus eps, for n such lines that begin `next` apart.
void normalise(float* matrix, std::size_t n, std::size_t step, std::size_t next, float eps) {
  for (std::size_t line = 0; line < n; ++line) {
    float* first = matrix + line * next;
    float total = 0.0f;
    for (std::size_t k = 0; k < n; ++k) total += first[k * step];
    for (std::size_t k = 0; k < n; ++k) first[k * step] /= total + eps;
  }
}

}  // namespace

void mix_streams(const StreamMixes& call) {
  const std::size_t n = call.streams, width = n * (n + 2);
  for (std::size_t token = 0; token < call.tokens; ++token) {
    const float* products = call.products + token * width;
    float* mixed = call.mixed + token * n * n;
    for (std::size_t k = 0; k < n; ++k) {
      call.read[token * n + k] = sigmoid(products[k] * call.scale[0] + call.base[k]) + call.eps;
      call.spread[token * n + k] =
          2.0f * sigmoid(products[n + k] * call.scale[1] + call.base[n + k]);
    }
    for (std::size_t k = 0; k < n * n; ++k) {
      mixed[k] = products[2 * n + k] * call.scale[2] + call.base[2 * n + k];
    }
    soften(mixed, n, call.eps);
    normalise(mixed, n, n, 1, call.eps);
    for (std::size_t turn = 1; turn < call.iterations; ++turn) {
      normalise(mixed, n, 1, n, call.eps);
      normalise(mixed, n, n, 1, call.eps);
    }
  }
}

void read_streams(const Streams& call, std::size_t threads) {
  const StreamKernels& kernels = active(stream_kernels_tables());
  share(call.tokens, rows_per_grain(call.streams * call.width), threads,
        [&](std::size_t begin, std::size_t end) { kernels.read(call, begin, end); });
}

void write_streams(const Streams& call, std::size_t threads) {
  const StreamKernels& kernels = active(stream_kernels_tables());
  share(call.tokens, rows_per_grain(call.streams * call.streams * call.width), threads,
        [&](std::size_t begin, std::size_t end) { kernels.write(call, begin, end); });
}

}  // namespace hmt
