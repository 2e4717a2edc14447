// How long callers have been inside kernels, so that what is left of a step is the host's own time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace hmt {

// Adds up, over all calling threads, the time between construction and destruction.
class KernelTime {
 public:
  KernelTime() : begin_(now()) {}
  ~KernelTime() { total().fetch_add(now() - begin_, std::memory_order_relaxed); }
  KernelTime(const KernelTime&) = delete;
  KernelTime& operator=(const KernelTime&) = delete;

  static double seconds() { return 1e-9 * static_cast<double>(total().load()); }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  static std::atomic<int64_t>& total() {
    static std::atomic<int64_t> nanoseconds{0};
    return nanoseconds;
  }
  int64_t begin_;
};

}  // namespace hmt
