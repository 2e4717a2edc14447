#include "base/bandwidth.h"

namespace hmt::HMT_ISA {
namespace {

// Written so that compilers vectorise it.
uint64_t sum_range(const uint64_t* words, std::size_t begin, std::size_t end) {
  uint64_t sum = 0;
  for (std::size_t i = begin; i < end; ++i) sum += words[i];
  return sum;
}

}  // namespace

const BandwidthKernels bandwidth_kernels = {sum_range};

}  // namespace hmt::HMT_ISA
