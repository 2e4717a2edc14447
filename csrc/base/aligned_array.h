// An uninitialised array that starts on a cache line.
#pragma once

#include <cstddef>
#include <new>

namespace hmt {

// Loads of 64 bytes that straddle two cache lines made the int4 product 15% slower.
template <typename T>
class AlignedArray {
 public:
  explicit AlignedArray(std::size_t size)
      : data_(static_cast<T*>(::operator new(size * sizeof(T), kLine))) {}
  ~AlignedArray() { ::operator delete(data_, kLine); }
  AlignedArray(const AlignedArray&) = delete;
  AlignedArray& operator=(const AlignedArray&) = delete;

  T* data() { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }

 private:
  static constexpr std::align_val_t kLine{64};
  T* data_;
};

}  // namespace hmt
