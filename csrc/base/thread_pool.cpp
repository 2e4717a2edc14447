#include "base/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/topology.h"

namespace hmt {
namespace {

// Calls of a decode token follow each other within tens of microseconds; waking a worker that
// sleeps costs about as much.
constexpr int64_t kSpinMicroseconds = 100;
std::atomic<int64_t> spin_microseconds{kSpinMicroseconds};
// After so many looks a waiting thread lets others have its CPU between looks: without that, a
// thread that it waits for, or one of torch's, could be kept off the CPU until the kernel's next
// tick, milliseconds later.
constexpr int kEagerLooks = 500;
// Sleeping workers that one thread wakes, each with a system call; the woken ones wake the next.
constexpr std::size_t kFanOut = 8;

// On workers always, on other threads while they are inside `run`.
thread_local bool inside_run = false;

struct InsideRun {
  InsideRun() { inside_run = true; }
  ~InsideRun() { inside_run = false; }
};

// The CPUs of a thread that pin_caller pinned; empty on others.
thread_local std::vector<int> cpus_before_pinning;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Counts looks at something that another thread is about to change.
class Wait {
 public:
  void pause() {
    relax();
    if (++looks_ > kEagerLooks) sched_yield();
  }
  // About every microsecond: reading the clock takes longer than looking.
  bool clock_is_due() const { return looks_ > kEagerLooks || looks_ % 32 == 0; }

 private:
  int looks_ = 0;
};

int64_t microseconds() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t while_it_is) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, while_it_is, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

void bind_to(const std::vector<int>& cpus) {
  const int size = cpus.back() + 1;
  cpu_set_t* set = CPU_ALLOC(size);
  if (set == nullptr) return;
  const std::size_t bytes = CPU_ALLOC_SIZE(size);
  CPU_ZERO_S(bytes, set);
  for (int cpu : cpus) CPU_SET_S(cpu, bytes, set);
  // Refused when the mask was narrowed meanwhile; then the kernel chooses the CPU.
  pthread_setaffinity_np(pthread_self(), bytes, set);
  CPU_FREE(set);
}

std::vector<int> cpus_of_this_thread() {
  return cpus_before_pinning.empty() ? allowed_cpus() : cpus_before_pinning;
}

}  // namespace

// What is being computed is announced in one word, so that a worker needs nothing else to know
// whether it takes part: a number that tells announcements apart, how many workers take part, and
// the one that sits out because the caller is on its core.  0: nothing is.
//
// A worker enters by setting `inside` and then looking again whether the word still stands; the
// caller leaves by clearing the word and then looking at each `inside`.  One of the two sees the
// other (all four accesses are sequentially consistent), so that what the word announced may be
// changed as soon as nobody is inside.
class ThreadPool::Team {
 public:
  Team(std::size_t threads, const Topology& topology);
  ~Team();

  // The ranges [first, ranges) of `grain` rows each, on up to `threads` threads.
  void compute(const Work& work, std::size_t first, std::size_t ranges, std::size_t grain,
               std::size_t count, std::size_t threads) noexcept;

 private:
  struct alignas(64) Worker {
    std::atomic<uint32_t> inside{0};
    std::atomic<uint32_t> asleep{0};
    std::size_t index = 0, node = 0;
    std::thread thread;
  };
  // Ranges that a node's threads begin with.
  struct alignas(64) Part {
    std::atomic<std::size_t> next{0};
    std::size_t end = 0;
  };
  struct Announced {
    uint64_t word;
    uint32_t number() const { return static_cast<uint32_t>(word >> 32); }
    std::size_t seats() const { return word >> 16 & kNobody; }
    std::size_t absent() const { return word & kNobody; }
    std::size_t seat_of(std::size_t worker) const {
      if (worker == absent()) return kNobody;
      return worker > absent() ? worker - 1 : worker;
    }
    std::size_t worker_of(std::size_t seat) const { return seat >= absent() ? seat + 1 : seat; }
  };
  static constexpr std::size_t kNobody = 0xffff;

  void serve(Worker& me);
  Announced await(Worker& me, uint32_t served, int64_t spin_until);
  void sleep(Worker& me, uint32_t served);
  void wake(Announced job, std::size_t parent);
  void split(std::size_t first, std::size_t ranges, Announced job, std::size_t caller_node);
  void drain(std::size_t node) noexcept;

  std::vector<Worker> workers_;
  std::vector<Part> parts_;  // one per node
  std::vector<std::size_t> core_of_cpu_;
  std::vector<std::size_t> node_of_core_;
  bool pinned_;
  std::atomic<bool> stopping_{false};

  alignas(64) std::atomic<uint64_t> announced_{0};
  alignas(64) const Work* work_ = nullptr;
  std::size_t grain_ = 1, count_ = 0;
  uint32_t number_ = 0;
};

ThreadPool::Team::Team(std::size_t threads, const Topology& topology)
    : workers_(std::min<std::size_t>(
          threads == topology.cores.size() && threads > 1 ? threads : threads - 1, kNobody - 1)),
      parts_(topology.nodes),
      pinned_(workers_.size() == topology.cores.size() && threads == workers_.size()) {
  const std::vector<Core>& cores = topology.cores;
  std::vector<std::vector<int>> cpus_of_node(topology.nodes);
  for (std::size_t c = 0; c < cores.size(); ++c) {
    node_of_core_.push_back(cores[c].node);
    for (int cpu : cores[c].cpus) {
      const auto place = static_cast<std::size_t>(cpu);
      if (core_of_cpu_.size() <= place) core_of_cpu_.resize(place + 1, cores.size());
      core_of_cpu_[place] = c;
      cpus_of_node[cores[c].node].push_back(cpu);
    }
  }
  // Workers handle no signals: those are for the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      Worker& worker = workers_[i];
      // Evenly over the cores, so that each node has its share.
      const Core& core = cores[workers_.size() <= cores.size() ? i * cores.size() / workers_.size()
                                                               : i % cores.size()];
      worker.index = i;
      worker.node = core.node;
      const std::vector<int> cpus =
          pinned_ ? std::vector<int>{core.cpus.front()} : cpus_of_node[core.node];
      worker.thread = std::thread([this, &worker, cpus] {
        bind_to(cpus);
        serve(worker);
      });
      pthread_setname_np(worker.thread.native_handle(), ("hmt-" + std::to_string(i)).c_str());
    }
  } catch (const std::system_error&) {
    // As many as the system grants; nobody waits for those that are missing.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ThreadPool::Team::~Team() {
  stopping_.store(true);
  for (Worker& worker : workers_) {
    if (worker.asleep.exchange(0) != 0) futex_wake(worker.asleep);
  }
  for (Worker& worker : workers_) {
    if (worker.thread.joinable()) worker.thread.join();
  }
}

void ThreadPool::Team::compute(const Work& work, std::size_t first, std::size_t ranges,
                               std::size_t grain, std::size_t count,
                               std::size_t threads) noexcept {
  std::size_t core = node_of_core_.size();
  if (pinned_ || parts_.size() > 1) {
    const auto cpu = static_cast<std::size_t>(sched_getcpu());
    if (cpu < core_of_cpu_.size()) core = core_of_cpu_[cpu];
  }
  const std::size_t node = core < node_of_core_.size() ? node_of_core_[core] : 0;
  const std::size_t absent = pinned_ && core < workers_.size() ? core : kNobody;
  // A caller from elsewhere takes part too, so one worker less is wanted all the same.
  const std::size_t seats = std::min(
      {workers_.size() - (pinned_ ? 1 : 0), threads - 1, ranges - first - 1});
  number_ += 1;
  const Announced job{uint64_t{number_} << 32 | uint64_t{seats} << 16 | absent};
  work_ = &work;
  grain_ = grain;
  count_ = count;
  split(first, ranges, job, node);
  announced_.store(job.word);
  wake(job, 0);
  drain(node);
  announced_.store(0);
  for (std::size_t seat = 0; seat < seats; ++seat) {
    const Worker& worker = workers_[job.worker_of(seat)];
    for (Wait wait; worker.inside.load() != 0;) wait.pause();
  }
}

// Gives each node a share of the ranges in proportion to its threads.
void ThreadPool::Team::split(std::size_t first, std::size_t ranges, Announced job,
                             std::size_t caller_node) {
  if (parts_.size() == 1) {
    parts_[0].next.store(first, std::memory_order_relaxed);
    parts_[0].end = ranges;
    return;
  }
  for (Part& part : parts_) part.end = 0;
  parts_[caller_node].end = 1;
  for (std::size_t seat = 0; seat < job.seats(); ++seat) {
    ++parts_[workers_[job.worker_of(seat)].node].end;
  }
  const std::size_t threads = job.seats() + 1;
  std::size_t begin = first, before = 0;
  for (Part& part : parts_) {
    before += part.end;
    part.next.store(begin, std::memory_order_relaxed);
    part.end = begin = first + (ranges - first) * before / threads;
  }
}

void ThreadPool::Team::drain(std::size_t node) noexcept {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    Part& part = parts_[node + i < parts_.size() ? node + i : node + i - parts_.size()];
    while (true) {
      const std::size_t range = part.next.fetch_add(1, std::memory_order_relaxed);
      if (range >= part.end) break;
      (*work_)(range * grain_, std::min((range + 1) * grain_, count_));
    }
  }
}

// The caller is parent 0, the worker in a seat is parent seat + 1.
void ThreadPool::Team::wake(Announced job, std::size_t parent) {
  const std::size_t first = parent * kFanOut, end = std::min(first + kFanOut, job.seats());
  for (std::size_t seat = first; seat < end; ++seat) {
    Worker& worker = workers_[job.worker_of(seat)];
    if (worker.asleep.load() != 0 && worker.asleep.exchange(0) != 0) futex_wake(worker.asleep);
  }
}

void ThreadPool::Team::serve(Worker& me) {
  inside_run = true;
  uint32_t served = 0;
  int64_t spin_until = 0;
  while (true) {
    const Announced job = await(me, served, spin_until);
    if (job.word == 0) return;
    served = job.number();
    const std::size_t seat = job.seat_of(me.index);
    if (seat >= job.seats()) {
      // The caller computes on this core, and a worker that watches would take half of it.
      if (me.index == job.absent()) spin_until = 0;
      continue;
    }
    me.inside.store(1);
    if (announced_.load() == job.word) {
      wake(job, seat + 1);
      drain(me.node);
    }
    me.inside.store(0);
    spin_until = microseconds() + spin_microseconds.load(std::memory_order_relaxed);
  }
}

// What is announced after `served`; 0 when the team stops.
ThreadPool::Team::Announced ThreadPool::Team::await(Worker& me, uint32_t served,
                                                    int64_t spin_until) {
  for (Wait wait;; wait.pause()) {
    if (stopping_.load(std::memory_order_relaxed)) return {0};
    const Announced job{announced_.load()};
    if (job.word != 0 && job.number() != served) return job;
    if (wait.clock_is_due() && microseconds() >= spin_until) {
      sleep(me, served);
      // Somebody has work; what woke us may be over, but then more is to follow.
      spin_until = microseconds() + spin_microseconds.load(std::memory_order_relaxed);
      wait = Wait();
    }
  }
}

// Until there is something for this worker.  Whoever announces looks at `asleep` afterwards, and
// the worker at what is announced after setting it: one of the two sees the other.
void ThreadPool::Team::sleep(Worker& me, uint32_t served) {
  me.asleep.store(1);
  const Announced job{announced_.load()};
  const bool mine = job.word != 0 && job.number() != served && job.seat_of(me.index) < job.seats();
  if (mine || stopping_.load()) me.asleep.store(0);
  while (me.asleep.load() != 0) futex_wait(me.asleep, 1);
}

// Neither made nor destroyed while the program runs: a thread may compute until the process ends,
// and a fork never finds it half made.
ThreadPool ThreadPool::the_pool;

void ThreadPool::watch_for(int64_t microseconds) {
  spin_microseconds.store(microseconds > 0 ? microseconds : kSpinMicroseconds,
                          std::memory_order_relaxed);
}

ThreadPool& ThreadPool::instance() {
  static_assert(std::is_trivially_destructible_v<ThreadPool>);
  return the_pool;
}

namespace {
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { ThreadPool::instance().forget_workers(); });
}  // namespace

// The child of a fork has the thread that forked and no other; what those held stays as it is.
void ThreadPool::forget_workers() {
  team_ = nullptr;
  settings_.store(0);
  taken_.store(false);
}

std::size_t ThreadPool::threads() {
  const std::size_t known = threads_.load(std::memory_order_relaxed);
  if (known != 0) return known;
  std::size_t unknown = 0;
  const std::size_t found = read_topology("", cpus_of_this_thread()).threads();
  return threads_.compare_exchange_strong(unknown, found) ? found : unknown;
}

bool ThreadPool::take() {
  return !taken_.load(std::memory_order_relaxed) &&
         settings_.load(std::memory_order_relaxed) == 0 &&
         !taken_.exchange(true, std::memory_order_acquire);
}

void ThreadPool::set_threads(std::size_t threads) {
  const Topology topology = read_topology("", cpus_of_this_thread());
  settings_.fetch_add(1);
  while (taken_.exchange(true, std::memory_order_acquire)) sched_yield();
  delete team_;
  const std::size_t wanted = threads == 0 ? topology.threads() : threads;
  team_ = new Team(wanted, topology);
  threads_.store(wanted);
  taken_.store(false, std::memory_order_release);
  settings_.fetch_sub(1);
}

void ThreadPool::pin_caller(bool pinned) {
  if (!pinned) {
    if (!cpus_before_pinning.empty()) bind_to(cpus_before_pinning);
    cpus_before_pinning.clear();
    return;
  }
  if (!cpus_before_pinning.empty()) return;
  std::vector<int> before = allowed_cpus();
  const Topology topology = read_topology("", before);
  const std::size_t core = topology.core_of(sched_getcpu());
  if (core == topology.cores.size()) return;
  bind_to(topology.cores[core].cpus);
  cpus_before_pinning = std::move(before);
}

void ThreadPool::run(std::size_t count, std::size_t grain, std::size_t threads, Work work) {
  if (inside_run || this->threads() == 1) return work(0, count);
  const InsideRun inside;
  const std::size_t ranges = (count + grain - 1) / grain;
  for (std::size_t first = 0; first < ranges; ++first) {
    if (take()) {
      if (team_ == nullptr) {
        team_ = new Team(this->threads(), read_topology("", cpus_of_this_thread()));
      }
      team_->compute(work, first, ranges, grain, count, threads);
      taken_.store(false, std::memory_order_release);
      return;
    }
    work(first * grain, std::min((first + 1) * grain, count));
  }
}

}  // namespace hmt
