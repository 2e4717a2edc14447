// How many rows a thread takes at a time.
#pragma once

#include <cstddef>

namespace hmt {

// Below this many numbers a kernel is done before another thread has woken (some microseconds).
constexpr std::size_t kGrainNumbers = std::size_t{32} << 10;

inline std::size_t rows_per_grain(std::size_t numbers_per_row) {
  const std::size_t rows = kGrainNumbers / (numbers_per_row > 0 ? numbers_per_row : 1);
  return rows > 0 ? rows : 1;
}

}  // namespace hmt
