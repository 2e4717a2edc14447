#include "experts/service.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "base/clock.h"
#include "base/thread_pool.h"

namespace hmt {
namespace {

using Clock = std::chrono::steady_clock;

// Workers stay awake between the layers of a step: waking them takes as long as a layer.
constexpr int64_t kWatchMicroseconds = 5000;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Step numbers go round: `number` has come when it is not ahead of what is there.
bool has_come(const uint32_t* flag, uint32_t number) {
  return static_cast<int32_t>(__atomic_load_n(flag, __ATOMIC_ACQUIRE) - number) >= 0;
}

bool await(const uint32_t* flag, uint32_t number, double patience_s) {
  const Clock::time_point begin = Clock::now();
  for (uint32_t tries = 1; !has_come(flag, number); ++tries) {
#ifdef HMT_X86
    __builtin_ia32_pause();
#endif
    if (tries % 4096 != 0) continue;
    if (seconds_since(begin) > patience_s) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace

ExpertService::ExpertService(std::vector<ServedLayer> layers, DType type, size_t columns,
                             size_t hidden, size_t top_k, Activation activation)
    : layers_(std::move(layers)),
      type_(type),
      columns_(columns),
      hidden_(hidden),
      top_k_(top_k),
      activation_(activation) {
  // So that a question does not go through all experts, which weights have pushed out of the caches.
  for (ServedLayer& layer : layers_) {
    for (size_t i = 0; i < layer.experts.size(); ++i) {
      const auto id = static_cast<size_t>(layer.experts[i].id);
      if (id >= layer.places.size()) layer.places.resize(id + 1, -1);
      layer.places[id] = static_cast<int32_t>(i);
    }
  }
}

ExpertService::~ExpertService() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void ExpertService::begin(uint32_t number, size_t tokens, size_t threads, double patience_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  begun_.push_back({number, tokens, threads, patience_s});
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  changed_.notify_all();
}

Served ExpertService::end() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (begun_.empty() && served_.empty()) throw std::logic_error("no step was begun");
  changed_.wait(lock, [this] { return !served_.empty(); });
  const Served served = served_.front();
  served_.pop_front();
  if (served.failure) std::rethrow_exception(served.failure);
  return served;
}

void ExpertService::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !begun_.empty(); });
    if (begun_.empty()) return;
    const Step step = begun_.front();
    lock.unlock();
    Served served;
    ThreadPool::watch_for(kWatchMicroseconds);
    try {
      served = serve(step);
    } catch (...) {
      served.failure = std::current_exception();
    }
    ThreadPool::watch_for(0);
    if (!served.complete) release(step.number);
    lock.lock();
    begun_.pop_front();
    served_.push_back(std::move(served));
    changed_.notify_all();
  }
}

Served ExpertService::serve(const Step& step) const {
  Served served;
  std::vector<Expert> wanted;
  for (const ServedLayer& layer : layers_) {
    const Clock::time_point begin = Clock::now();
    if (!await(layer.mail.asked, step.number, step.patience_s)) return served;
    const Clock::time_point asked = Clock::now();
    served.experts += answer(layer, step.tokens, step.threads, wanted);
    __atomic_store_n(layer.mail.answered, step.number, __ATOMIC_RELEASE);
    served.waited_s += std::chrono::duration<double>(asked - begin).count();
    served.computed_s += seconds_since(asked);
  }
  served.complete = true;
  return served;
}

void ExpertService::release(uint32_t number) const {
  for (const ServedLayer& layer : layers_) {
    __atomic_store_n(layer.mail.answered, number, __ATOMIC_RELEASE);
  }
}

size_t ExpertService::answer(const ServedLayer& layer, size_t tokens, size_t threads,
                             std::vector<Expert>& wanted) const {
  const Mailbox& mail = layer.mail;
  std::vector<int64_t> ids(mail.chosen, mail.chosen + tokens * top_k_);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  wanted.clear();
  for (const int64_t id : ids) {
    if (id < 0 || static_cast<size_t>(id) >= layer.places.size()) continue;
    const int32_t place = layer.places[static_cast<size_t>(id)];
    if (place >= 0) wanted.push_back(layer.experts[static_cast<size_t>(place)]);
  }
  Weight weights[3];
  for (Expert& expert : wanted) {
    if (expert.id == mail.cut[0] && mail.cut[1] > 0) {
      expert = rest_of(expert, static_cast<size_t>(mail.cut[1]), weights);
    }
  }
  if (wanted.empty()) return 0;  // nobody reads the answer then
  KernelTime time;
  routed_experts(wanted.data(), wanted.size(), {mail.chosen, mail.scales, top_k_},
                 {mail.x, type_, tokens, columns_, columns_}, activation_,
                 {mail.total, hidden_, true, {nullptr, DType::kF32, tokens, hidden_, hidden_}},
                 threads);
  return wanted.size();
}

}  // namespace hmt
