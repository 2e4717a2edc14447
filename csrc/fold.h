// Adding up the lanes of a sum that was kept in independent parts.
#pragma once

#include <cstddef>

namespace hmt {

// Adds the upper half to the lower half until one number is left.
template <std::size_t kLanes>
inline __attribute__((always_inline)) float fold(float* lanes) {
  if constexpr (kLanes == 1) {
    return lanes[0];
  } else {
    for (std::size_t k = 0; k < kLanes / 2; ++k) lanes[k] += lanes[k + kLanes / 2];
    return fold<kLanes / 2>(lanes);
  }
}

}  // namespace hmt
