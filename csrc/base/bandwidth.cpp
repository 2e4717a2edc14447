#include "base/bandwidth.h"

#include <atomic>

#include "base/thread_pool.h"

namespace hmt {

uint64_t sum_words(const uint64_t* words, std::size_t count) {
  constexpr std::size_t kGrainWords = std::size_t{128} << 10;  // 1 MiB
  const BandwidthKernels& kernels = active(bandwidth_kernels_tables());
  std::atomic<uint64_t> total{0};
  ThreadPool& pool = ThreadPool::instance();
  share(count, kGrainWords, pool.threads(), [&](std::size_t begin, std::size_t end) {
    total.fetch_add(kernels.sum_range(words, begin, end), std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace hmt
