// Memory that a kernel call needs while it runs, kept for the next call of the same thread.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace hmt {

// Bytes on a line's border.  Many of them are a mapping of their own, which leaves no hole in the
// allocator's arenas: with holes a process that streams 14 MB networks grew by 50 MB more.
class Memory {
 public:
  static constexpr std::size_t kLine = 64, kHuge = std::size_t{2} << 20;

  Memory() = default;
  explicit Memory(std::size_t bytes) : size_(bytes) {
    if (bytes < 2 * kHuge) {
      data_ = static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{kLine}));
      return;
    }
    mapped_ = bytes + kHuge;  // addresses, so that huge pages fit; they cost nothing
    const int access = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS;
    void* where = mmap(nullptr, mapped_, access, kind, -1, 0);
    if (where == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<uint8_t*>(where);
    data_ = begin_ + (kHuge - reinterpret_cast<std::uintptr_t>(begin_) % kHuge) % kHuge;
#if defined(MADV_HUGEPAGE)
    madvise(data_, bytes / kHuge * kHuge, MADV_HUGEPAGE);
#endif
  }
  ~Memory() {
    if (begin_ != nullptr) munmap(begin_, mapped_);
    else if (data_ != nullptr) ::operator delete(data_, std::align_val_t{kLine});
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory& operator=(Memory&& other) noexcept {
    std::swap(begin_, other.begin_);
    std::swap(data_, other.data_);
    std::swap(mapped_, other.mapped_);
    std::swap(size_, other.size_);
    return *this;
  }

  uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  uint8_t* begin_ = nullptr;  // of a mapping
  uint8_t* data_ = nullptr;
  std::size_t mapped_ = 0, size_ = 0;
};

// Hands out aligned pieces one after the other; all are given back when it goes out of scope.
// Mapping fresh memory in each call would cost more than small kernels take.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : pool_(mine()), begin_(pool_.used) {
    const std::size_t end = begin_ + round(bytes) + kLine;
    pool_.most = end > pool_.most ? end : pool_.most;
    // Only ever grown while nothing of it is in use, and then to all that nested calls once needed;
    // until then they fall back to their own memory.
    if (begin_ == 0 && pool_.most > pool_.memory.size()) {
      pool_.memory = Memory();
      pool_.memory = Memory(pool_.most);
    }
    if (end > pool_.memory.size()) own_ = Memory(end - begin_);
    next_ = own_.size() > 0 ? own_.data() : pool_.memory.data() + begin_;
    pool_.used = end;
  }
  ~Scratch() { pool_.used = begin_; }
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
  static constexpr std::size_t kLine = Memory::kLine;
  struct Pool {
    Memory memory;
    // `used` counts what nested calls hold of their own too; `most` is the largest it has been.
    std::size_t used = 0, most = 0;
  };
  static Pool& mine() {
    thread_local Pool pool;
    return pool;
  }

  Pool& pool_;
  std::size_t begin_;
  Memory own_;
  uint8_t* next_ = nullptr;
};

}  // namespace hmt
