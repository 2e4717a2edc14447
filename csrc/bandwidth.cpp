// Reading memory as fast as it can be read.
#include <atomic>

#include "kernels.h"
#include "thread_pool.h"

namespace hmt {
namespace {

HMT_CLONES uint64_t sum_range(const uint64_t* words, size_t begin, size_t end) {
  uint64_t sum = 0;
  for (size_t i = begin; i < end; ++i) sum += words[i];
  return sum;
}

}  // namespace

uint64_t sum_words(const uint64_t* words, size_t count) {
  constexpr size_t kGrainWords = size_t{128} << 10;  // 1 MiB
  std::atomic<uint64_t> total{0};
  ThreadPool& pool = ThreadPool::instance();
  share(count, kGrainWords, pool.threads(), [&](size_t begin, size_t end) {
    total.fetch_add(sum_range(words, begin, end), std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace hmt
