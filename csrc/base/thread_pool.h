// Threads that live as long as the process and share out ranges of rows.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hmt {

class ThreadPool {
 public:
  // work(begin, end) computes the rows [begin, end).
  using Work = std::function<void(std::size_t, std::size_t)>;

  // The pool of the process, with one thread per usable CPU to begin with.
  static ThreadPool& instance();

  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Threads that compute, the caller's included.  Waits for running work.
  std::size_t threads();

  // Waits for running work.
  void set_threads(std::size_t threads);

  // Calls `work` on disjoint ranges of up to `grain` rows that cover [0, count), on up to `threads`
  // threads, and returns when all are done.  Callers take turns.  Ranges are handed out as threads
  // become free, so `work` must give a row the same result in whatever range it comes.
  void run(std::size_t count, std::size_t grain, std::size_t threads, const Work& work);

 private:
  explicit ThreadPool(std::size_t threads);
  void start(std::size_t threads);
  void stop();
  void serve();
  void drain(const Work& work);

  std::mutex turn_;  // held by the caller whose work runs
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable idle_;
  const Work* work_ = nullptr;  // null while there is nothing to join
  std::size_t seats_ = 0;       // workers that may still join
  std::size_t generation_ = 0;  // counts run() calls, so that a worker joins each at most once
  std::size_t busy_ = 0;        // workers inside drain()
  bool stopping_ = false;

  std::size_t count_ = 0;
  std::size_t grain_ = 1;
  std::atomic<std::size_t> next_{0};
  std::vector<std::thread> workers_;
};

// `run` on the pool of the process, or on the caller alone where that is all there is to share:
// then nobody waits for a turn.
inline void share(std::size_t count, std::size_t grain, std::size_t threads,
                  const ThreadPool::Work& work) {
  if (threads > 1 && count > grain) {
    ThreadPool::instance().run(count, grain, threads, work);
  } else if (count > 0) {
    work(0, count);
  }
}

}  // namespace hmt
