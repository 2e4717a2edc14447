// Memory that a kernel call needs while it runs, kept for the next call of the same thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace hmt {

// Hands out aligned pieces one after the other; all are given back when it goes out of scope.
// Mapping fresh memory in each call would cost more than small kernels take.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : pool_(mine()), begin_(pool_.used) {
    const std::size_t end = begin_ + round(bytes) + kLine;
    pool_.most = end > pool_.most ? end : pool_.most;
    // Only ever grown while nothing of it is in use, and then to all that nested calls once needed;
    // until then they fall back to their own memory.
    if (begin_ == 0 && pool_.most > pool_.size) {
      release(pool_);
      pool_.data = allocate(pool_.most);
      pool_.size = pool_.most;
    }
    if (end > pool_.size) own_ = allocate(end - begin_);
    next_ = own_ != nullptr ? own_ : pool_.data + begin_;
    pool_.used = end;
  }
  ~Scratch() {
    if (own_ != nullptr) ::operator delete(own_, std::align_val_t{kLine});
    pool_.used = begin_;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // `count` numbers, not initialised.  The constructor's bytes count each piece rounded up to 64.
  template <typename T>
  T* take(std::size_t count) {
    T* piece = reinterpret_cast<T*>(next_);
    next_ += round(count * sizeof(T));
    return piece;
  }

  static std::size_t round(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

 private:
  static constexpr std::size_t kLine = 64;
  struct Pool {
    uint8_t* data = nullptr;
    // `used` counts what nested calls hold of their own too; `most` is the largest it has been.
    std::size_t size = 0, used = 0, most = 0;
    ~Pool() { release(*this); }
  };
  static uint8_t* allocate(std::size_t bytes) {
    return static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{kLine}));
  }
  static void release(Pool& pool) {
    if (pool.data != nullptr) ::operator delete(pool.data, std::align_val_t{kLine});
    pool.data = nullptr;
  }
  static Pool& mine() {
    thread_local Pool pool;
    return pool;
  }

  Pool& pool_;
  std::size_t begin_;
  uint8_t* own_ = nullptr;
  uint8_t* next_ = nullptr;
};

}  // namespace hmt
