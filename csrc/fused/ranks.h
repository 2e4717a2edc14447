// Numbers and their indices as integers that compare like them.  Only for *.isa.cpp.
#pragma once

#include "simd/vec.h"

namespace hmt::HMT_ISA {

// Larger for a larger number, equal for both zeros, largest for NaN.
HMT_INLINE uint32_t order_of(float value) {
  if (value != value) return 0xffffffffu;
  const uint32_t bits = to_bits(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Larger for a larger number, and for the lower index of two equal ones; never 0.
HMT_INLINE uint64_t rank_of(float value, size_t index) {
  return uint64_t{order_of(value)} << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}
HMT_INLINE size_t index_of(uint64_t rank) { return 0xffffffffu - static_cast<uint32_t>(rank); }

// The `size` largest of what was offered, largest first, in memory of the caller.
class Largest {
 public:
  HMT_INLINE Largest(uint64_t* ranks, size_t size) : ranks_(ranks), size_(size) {
    for (size_t i = 0; i < size; ++i) ranks[i] = 0;
  }
  HMT_INLINE void offer(uint64_t rank) {
    if (rank <= ranks_[size_ - 1]) return;
    size_t i = size_ - 1;
    for (; i > 0 && ranks_[i - 1] < rank; --i) ranks_[i] = ranks_[i - 1];
    ranks_[i] = rank;
  }
  HMT_INLINE size_t index(size_t place) const { return index_of(ranks_[place]); }

 private:
  uint64_t* ranks_;
  size_t size_;
};

}  // namespace hmt::HMT_ISA
