// Reading memory as fast as it can be read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/isa.h"

namespace hmt {

// The sum, modulo 2^64, of the buffer's 64-bit words; reads every one once, on the whole pool.
uint64_t sum_words(const uint64_t* words, std::size_t count);

struct BandwidthKernels {
  uint64_t (*sum_range)(const uint64_t* words, std::size_t begin, std::size_t end);
};
HMT_TABLES(BandwidthKernels, bandwidth_kernels)

}  // namespace hmt
