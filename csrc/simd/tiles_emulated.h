// AMX's tile instructions in plain C++, for builds that test their kernels on processors without them
// (HMT_EMULATED_TILES).  Ends the process where the processor would fault.  Only for simd/tiles.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace hmt::HMT_ISA::emulated {

struct Tile {
  unsigned rows = 0, row_bytes = 0;
  uint8_t bytes[16][64] = {};
};

inline Tile& tile(int index) {
  static thread_local Tile tiles[8];
  return tiles[index];
}

inline void check(bool valid) {
  if (!valid) std::abort();
}

inline void clear(Tile& t) { std::memset(t.bytes, 0, sizeof t.bytes); }

inline void load_shapes(const void* shapes) {
  const auto* bytes = static_cast<const uint8_t*>(shapes);
  check(bytes[0] == 1 && bytes[1] == 0);
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    Tile& t = tile(i);
    t.row_bytes = row_bytes;
    t.rows = bytes[48 + i];
    check(t.rows <= 16 && t.row_bytes <= 64 && (t.rows == 0) == (t.row_bytes == 0));
    clear(t);
  }
}

inline void release() {
  for (int i = 0; i < 8; ++i) tile(i) = Tile();
}

inline void zero(int index) {
  check(tile(index).rows != 0);
  clear(tile(index));
}

inline void load(int index, const void* base, long stride) {
  Tile& t = tile(index);
  check(t.rows != 0);
  clear(t);
  for (unsigned r = 0; r < t.rows; ++r) {
    std::memcpy(t.bytes[r], static_cast<const uint8_t*>(base) + static_cast<long>(r) * stride,
                t.row_bytes);
  }
}

inline void store(int index, void* base, long stride) {
  const Tile& t = tile(index);
  check(t.rows != 0);
  for (unsigned r = 0; r < t.rows; ++r) {
    std::memcpy(static_cast<uint8_t*>(base) + static_cast<long>(r) * stride, t.bytes[r],
                t.row_bytes);
  }
}

// sums[m][n] += a[m][k] * b[k][n], where a and b hold four bytes or two bf16 in each 32 bits.
template <typename Sum, typename Product>
void multiply(int sums, int a, int b, const Product& product) {
  Tile& c = tile(sums);
  const Tile &left = tile(a), &right = tile(b);
  check(sums != a && sums != b && a != b && c.rows != 0 && left.rows != 0 && right.rows != 0);
  check(c.rows == left.rows && c.row_bytes == right.row_bytes &&
        left.row_bytes == 4 * right.rows && c.row_bytes % 4 == 0);
  for (unsigned m = 0; m < c.rows; ++m) {
    for (unsigned n = 0; n < c.row_bytes / 4; ++n) {
      Sum sum;
      std::memcpy(&sum, c.bytes[m] + 4 * n, sizeof sum);
      for (unsigned k = 0; k < right.rows; ++k) {
        sum = product(sum, left.bytes[m] + 4 * k, right.bytes[k] + 4 * n);
      }
      std::memcpy(c.bytes[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

template <typename A, typename B>
void multiply_bytes(int sums, int a, int b) {
  multiply<int32_t>(sums, a, b, [](int32_t sum, const uint8_t* x, const uint8_t* y) {
    for (int i = 0; i < 4; ++i) sum += static_cast<A>(x[i]) * static_cast<B>(y[i]);
    return sum;
  });
}

// Numbers as they are: tiles take those below 2^-126 for zeros.
inline void multiply_bf16(int sums, int a, int b) {
  multiply<float>(sums, a, b, [](float sum, const uint8_t* x, const uint8_t* y) {
    const auto number = [](const uint8_t* at) {
      const uint32_t bits = (uint32_t{at[0]} << 16) | (uint32_t{at[1]} << 24);
      float value;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    };
    sum += number(x) * number(y);
    return sum + number(x + 2) * number(y + 2);
  });
}

}  // namespace hmt::HMT_ISA::emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(shapes) hmt::HMT_ISA::emulated::load_shapes(shapes)
#define _tile_release() hmt::HMT_ISA::emulated::release()
#define _tile_loadd(t, base, stride) \
  hmt::HMT_ISA::emulated::load(t, base, static_cast<long>(stride))
#define _tile_stored(t, base, stride) \
  hmt::HMT_ISA::emulated::store(t, base, static_cast<long>(stride))
#define _tile_zero(t) hmt::HMT_ISA::emulated::zero(t)
#define _tile_dpbssd(sums, a, b) \
  hmt::HMT_ISA::emulated::multiply_bytes<int8_t, int8_t>(sums, a, b)
#define _tile_dpbsud(sums, a, b) \
  hmt::HMT_ISA::emulated::multiply_bytes<int8_t, uint8_t>(sums, a, b)
#define _tile_dpbf16ps(sums, a, b) hmt::HMT_ISA::emulated::multiply_bf16(sums, a, b)
