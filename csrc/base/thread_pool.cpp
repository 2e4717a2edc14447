#include "thread_pool.h"

#include <sched.h>

#include <algorithm>

namespace hmt {
namespace {

std::size_t usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // Fails where there are more than 1024 CPUs.
  if (sched_getaffinity(0, sizeof set, &set) != 0) {
    return std::max(1u, std::thread::hardware_concurrency());
  }
  return static_cast<std::size_t>(CPU_COUNT(&set));
}

}  // namespace

ThreadPool& ThreadPool::instance() {
  static ThreadPool pool(usable_cpus());
  return pool;
}

ThreadPool::ThreadPool(std::size_t threads) { start(threads); }

ThreadPool::~ThreadPool() { stop(); }

std::size_t ThreadPool::threads() {
  std::lock_guard<std::mutex> turn(turn_);
  return workers_.size() + 1;
}

void ThreadPool::set_threads(std::size_t threads) {
  std::lock_guard<std::mutex> turn(turn_);
  stop();
  start(threads);
}

void ThreadPool::start(std::size_t threads) {
  stopping_ = false;
  for (std::size_t i = 1; i < threads; ++i) {
    workers_.emplace_back([this] { serve(); });
  }
}

void ThreadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::run(std::size_t count, std::size_t grain, std::size_t threads,
                     const Work& work) {
  std::lock_guard<std::mutex> turn(turn_);
  const std::size_t ranges = (count + grain - 1) / grain;
  const std::size_t seats = std::min({workers_.size(), threads - 1, ranges - 1});
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work_ = &work;
    seats_ = seats;
    count_ = count;
    grain_ = grain;
    next_.store(0, std::memory_order_relaxed);
    ++generation_;
  }
  for (std::size_t i = 0; i < seats; ++i) wake_.notify_one();
  drain(work);
  // A worker that has not woken by now is not waited for: all rows are taken.  So a busy machine
  // costs at most the range that another thread is computing.
  std::unique_lock<std::mutex> lock(mutex_);
  work_ = nullptr;
  idle_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadPool::serve() {
  std::size_t served = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] {
      return stopping_ || (work_ != nullptr && seats_ > 0 && generation_ != served);
    });
    if (stopping_) return;
    served = generation_;
    --seats_;
    const Work& work = *work_;
    ++busy_;
    lock.unlock();
    drain(work);
    lock.lock();
    if (--busy_ == 0) idle_.notify_one();
  }
}

void ThreadPool::drain(const Work& work) {
  while (true) {
    const std::size_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
    if (begin >= count_) return;
    work(begin, std::min(begin + grain_, count_));
  }
}

}  // namespace hmt
