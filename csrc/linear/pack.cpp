#include "linear/pack.h"

#include <algorithm>
#include <cstring>

#include "base/thread_pool.h"

namespace hmt {
namespace {

using std::size_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr size_t kRows = 16, kColumns = 32;  // of a block

// The low four bytes of x in every second byte.
uint64_t spread(uint64_t x) {
  x &= 0xffffffff;
  x = (x | x << 16) & 0x0000ffff0000ffff;
  return (x | x << 8) & 0x00ff00ff00ff00ff;
}

// Bytes of one row of a block: code n in the low nibble, code 16 + n in the high one.
template <bool kPaired>
void pack_row(const uint8_t* codes, uint8_t* bytes) {
  if constexpr (kPaired) {
    // Eight bytes at once: in one loop over bytes compilers do not see registers.
    constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0f;
    uint64_t low, high;
    std::memcpy(&low, codes, 8);
    std::memcpy(&high, codes + 8, 8);
    const uint64_t even = (low & kLow) | (high & kLow) << 4;
    const uint64_t odd = (low >> 4 & kLow) | (high & ~kLow);
    const uint64_t both[] = {spread(even) | spread(odd) << 8,
                             spread(even >> 32) | spread(odd >> 32) << 8};
    std::memcpy(bytes, both, 16);
  } else {
    const uint8_t* high = codes + kColumns / 2;
    for (size_t i = 0; i < kColumns / 2; ++i) {
      bytes[i] = static_cast<uint8_t>(codes[i] | high[i] << 4);
    }
  }
}

template <bool kPaired>
void pack(const uint8_t* codes, size_t rows, size_t columns, size_t stride, uint8_t* panels) {
  constexpr size_t kBytes = kColumns / (kPaired ? 2 : 1);
  const size_t blocks = columns / kColumns;
  for (size_t first = 0; first < rows; first += kRows) {
    const size_t here = rows - first < kRows ? rows - first : kRows;
    for (size_t b = 0; b < blocks; ++b, panels += kRows * kColumns / 2) {
      if (here < kRows) std::memset(panels, 0, kRows * kColumns / 2);
      for (size_t r = 0; r < here; ++r) {
        uint8_t bytes[kColumns / 2];
        pack_row<kPaired>(codes + (first + r) * stride + b * kBytes, bytes);
        for (size_t j = 0; j < 4; ++j) std::memcpy(panels + (j * kRows + r) * 4, bytes + 4 * j, 4);
      }
    }
  }
}

// Of eight rows the bytes 4 j to 4 j + 3 of a block, whose first column is at `words`.
void take_eight(const uint32_t* words, size_t stride, size_t j, uint32_t* rows) {
  constexpr uint32_t kLow = 0x0f0f0f0f;
  std::memset(rows, 0, 8 * sizeof *rows);
  for (size_t i = 0; i < 4; ++i) {
    const uint32_t low = words[(4 * j + i) * stride];
    const uint32_t high = words[(4 * j + i + kColumns / 2) * stride];
    const uint32_t even = (low & kLow) | (high & kLow) << 4;
    const uint32_t odd = (low >> 4 & kLow) | (high & ~kLow);
    for (size_t m = 0; m < 4; ++m) {  // nibbles 2 m and 2 m + 1
      const size_t row = m / 2 + 4 * (m % 2);
      rows[row] |= (even >> 8 * m & 255) << 8 * i;
      rows[row + 2] |= (odd >> 8 * m & 255) << 8 * i;
    }
  }
}

// Some panels together, as rows of words are far apart: 64 bytes of each are used at once.
void pack_awq_panels(const uint32_t* words, size_t rows, size_t columns, size_t stride,
                     size_t begin, size_t end, uint8_t* panels) {
  const size_t blocks = columns / kColumns;
  for (size_t b = 0; b < blocks; ++b) {
    for (size_t panel = begin; panel < end; ++panel) {
      uint8_t* block = panels + (panel * blocks + b) * (kRows * kColumns / 2);
      for (size_t half = 0; half < 2; ++half) {
        const size_t first = panel * kRows + 8 * half;
        const size_t here = rows > first ? std::min<size_t>(8, rows - first) : 0;
        for (size_t j = 0; j < 4; ++j) {
          uint32_t some[8] = {};
          if (here > 0) take_eight(words + b * kColumns * stride + first / 8, stride, j, some);
          std::fill(some + here, some + 8, 0);
          std::memcpy(block + (j * kRows + 8 * half) * 4, some, sizeof some);
        }
      }
    }
  }
}

}  // namespace

void pack_awq(const uint32_t* words, size_t rows, size_t columns, size_t stride, uint8_t* panels,
              size_t threads) {
  constexpr size_t kTogether = 8;
  const size_t count = (rows + kRows - 1) / kRows;
  share((count + kTogether - 1) / kTogether, 1, threads, [&](size_t begin, size_t end) {
    for (size_t at = begin * kTogether; at < std::min(count, end * kTogether); at += kTogether) {
      pack_awq_panels(words, rows, columns, stride, at, std::min(count, at + kTogether), panels);
    }
  });
}

void pack_panels(const uint8_t* codes, size_t rows, size_t columns, size_t stride, bool paired,
                 uint8_t* panels) {
  (paired ? pack<true> : pack<false>)(codes, rows, columns, stride, panels);
}

}  // namespace hmt
