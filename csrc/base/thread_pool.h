// Threads that live as long as the process and share out ranges of rows.
//
// A decode token is a chain of 100 to 200 calls a few microseconds apart, so what counts is how
// soon workers begin and how soon the caller knows that they are done:
//   - After work, a worker watches for more for kSpinMicroseconds and only then sleeps.
//   - Nothing in the way of a call takes a lock or allocates.
//   - The caller takes part, and waits only for workers that have begun.  One that has not woken,
//     or whose CPU another process holds, costs nothing but its share.
//   - A caller that finds the pool in use computes range after range on its own thread, and shares
//     out what is left as soon as the pool is free.  Waiting for a turn would leave its thread
//     idle, and nothing would bound the wait beside a thread that calls again and again.
// Ranges are handed out as threads become free, so `work` must give a row the same result in
// whatever range it comes; then results depend neither on threads nor on who else computes.
//
// Where they run: when there are as many threads as physical cores that the process may use, each
// worker is pinned to a core, and the one on the caller's core sits out, so that the caller itself
// stays free.  With fewer threads (or more), workers keep to the CPUs of a NUMA node and the kernel
// chooses: two processes with 4 threads each on 16 cores must not both take the first 4.
//
// On more than one NUMA node, each node's threads begin with a contiguous part of the rows, and
// take ranges of other nodes when theirs are done.  So a weight's rows are read from the near
// memory when its first part was placed on the first node, and so on; with memory interleaved it
// does not matter.
//
// Beside torch's OpenMP threads: those watch for work too, and never let go of their CPU meanwhile;
// workers of the pool do, after a few microseconds.  A call of the pool and a torch sum of 200 000
// numbers in turn took about 0.1 ms at the median in any case, on two cores that other processes
// used as well (so these figures are rough).  But the mean was 1.6 to 7.7 ms with torch as it
// comes, 0.1 ms with OMP_WAIT_POLICY=passive, 0.4 to 0.6 ms with torch.set_num_threads(1).  A
// thread that computes little with torch between kernels should set that to 1.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace hmt {

// A reference to a callable work(begin, end) that computes the rows [begin, end); does not own it.
// What it throws ends the process where other threads take part.
class Work {
 public:
  template <typename Callable,
            typename = std::enable_if_t<!std::is_same_v<std::decay_t<Callable>, Work>>>
  Work(const Callable& callable)  // NOLINT: a call of `share` reads as before
      : callable_(&callable), call_([](const void* callable, std::size_t begin, std::size_t end) {
          (*static_cast<const Callable*>(callable))(begin, end);
        }) {}
  void operator()(std::size_t begin, std::size_t end) const { call_(callable_, begin, end); }

 private:
  const void* callable_;
  void (*call_)(const void*, std::size_t, std::size_t);
};

class ThreadPool {
 public:
  // The pool of the process, with Topology::threads() threads to begin with.  Workers start with
  // the first call that needs them, also in a process that was forked from one with workers.
  static ThreadPool& instance();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Threads that compute, the caller's included.
  std::size_t threads();

  // Waits for running work, and reads anew which CPUs the calling thread may use.  0 means
  // Topology::threads().  Not from inside `work`.
  void set_threads(std::size_t threads);

  // Keeps the calling thread on the core that it runs on, or lets it move again.  For a thread that
  // calls all the time: the kernel then never moves it to where a worker is.  Threads that it
  // starts meanwhile inherit the binding.
  void pin_caller(bool pinned);

  // Calls `work` on disjoint ranges of up to `grain` rows that cover [0, count), on up to `threads`
  // threads, and returns when all are done.  From inside `work`: one range, on the same thread.
  void run(std::size_t count, std::size_t grain, std::size_t threads, Work work);

  // How long workers of this process watch for more work before they sleep; 0: as long as usual.
  // For a caller whose calls come in a row with gaps of a few hundred microseconds.
  static void watch_for(int64_t microseconds);

  // For the child of a fork, in which there are no workers.
  void forget_workers();

 private:
  class Team;  // the workers

  constexpr ThreadPool() = default;
  bool take();

  static ThreadPool the_pool;
  std::atomic<std::size_t> threads_{0};  // 0: nobody has asked yet
  Team* team_ = nullptr;  // null until needed; touched by whoever has taken the pool
  alignas(64) std::atomic<bool> taken_{false};
  std::atomic<unsigned> settings_{0};  // threads inside set_threads, which nobody may overtake
};

// `run` on the pool of the process, or on the caller alone where that is all there is to share.
inline void share(std::size_t count, std::size_t grain, std::size_t threads, Work work) {
  if (threads > 1 && count > grain) {
    ThreadPool::instance().run(count, grain, threads, work);
  } else if (count > 0) {
    work(0, count);
  }
}

}  // namespace hmt
