#include "base/peak.h"

#include <atomic>
#include <chrono>
#include <cmath>

#include "base/thread_pool.h"

namespace hmt {
namespace {

using Clock = std::chrono::steady_clock;
using Products = uint64_t (*)(std::size_t, float*);

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

Products products_of(PeakOf kind) {
  const PeakKernels& kernels = active(peak_kernels_tables());
  switch (kind) {
    case PeakOf::kInt8:
      return kernels.int8;
    case PeakOf::kBF16:
      return kernels.bf16;
    case PeakOf::kF32:
      break;
  }
  return kernels.f32;
}

volatile float kept;  // so that nothing is left out

// Rounds that take `seconds` on one thread.
std::size_t rounds_in(Products products, double seconds) {
  float sink = 0;
  std::size_t rounds = 1024;
  for (;;) {
    const auto begin = Clock::now();
    products(rounds, &sink);
    const double taken = since(begin);
    kept = sink;
    if (taken >= seconds) return rounds;
    rounds *= 2;
  }
}

}  // namespace

double peak_ops(PeakOf kind, std::size_t threads, double seconds) {
  constexpr double kPieceSeconds = 5e-4;  // so short that no thread waits long for the last one
  const Products products = products_of(kind);
  const std::size_t rounds = rounds_in(products, kPieceSeconds);
  const auto pieces = static_cast<std::size_t>(std::ceil(seconds / kPieceSeconds)) * threads;
  std::atomic<uint64_t> operations{0};
  const auto begin = Clock::now();
  share(pieces, 1, threads, [&](std::size_t first, std::size_t last) {
    float sink = 0;
    uint64_t done = 0;
    for (std::size_t i = first; i < last; ++i) done += products(rounds, &sink);
    kept = sink;
    operations.fetch_add(done, std::memory_order_relaxed);
  });
  return static_cast<double>(operations.load()) / since(begin);
}

}  // namespace hmt
