// How long callers have been inside kernels, so that what is left of a step is the host's own time.
#pragma once

#include <chrono>
#include <cstdint>

namespace hmt {

// Adds up the time between construction and destruction, for each calling thread by itself: a model
// computes on one thread, and others may convert weights meanwhile.
class KernelTime {
 public:
  KernelTime() : begin_(now()) {}
  ~KernelTime() { total() += now() - begin_; }
  KernelTime(const KernelTime&) = delete;
  KernelTime& operator=(const KernelTime&) = delete;

  // Of the calling thread, since it began.
  static double seconds() { return 1e-9 * static_cast<double>(total()); }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  static int64_t& total() {
    thread_local int64_t nanoseconds = 0;
    return nanoseconds;
  }
  int64_t begin_;
};

}  // namespace hmt
