#include "linear/pack.h"

#include <cstring>

namespace hmt {
namespace {

using std::size_t;
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

}  // namespace

void pack_panels(const uint8_t* codes, size_t rows, size_t columns, size_t stride, bool paired,
                 uint8_t* panels) {
  (paired ? pack<true> : pack<false>)(codes, rows, columns, stride, panels);
}

}  // namespace hmt
